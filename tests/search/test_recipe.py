"""A recipe that is written composes to the very run that it was made of, wherever that run was to be."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import yaml

from launcher.cli import recipes
from launcher.cli.on_cluster import FOLDER, alone
from launcher.config import Config, compose, resolve
from launcher.config.hardware import hardware_files
from launcher.planning.recipe import recipe, underived
from launcher.trials.identity import trial_id
from trainer.shared.run.derived import resolve_model
from trainer.shared.run.schema import LayoutConfig, ModelConfig, ShardingConfig

RUNS = {
    "another model and its data": ["model=llama_tiny", "data=synthetic", "cluster.gpus_per_node=2", "run.seed=7", "tracking.experiment=mine"],
    "a corpus elsewhere": ["data.path=corpora/mine", "data.source=texts", "cluster.max_processes=4", "optimizer.lr=0.002"],
    "a place with keys of its own": [
        "cluster=slurm_pyxis", "cluster.partition=big", "cluster.container.image=a.sqsh", "cluster.env.NAME=1", "data=synthetic",
        'cluster.srun_args=["--mpi=none"]', "cluster.gpus_per_node=4",
    ],
    "what another recipe says": ["recipe=gpt3_20b", "cluster=kubernetes", "cluster.container.image=a:1", "cluster.node_selector.gpu=a100"],
    "a tuning": ["model=llama_tiny", "data=synthetic", "tune.method=lora", "tune.rank=4", "tune.targets=[qkv]", "cluster.gpus_per_node=4"],
    "a device without a name": ["hardware=h100", "cluster.hardware.memory_gb=40", "cluster.nodes=2", "data=synthetic"],
}  # fmt: skip


def written(config: Config, name: str = "mine") -> Config:
    """``config`` as a recipe, composed again by its name."""
    made = recipe(config, compose(alone(config)), hardware_files())
    recipes.write(FOLDER / f"{name}.yaml", made, "", "--out")
    return compose([f"recipe={name}"])


@pytest.mark.parametrize("overrides", RUNS.values(), ids=RUNS)
def test_a_recipe_composes_to_the_run_that_it_was_made_of(overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = compose(overrides)
    layout = LayoutConfig(tensor=2, micro_batch=2, sequence_parallel=True) if config.cluster.world_size > 2 else LayoutConfig()
    made, again = resolve(dataclasses.replace(config, layout=layout)), resolve(written(dataclasses.replace(config, layout=layout)))
    assert again.train_config() == made.train_config() and again.cluster == made.cluster
    assert trial_id(again) == trial_id(made)


def test_sharding_and_replicas_of_a_layout_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    layout = LayoutConfig(tensor=2, data=4, sharding=ShardingConfig(1, 2, 4))
    config = dataclasses.replace(compose(["data=synthetic", "cluster.gpus_per_node=8"]), layout=layout)
    assert vars(resolve(written(config)).layout) == vars(layout)


def test_what_is_derived_is_left_out_of_a_resolved_model_too() -> None:
    assert underived(resolve_model(ModelConfig("llama", vocab=1000))) == ModelConfig("llama", vocab=1000)


def test_a_machine_that_was_measured_here_is_named_and_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    device = Path("runs/hardware/mine.yaml")
    device.parent.mkdir(parents=True)
    device.write_text("# @package cluster.hardware\nname: mine\npeak_tflops: {fp32: 1.0}\ncalibration: {matrix: [[1, 2.0]]}\n")
    config = compose(["hardware=mine", "data=synthetic"])
    assert resolve(written(config)).cluster.hardware == config.cluster.hardware
    assert yaml.safe_load((FOLDER / "mine.yaml").read_text()) == {
        "defaults": [{"override /hardware": "mine"}], "data": {"kind": "synthetic"},
    }  # fmt: skip
