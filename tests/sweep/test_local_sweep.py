"""Sweeps on this machine, with real processes whose training is played: reasons, resumption, and how many ranks live at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest

from launcher.backends.contract import Backend
from launcher.backends.pool import Backends
from launcher.config import resolve
from launcher.config.schema import ClusterConfig, LocalCluster, SweepConfig
from launcher.sweep.run import run_sweep
from launcher.trials.store import Record
from tests.sweep.support import local, points, starts, sweep, trial
from trainer.shared.records.outcome import Reason, Status
from trainer.shared.run.schema import LayoutConfig

pytestmark = pytest.mark.slow

SIX = LocalCluster(gpus_per_node=4, max_processes=6)


@pytest.mark.parametrize(("behaviour", "reason", "detail"), [
    ("fail 1 out_of_memory", Reason.OUT_OF_MEMORY, "rank 1: played failure"),
    ("fail 0 numerics", Reason.NUMERICS, "rank 0: played failure"),
    ("fail 1 configuration", Reason.CONFIGURATION, "rank 1: played failure"),
    ("die 1 9", Reason.NODE, "rank 1 was killed from outside (SIGKILL)"),
    ("die 0 11", Reason.ERROR, "rank 0 crashed (SIGSEGV)"),
    ("exit 1 3", Reason.ERROR, "rank 1 exited with code 3"),
])  # fmt: skip
def test_a_failed_trial_has_one_reason_the_rank_that_it_came_from_and_a_result(
    tmp_path: Path, behaviour: str, reason: Reason, detail: str
) -> None:
    failed, other = sweep(tmp_path, trial(behaviour, tensor=2), trial("ok", seed=2), retries=0)
    assert (failed.status, failed.reason, failed.detail) == (Status.FAILED, reason, detail)
    assert (failed.read_result() or {})["status"] == "failed"
    assert other.status is Status.DONE


def test_a_training_longer_than_its_time_limit_goes_on_attempt_by_attempt_to_its_end(tmp_path: Path) -> None:
    (record,) = sweep(tmp_path, trial("resume 2", steps=8), retries=0)
    assert (record.status, record.attempt, starts(record)) == (Status.DONE, 3, [0, 1, 2, 3])
    assert [entry["reason"] for entry in record.history] == ["time limit"] * 3 + [None]


def test_ranks_that_do_not_end_after_their_result_are_ended_and_the_result_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (record,) = sweep(tmp_path, trial("linger", cluster=LocalCluster(gpus_per_node=4, linger_s=0.2)))
    assert record.status is Status.DONE


@pytest.mark.parametrize("damage", ["", "layout:\n", "run:\n", None])
def test_a_trial_is_measured_again_as_its_id_says_whatever_became_of_its_configuration(tmp_path: Path, damage: str | None) -> None:
    """Cut short at a section, empty, or another run's."""
    (record,) = sweep(tmp_path, trial(steps=4, seed=7))
    path = record.directory / "config.yaml"
    whole = path.read_text()
    path.write_text(whole.replace("steps: 4", "steps: 3") if damage is None else whole[: whole.index(damage)])
    (record.directory / "result.json").unlink()
    (again,) = sweep(tmp_path, trial(steps=4, seed=7))
    assert (again.id, again.status, path.read_text()) == (record.id, Status.DONE, whole)
    assert (again.read_last_step() or {})["step"] == 4


class Crowd:
    """Counts the ranks that live at once."""

    def __init__(self) -> None:
        self.most = 0
        self.trials = 0

    def begin(self) -> None:
        """Nothing to do."""

    def on_trial(self, record: Record) -> None:
        """Counted when polled."""

    def on_poll(self, records: Sequence[Record]) -> None:
        self.most = max(self.most, sum(record.world_size for record in records))
        self.trials = max(self.trials, len(records))

    def close(self) -> None:
        """Nothing is held."""


@pytest.mark.parametrize(("max_parallel", "most", "trials"), [(1, 2, 1), (2, 4, 2), (0, 6, 3)])
def test_trials_run_side_by_side_only_as_far_as_asked_and_as_processes_allow(
    tmp_path: Path, max_parallel: int, most: int, trials: int
) -> None:
    crowd = Crowd()
    configs = [trial("sleep 0.1", tensor=2, seed=seed, cluster=SIX) for seed in range(4)]
    with Backends(local) as backends:
        records = run_sweep("demo", points(*configs), SweepConfig(dir=str(tmp_path), max_parallel=max_parallel), backends, [crowd])
    assert [record.status for record in records] == [Status.DONE] * 4
    assert (crowd.most, crowd.trials) == (most, trials)


def test_a_trial_with_more_ranks_than_may_live_at_once_is_refused_and_the_others_run(tmp_path: Path) -> None:
    cluster = LocalCluster(gpus_per_node=4, max_processes=2)
    large, small = sweep(tmp_path, trial(tensor=4, cluster=cluster), trial(tensor=2, cluster=cluster))
    assert (large.status, large.reason) == (Status.FAILED, Reason.CONFIGURATION)
    assert "needs 4 ranks, and cluster.max_processes=2" in large.detail
    assert small.status is Status.DONE


def test_workers_start_once_for_trials_of_every_size(tmp_path: Path) -> None:
    made: list[ClusterConfig] = []

    def counted(cluster: ClusterConfig) -> Backend:
        made.append(cluster)
        return local(cluster)

    sizes = [
        resolve(dataclasses.replace(trial(), layout=LayoutConfig(tensor=n, data=1), cluster=LocalCluster(gpus_per_node=n)))
        for n in (1, 4, 2)
    ]
    records = sweep(tmp_path, *sizes, backends=counted)
    assert [record.status for record in records] == [Status.DONE] * 3
    assert [cluster.world_size for cluster in made] == [4]


def test_folders_with_hostile_names_are_only_names(tmp_path: Path) -> None:
    for name in ("a b", "$(touch owned)", "{rank} {}", "'\"", "-rf", "né\u2028"):
        (record,) = sweep(tmp_path / name, trial("ok", tensor=2))
        assert record.status is Status.DONE and len(list(record.directory.glob("logs/*.log"))) == 2
    assert not list(tmp_path.rglob("owned")) and not Path("owned").exists()


def test_what_was_submitted_is_kept_beside_the_logs_of_its_attempt(tmp_path: Path) -> None:
    (record,) = sweep(tmp_path, trial("once node"))
    for attempt in (0, 1):
        text = (record.directory / "logs" / f"attempt{attempt}.submitted.txt").read_text()
        assert f"--attempt {attempt}" in text and "trainer" in text
