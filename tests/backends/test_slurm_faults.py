"""Faults in the middle of a real training on Slurm: a node loses power, a more important job comes, the time is up.

They happen in one sweep, each to a trial of its own; the trainer is the real one, slowed down until it is interrupted. What
must come out is what a training without faults gives, on the digit.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.config.schema import Config
from launcher.sweep.search import measurement
from launcher.trials.identity import trial_id
from launcher.trials.store import Record, Store
from tests.backends.slurm_support import Running, interpreter, run, squeue, trial, warmth
from tests.clusters.slurm import Cluster
from tests.clusters.slurm.fixture import Slurm
from tests.farm import Farm
from tests.sweep.support import until
from trainer.shared.records.outcome import Status
from trainer.shared.run.files import read_json

SLOW: dict[str, Any] = {"exclusive": True, "health_check": False}
STEPS = 40
"""So many that the slow first attempt cannot make them all: it would take longer than the time limit."""
EVERY = 2


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    return interpreter(tmp_path_factory.mktemp("slow"), "tests.backends.slow_trainer")


@pytest.mark.campaign("slurm")
def test_a_training_that_was_put_back_into_the_queue_goes_on_under_another_layout(idle: Cluster, tmp_path: Path, python: str) -> None:
    """The trial is another one, and begins with attempt 0; the folder of checkpoints has seen attempt 1 of the first."""
    first = trial(steps=STEPS, every=EVERY, python=python, env={"SLOW_ATTEMPTS": "0 1"}, exclusive=True)
    directory = tmp_path / "trials" / trial_id(first)
    sweep = Running(tmp_path, first)
    until(lambda: list(directory.glob("checkpoints/step-*")))
    handle = until(lambda: (read_json(directory / "trial.json") or {}).get("handle"))
    subprocess.run(["scontrol", "requeue", handle["job_id"]], check=True)
    until(lambda: list(directory.glob("checkpoints/step-*-start-1")))
    Store(tmp_path).ask_to_stop(Store(tmp_path).load(directory.name))
    (stopped,) = sweep.ended()
    assert stopped.status is Status.STOPPED and stopped.attempt > 0

    saved = max(int(path.name.split("-")[1]) for path in directory.glob("checkpoints/step-*"))
    second = trial(steps=saved + 4, every=EVERY, ranks=2, nodes=2)
    checkpoint = dataclasses.replace(second.run.checkpoint, dir=str(directory / "checkpoints"))
    (record,) = run(tmp_path, dataclasses.replace(second, run=dataclasses.replace(second.run, checkpoint=checkpoint)))
    assert record.status is Status.DONE, record.detail
    assert [line["step"] for line in metrics(record)] == list(range(saved + 1, saved + 5))


_WARN = 'scancel --batch --signal=USR1 "$SLURM_JOB_ID"; sleep 2'


@pytest.mark.parametrize("check", [
    pytest.param(None, id="setup"), pytest.param(_WARN, id="health check", marks=pytest.mark.campaign("slurm")),
    pytest.param(f"{_WARN}; exit 9", id="health check that ends with it", marks=pytest.mark.campaign("slurm")),
])  # fmt: skip
def test_a_job_that_is_warned_before_its_ranks_begin_puts_itself_back_into_the_queue(
    slurm: Slurm, tmp_path: Path, check: str | None
) -> None:
    slurm.breakable()
    either, seen = tmp_path / "either", tmp_path / "seen"
    either.write_text(
        f'#!/bin/sh\n[ "$4" = trainer.health ] && mkdir {seen} && {{ {check or ":"}; }}\nexec {warmth().get("python", sys.executable)} "$@"\n'
    )
    either.chmod(0o755)
    setup = [] if check else ["[ $trireme_attempt -gt 0 ] || kill -USR1 $$"]
    (record,) = run(tmp_path / "runs", trial(every=1, setup=setup, python=str(either), health_check=bool(check)))
    assert record.status is Status.DONE, record.detail
    restarts = dict(squeue("JobArrayID", "RestartCnt"))
    assert record.handle is not None and record.handle["attempt"] == 0 and int(restarts[record.handle["job_id"]]) == 1
    logs = record.directory / "logs"
    assert "stopped on request (code 75)" in (logs / "attempt0.slurm.log").read_text()
    assert not (logs / "attempt0.rank0.log").exists() and (logs / "attempt1.rank0.log").exists()


def _lines(directory: Path) -> list[dict[str, Any]]:
    """Whole lines of a trial's metrics so far."""
    path = directory / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


FAULTS: dict[str, dict[str, Any]] = {
    "power cut": {"ranks": 2, "nodes": 2}, "preemption": {"partition": "low", "stop_signal": 15}, "time limit": {"time": 1},
}  # fmt: skip
IN_CAMPAIGN = pytest.param("time limit", marks=pytest.mark.campaign("slurm"))
"""Slurm's shortest limit is a minute, and it looks twice a minute."""


