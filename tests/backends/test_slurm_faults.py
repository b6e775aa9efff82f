"""Faults in the middle of a real training on Slurm: a node loses power, a more important job comes, the time is up.

All three happen in one sweep, each to a trial of its own; the trainer is the real one, slowed down until it is interrupted. What
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
from launcher.trials.identity import trial_id
from launcher.trials.store import Record, Store
from tests.backends.slurm_support import Running, interpreter, run, squeue, trial
from tests.clusters.slurm.fixture import Slurm
from tests.sweep.support import until
from trainer.spec import Status
from trainer.spec.files import read_json
from trainer.testing import Farm

SLOW: dict[str, Any] = {"exclusive": True, "health_check": False}
STEPS = 200
"""So many that the slow first attempt cannot make them all: it would take longer than the time limit."""
EVERY = 2


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    return interpreter(tmp_path_factory.mktemp("slow"), "tests.backends.slow_trainer")


def test_a_training_that_was_put_back_into_the_queue_goes_on_under_another_layout(slurm: Slurm, tmp_path: Path, python: str) -> None:
    """The trial is another one, and begins with attempt 0; the folder of checkpoints has seen attempt 1 of the first."""
    slurm.breakable()
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


@pytest.mark.parametrize("check", [None, _WARN, f"{_WARN}; exit 9"], ids=["setup", "health check", "health check that ends with it"])
def test_a_job_that_is_warned_before_its_ranks_begin_puts_itself_back_into_the_queue(
    slurm: Slurm, tmp_path: Path, check: str | None
) -> None:
    slurm.breakable()
    either, seen = tmp_path / "either", tmp_path / "seen"
    either.write_text(f'#!/bin/sh\n[ "$4" = trainer.health ] && mkdir {seen} && {{ {check or ":"}; }}\nexec {sys.executable} "$@"\n')
    either.chmod(0o755)
    setup = [] if check else ["[ $attempt -gt 0 ] || kill -USR1 $$"]
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


@pytest.fixture(scope="module")
def trials(slurm: Slurm, tmp_path_factory: pytest.TempPathFactory, python: str) -> Iterator[dict[str, Record]]:
    """The records of the three trials, by what happened to them."""
    cluster = slurm.breakable()
    configs = {
        "power cut": trial(steps=STEPS, every=EVERY, ranks=2, nodes=2, python=python, **SLOW),
        "preemption": trial(steps=STEPS, every=EVERY, partition="low", stop_signal=15, python=python, **SLOW),
        "time limit": trial(steps=STEPS, every=EVERY, time=1, python=python, **SLOW),
    }
    runs = tmp_path_factory.mktemp("faults")
    sweep = Running(runs, *configs.values())
    nodes = {what: _nodes_after_some_steps(runs, config) for what, config in configs.items()}
    cluster.kill(nodes["power cut"][1])  # not the one that the job's script runs on
    subprocess.run(
        ["sbatch", "--partition=high", "--exclusive", f"--nodelist={nodes['preemption'][0]}", "--output=/dev/null", "--wrap=sleep 1"],
        check=True,
    )
    records = dict(zip(configs, sweep.ended()))
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


@pytest.mark.parametrize("what", ["power cut", "preemption", "time limit"])
def test_the_training_goes_on_from_its_checkpoint_and_is_finished_once(trials: dict[str, Record], what: str) -> None:
    record = trials[what]
    assert record.status is Status.DONE, record.detail
    lines = metrics(record)
    attempts = [line["attempt"] for line in lines]
    assert attempts == sorted(attempts) and len(set(attempts)) > 1, "attempts follow one another"
    resumed = next(line["step"] for line in lines if line["attempt"] == attempts[-1])
    assert resumed > 1, "the last attempt did not begin anew"
    assert (record.read_result() or {})["attempt"] == attempts[-1] == record.attempt


@pytest.mark.parametrize("what", ["power cut", "preemption", "time limit"])
def test_losses_are_those_of_a_training_without_faults(trials: dict[str, Record], farm: Farm, what: str) -> None:
    record = trials[what]
    undisturbed = farm.train({**record.config, "run": {**record.config["run"], "checkpoint": {}}}, record.world_size).checked()
    assert (record.read_result() or {})["losses"] == undisturbed.result["losses"]


def test_a_warned_job_loses_no_step(trials: dict[str, Record]) -> None:
    """Where Slurm announces the end, ranks save a checkpoint at the step that they are in."""
    for what in ("preemption", "time limit"):
        steps = [line["step"] for line in metrics(trials[what])]
        assert steps == sorted(set(steps)), f"{what}: no step was made twice"


def test_a_dead_node_is_not_used_again(trials: dict[str, Record]) -> None:
    assert trials["power cut"].predicted is not None
    assert trials["power cut"].predicted["killed"] not in trials["power cut"].nodes


@pytest.mark.parametrize("what", ["preemption", "time limit"])
def test_a_warned_job_puts_itself_back_into_the_queue(trials: dict[str, Record], what: str) -> None:
    """No second submission was needed: it is the same job, started again. Slurm also counts starts that never reach the script."""
    record, restarts = trials[what], dict(squeue("JobArrayID", "RestartCnt"))
    assert record.handle is not None and record.handle["attempt"] == 0
    assert int(restarts[record.handle["job_id"]]) > 0 and record.attempt > 0
