"""Jobs composed by way of a shared composition are those that Hydra composes one by one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

from launcher.config.compose import plain_errors, register_schema, to_config
from launcher.config.folders import conf_dir
from launcher.config.jobs import Jobs
from trainer.spec import ConfigError

Loaded = tuple[Any, DictConfig]


@pytest.fixture(scope="module")
def loaded() -> Iterator[Loaded]:
    """Hydra's loader, and the configuration that a sweep starts from."""
    register_schema()
    with initialize_config_dir(config_dir=str(conf_dir()), version_base=None):
        loader = GlobalHydra.instance().config_loader()
        yield loader, loader.load_configuration("config", [], RunMode.MULTIRUN)


def content(config: DictConfig) -> dict[str, Any]:
    """All but what Hydra notes about itself, interpolations as they are."""
    return {str(name): OmegaConf.to_container(config)[name] for name in config if name != "hydra"}  # type: ignore[call-overload]


def outcome(composing: Any, overrides: list[str]) -> object:
    try:
        return content(composing(overrides))
    except Exception as error:
        return type(error), str(error)


LINES = st.sampled_from(
    [
        "model=gpt_tiny", "model=llama_tiny", "cluster=slurm", "hardware=h100", "data=synthetic", "layout.tensor=2", "layout.tensor=4", "run.steps=5",
        "run.seed=3", "model.layers=6", "model.ffn=null", "layout.stage_layers=[1,2,1]", "layout.sharding={params: 2}", "layout.sharding.params=4",
        "sweep.name='a b'", "run.precision=bf16", "data.path=${sweep.dir}/x", "+run.unknown=1", "run.unknown=1", "++cluster.env.A=1", "~data.path",
        "cluster.env.A=2", "layout={tensor: 3}", "layout.tensor=two", "hydra.job.name=x", "layout.nothing.at.all=1", "model@other=gpt_tiny", "run.steps=${run.seed}",
    ]
)  # fmt: skip


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example([["run.unknown=1", "+run.unknown=1"]])
@example([["+run.unknown=1", "run.unknown=2"]])
@example([["++cluster.env.A=1", "cluster.env.A=2", "++cluster.env.A=1"]])
@example([["layout.tensor=4", "layout={tensor: 3}"]])
@example([["layout.nothing.at.all=1", "+run.unknown=1", "+run.unknown=1"]])
@example([["data.path=x", "~data.path"]])
@given(st.lists(st.lists(LINES, max_size=4), min_size=1, max_size=4))
def test_every_job_is_what_hydra_composes(loaded: Loaded, jobs: list[list[str]]) -> None:
    loader, config = loaded
    composer = Jobs(loader, config)
    expected = [outcome(lambda lines: loader.load_sweep_config(config, lines), overrides) for overrides in jobs]
    for _ in range(2):  # the second time what was composed is there
        assert [outcome(composer.compose, overrides) for overrides in jobs] == expected


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(
    [["layout.tensor=2"], ["layout.tensor=two", "cluster.nodes=x"], ["cluster.nodes=0", "run.steps=0"], ["run.seed=007"], ["run.seed=-3"]]
)
@example([["cluster.env.A=2", "layout.tensor=two"]])
@example([["run.steps=${run.seed}"], ["run.seed=5"], ["data.path=${sweep.dir}/x", "run.seed=5"]])
@given(st.lists(st.lists(LINES, max_size=4), min_size=1, max_size=4))
def test_every_typed_job_is_the_typed_form_of_what_hydra_composes(loaded: Loaded, jobs: list[list[str]]) -> None:
    def typed(composing: Any, overrides: list[str]) -> object:
        try:
            with plain_errors():
                return composing(overrides)
        except ConfigError as error:
            return str(error)

    loader, config = loaded
    composer = Jobs(loader, config)
    for overrides in [*jobs, *jobs, *jobs]:  # the third time typed
        assert typed(composer.config, overrides) == typed(lambda lines: to_config(loader.load_sweep_config(config, lines)), overrides)


def test_jobs_do_not_share_what_they_set(loaded: Loaded) -> None:
    composer = Jobs(*loaded)
    jobs = [
        to_config(composer.compose([f"run.steps={n}", *more]))
        for n, more in ((3, []), (4, ["layout.tensor=2"]), (5, ["run.seed=7"]), (6, []))
    ]
    assert [(job.run.steps, job.layout.tensor, job.run.seed) for job in jobs] == [(3, 1, 1234), (4, 2, 1234), (5, 1, 7), (6, 1, 1234)]


def test_hydra_is_asked_twice_for_all_jobs_of_the_same_choices(loaded: Loaded) -> None:
    asked: list[list[str]] = []

    class Counting:
        def load_sweep_config(self, config: DictConfig, overrides: list[str]) -> DictConfig:
            asked.append(overrides)
            return loaded[0].load_sweep_config(config, overrides)  # type: ignore[no-any-return]

    composer = Jobs(Counting(), loaded[1])
    for model in ("gpt_tiny", "llama_tiny"):
        for steps in range(2, 12):
            composer.compose([f"model={model}", f"run.steps={steps}"])
    assert asked == [["model=gpt_tiny", "run.steps=2"], ["model=gpt_tiny"], ["model=llama_tiny", "run.steps=2"], ["model=llama_tiny"]]