@pytest.fixture(scope="module")
def trials(
    request: pytest.FixtureRequest, slurm: Slurm, tmp_path_factory: pytest.TempPathFactory, python: str
) -> Iterator[dict[str, Record]]:
    """The records of the trials, by what happened to them."""
    cluster = slurm.breakable()
    asked = [what for what in FAULTS if any(what in item.name for item in request.session.items if item.path == request.path)]
    configs = {what: trial(steps=STEPS, every=EVERY, python=python, **SLOW, **FAULTS[what]) for what in asked}
    runs = tmp_path_factory.mktemp("faults")
    sweep = Running(runs, *configs.values())
    nodes = {what: _nodes_after_some_steps(runs, config) for what, config in configs.items()}
    if "power cut" in nodes:
        lost = nodes["power cut"][1]  # not the one that the job's script runs on
        cluster.kill(lost)
        cluster.output("scontrol", "update", f"nodename={lost}", "state=down", "reason=power cut")  # as it would say itself, later
    if "preemption" in nodes:
        place = ["--partition=high", "--exclusive", f"--nodelist={nodes['preemption'][0]}"]
        cluster.output("sbatch", *place, "--output=/dev/null", "--wrap=sleep 1")
    records = dict(zip(configs, sweep.ended()))
    if "power cut" in records:
        records["power cut"].predicted = {"killed": nodes["power cut"][1]}
    yield records
    cluster.mend()


def _nodes_after_some_steps(runs: Path, config: Config) -> list[str]:
    """Where a trial runs, once it has saved a checkpoint."""
    directory = runs / "trials" / trial_id(config)
    until(lambda: list(directory.glob("checkpoints/step-*")))
    return until(lambda: (read_json(directory / "trial.json") or {}).get("nodes"))


def metrics(record: Record) -> list[dict[str, Any]]:
    return _lines(record.directory)


@pytest.mark.parametrize("what", ["power cut", "preemption", IN_CAMPAIGN])
def test_the_training_goes_on_from_its_checkpoint_and_is_finished_once(idle: Cluster, trials: dict[str, Record], what: str) -> None:
    record = trials[what]
    assert record.status is Status.DONE, record.detail
    lines = metrics(record)
    attempts = [line["attempt"] for line in lines]
    assert attempts == sorted(attempts) and len(set(attempts)) > 1, "attempts follow one another"
    resumed = next(line["step"] for line in lines if line["attempt"] == attempts[-1])
    assert resumed > 1, "the last attempt did not begin anew"
    assert (record.read_result() or {})["attempt"] == attempts[-1] == record.attempt


@pytest.mark.parametrize("what", ["power cut", "preemption", IN_CAMPAIGN])
def test_every_attempt_stands_in_the_history_with_its_hours_and_counts_in_their_sum(
    idle: Cluster, trials: dict[str, Record], what: str
) -> None:
    record = trials[what]
    ran = {line["attempt"] for line in metrics(record)}
    entries = {entry["attempt"]: entry for entry in record.history}
    assert ran <= set(entries) and all(entries[attempt]["ended"] > entries[attempt]["started"] > 0 for attempt in ran)
    whole = sum(entries[attempt]["ended"] - entries[attempt]["started"] for attempt in ran)
    assert measurement(record, 0.0).gpu_hours * 3600 / record.world_size == pytest.approx(whole, abs=5.0)


@pytest.mark.parametrize("what", ["power cut", "preemption", IN_CAMPAIGN])
def test_losses_are_those_of_a_training_without_faults(idle: Cluster, trials: dict[str, Record], farm: Farm, what: str) -> None:
    record = trials[what]
    undisturbed = farm.train({**record.config, "run": {**record.config["run"], "checkpoint": {}}}, record.world_size).checked()
    assert (record.read_result() or {})["losses"] == undisturbed.result["losses"]


@pytest.mark.parametrize("what", ["preemption", IN_CAMPAIGN])
def test_a_warned_job_loses_no_step(idle: Cluster, trials: dict[str, Record], what: str) -> None:
    """Where Slurm announces the end, ranks save a checkpoint at the step that they are in."""
    steps = [line["step"] for line in metrics(trials[what])]
    assert steps == sorted(set(steps)), "no step was made twice"


@pytest.mark.parametrize("what", ["power cut"])
def test_a_dead_node_is_not_used_again(idle: Cluster, trials: dict[str, Record], what: str) -> None:
    assert trials[what].predicted is not None
    assert trials[what].predicted["killed"] not in trials[what].nodes


@pytest.mark.parametrize("what", ["preemption", IN_CAMPAIGN])
def test_a_warned_job_puts_itself_back_into_the_queue(idle: Cluster, trials: dict[str, Record], what: str) -> None:
    """No second submission was needed: it is the same job, started again. Slurm also counts starts that never reach the script."""
    record, restarts = trials[what], dict(squeue("JobArrayID", "RestartCnt"))
    assert record.handle is not None and record.handle["attempt"] == 0
    assert int(restarts[record.handle["job_id"]]) > 0 and record.attempt > 0
