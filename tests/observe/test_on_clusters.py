"""A program that knows nothing of this project is searched on a real Slurm and on a real Kubernetes: started, read, ranked."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from launcher.cli import search
from launcher.cli.main import main
from launcher.config import compose
from launcher.config.schema import ClusterConfig
from launcher.goals.goal import Asked
from launcher.goals.training.goal import GOAL
from launcher.trials.store import Store
from tests.backends.slurm_support import CLUSTER, PROJECT, warmth
from tests.clusters.kubernetes.fixture import Kubernetes
from tests.clusters.slurm.fixture import Slurm
from trainer.shared.records.outcome import Reason, Status

EXAMPLE = PROJECT / "examples" / "own_trainer"
RUN = [
    *("model.layers=2", "model.hidden=32", "model.heads=2", "model.vocab=64", "model.seq=16", "run.global_batch=8", "run.steps=5"),
    *(
        "trainer=own",
        f"trainer.launch.script={EXAMPLE}/train.py",
        "hardware=cpu",
        "data=synthetic",
        "sweep.name=other",
        "search.start_s=1",
        "search.nodes=full",
    ),
]


def searched(cluster: ClusterConfig, trials: int, capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    """A search of ``trials`` trials of the example; what ``trireme rank`` says of them."""
    config = compose([*RUN, f"search.max_trials={trials}"], EXAMPLE)
    found = dataclasses.replace(cluster, hardware=config.cluster.hardware)
    asked = Asked(RUN, lambda words: compose(words, EXAMPLE))
    assert search.run(GOAL, dataclasses.replace(config, cluster=found), compose(search.alone(config)), asked, {"micro_batch": [1, 2]}) == 0
    capsys.readouterr()
    assert main(["rank", "other", "--json"]) == 0
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


def check(ranked: list[dict[str, object]], trials: int, ranks: int) -> None:
    """Each trial is ranked by the times that its own log tells, and all of them train one model."""
    assert [trial["place"] for trial in ranked] == list(range(1, trials + 1))
    for trial in ranked:
        folder = Path(str(trial["dir"]))
        log = (folder / "logs" / "attempt0.rank0.log").read_text()
        told = [float(ms) / 1e3 for ms in re.findall(r"took ([\d.]+)ms", log)]
        result = json.loads((folder / "result.json").read_text())
        assert result["step_times_s"] == pytest.approx(told) and len(told) == 5
        assert (result["world_size"], result["attempt"], trial["other_model"]) == (ranks, 0, False)
        assert len((folder / "metrics.jsonl").read_text().splitlines()) == 5
    times = [trial["step_time_s"] for trial in ranked]
    assert times == sorted(times)  # type: ignore[type-var]


def check_enough(cluster: ClusterConfig) -> None:
    """All steps would take days: a trial ends once its step time is known, and rank 0's result comes home."""
    words = (
        *("model=gpt_tiny", "data=synthetic", "hardware=cpu", "run.global_batch=8", "run.steps=1000000", "sweep.name=brief"),
        *("search.max_trials=1", "search.enough=0.5", "search.nodes=full"),
    )
    config = compose(words)
    found = dataclasses.replace(cluster, hardware=config.cluster.hardware)
    asked = Asked(words, compose)
    assert search.run(GOAL, dataclasses.replace(config, cluster=found), compose(search.alone(config)), asked, {"micro_batch": [1]}) == 0
    (record,) = Store("runs").sweep("brief").records
    assert (record.status, record.reason, record.attempt) == (Status.DONE, Reason.MEASURED, 0)
    result = record.read_result() or {}
    assert 6 <= len(result["step_times_s"]) < 1000000 and result["message"].endswith("of 999998 measured steps")
    assert result["peak_memory_bytes"] > 0 and result["communication"], "what rank 0 wrote, not what its steps tell"


def check_pairs(cluster: ClusterConfig, capsys: pytest.CaptureFixture[str]) -> None:
    """An encoder and its decoder: layouts that cut stages and matrices train one model, ranked by what they took."""
    words = [
        *("model=t5_tiny", "model.hidden=32", "model.ffn=64", "model.vocab=300", "model.seq=32", "data=synthetic", "hardware=cpu"),
        *("run.global_batch=4", "run.steps=5", "sweep.name=pairs", "search.max_trials=3", "search.nodes=full", "search.enough=0"),
    ]
    config = compose(words)
    found = dataclasses.replace(cluster, hardware=config.cluster.hardware)
    asked = Asked(words, compose)
    assert search.run(GOAL, dataclasses.replace(config, cluster=found), compose(search.alone(config)), asked, {}) == 0
    capsys.readouterr()
    assert main(["rank", "pairs", "--json"]) == 0
    ranked = json.loads(capsys.readouterr().out)
    assert [(trial["place"], trial["other_model"]) for trial in ranked] == [(1, False), (2, False), (3, False)]
    assert len({trial["dir"] for trial in ranked}) == 3


@pytest.mark.campaign("slurm")
def test_layouts_of_an_encoder_and_its_decoder_are_searched_on_a_real_slurm(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    check_pairs(dataclasses.replace(CLUSTER, nodes=2), capsys)


@pytest.mark.campaign("kubernetes")
def test_layouts_of_an_encoder_and_its_decoder_are_searched_on_a_real_kubernetes(
    real_node: Kubernetes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with real_node.namespace() as namespace:
        check_pairs(real_node.cluster(namespace, nodes=2, gpus_per_node=1), capsys)


@pytest.mark.parametrize(("nodes", "trials"), [(2, 2), pytest.param(4, 3, marks=pytest.mark.campaign("slurm"))])
def test_on_nodes_of_a_real_slurm(
    slurm: Slurm, tmp_path: Path, nodes: int, trials: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    check(searched(dataclasses.replace(CLUSTER, nodes=nodes, **warmth()), trials, capsys), trials, ranks=nodes)
    assert compose(["recipe=other"]).trainer.launch.script == f"{EXAMPLE}/train.py"
    words = Path("runs/recipe/other.winner/command.sh").read_text()
    assert f"torchrun --nnodes={nodes} --nproc-per-node=1" in words and "--width" in words


@pytest.mark.campaign("slurm")
def test_a_trial_on_a_real_slurm_ends_when_its_step_time_is_known(slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check_enough(dataclasses.replace(CLUSTER, nodes=2))


@pytest.mark.campaign("kubernetes")
def test_on_two_pods_of_a_real_kubernetes(
    real_node: Kubernetes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with real_node.namespace() as namespace:
        check(searched(real_node.cluster(namespace, nodes=2, gpus_per_node=1), 2, capsys), 2, ranks=2)
        check_enough(real_node.cluster(namespace, nodes=2, gpus_per_node=1))
