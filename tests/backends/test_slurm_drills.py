"""Things that go wrong around a sweep on Slurm, each ending with every trial finished once. Ranks are played; all else is real."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import threading
from pathlib import Path

import pytest

from launcher.backends.pool import Backends
from launcher.backends.slurm.backend import SlurmBackend
from launcher.backends.slurm.client import Client
from launcher.cli import cancel
from launcher.cli.main import main
from launcher.sweep.reconcile import stop
from launcher.trials.store import Store
from tests.backends.slurm_support import Running, dying, interpreter, run, squeue, submissions, trial
from tests.clusters.slurm import Cluster
from tests.clusters.slurm.fixture import Slurm
from tests.sweep.support import starts, until
from trainer.shared.records.outcome import Reason, Status


@pytest.fixture
def python(tmp_path: Path) -> str:
    return interpreter(tmp_path, "tests.backends.played_trainer")


def each_done_once(records: list) -> bool:
    return all(record.status is Status.DONE and starts(record) == [record.attempt] for record in records)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_launcher_killed_around_submission_loses_no_trial_and_submits_none_twice(
    slurm: Slurm, tmp_path: Path, python: str, moment: str
) -> None:
    assert dying(moment, tmp_path / "runs", python).wait() == -signal.SIGKILL
    records = run(tmp_path / "runs", *(trial(seed=seed, python=python) for seed in (1, 2, 3)))
    assert each_done_once(records)
    assert len(submissions(tmp_path / "runs")) == 3


def test_a_submission_that_outlives_its_launcher_is_found(whole: Cluster, tmp_path: Path, python: str) -> None:
    """sbatch waits for a controller that hangs; its launcher is killed; the next launcher must neither lose nor repeat it."""
    runs, controller = tmp_path / "runs", whole.daemon("slurmctld")
    stuck = dying("during", runs, python, controller.pid() or 0)
    until(lambda: list(runs.glob("arrays/*/lock")))
    stuck.kill()
    stuck.wait()
    waker = threading.Timer(2.0, controller.send, [signal.SIGCONT])
    waker.start()
    assert each_done_once(run(runs, *(trial(seed=seed, python=python) for seed in (1, 2, 3))))
    assert len(submissions(runs)) == 3


@pytest.mark.parametrize("daemon", ["slurmctld", pytest.param("munged", marks=pytest.mark.campaign("slurm"))])
def test_trials_go_on_while_slurm_cannot_be_asked(whole: Cluster, tmp_path: Path, python: str, daemon: str) -> None:
    configs = [trial("sleep 0.5", seed=seed, steps=10, python=python) for seed in (1, 2)]
    sweep = Running(tmp_path / "runs", *configs)
    until(lambda: len(list(tmp_path.glob("runs/trials/*/metrics.jsonl"))) == 2)
    whole.daemon(daemon).kill(signal.SIGTERM)  # a controller that crashes may forget the jobs of its last seconds
    until(lambda: len(list(tmp_path.glob("runs/trials/*/result.json"))) == 2)
    whole.boot(daemon)
    assert each_done_once(sweep.ended())


def test_a_controller_that_goes_away_before_submission_is_waited_for(
    whole: Cluster, tmp_path: Path, python: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(SlurmBackend, "check", lambda _: whole.kill("slurmctld"))
    with pytest.MonkeyPatch.context() as hasty:
        hasty.setenv("SLURM_CONF", str(_hasty(whole, tmp_path)))
        sweep = Running(tmp_path / "runs", trial(python=python))
        until(lambda: "trying again in" in capfd.readouterr().err)
    whole.boot("slurmctld")
    assert each_done_once(sweep.ended())


def test_cancel_says_in_one_line_that_the_controller_is_dead_and_ends(
    whole: Cluster, tmp_path: Path, python: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (record,) = run(tmp_path / "runs", trial("sleep 60", python=python), follow=False)
    whole.daemon("slurmctld").kill(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as hasty:
        hasty.setattr(cancel, "_PATIENCE_SECONDS", 1.0)
        hasty.setenv("SLURM_CONF", str(_hasty(whole, tmp_path)))
        assert main(["cancel", record.id, "--dir", str(tmp_path / "runs")]) == 1
    (last,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert "Slurm cannot be reached" in last and last.endswith("repeat the command when it answers")
    whole.boot("slurmctld")
    monkeypatch.setattr(cancel, "_PATIENCE_SECONDS", 600.0)
    assert main(["cancel", record.id, "--dir", str(tmp_path / "runs")]) == 0
    assert Store(tmp_path / "runs").load(record.id).status is Status.STOPPED


def _hasty(cluster: Cluster, folder: Path) -> Path:
    """The configuration of clients that knock at a dead controller for a second, in place of twenty."""
    etc, path = cluster.settings.conf.parent, folder / "slurm.conf"
    path.write_text(re.sub(r"(?m)^MessageTimeout=.*", "MessageTimeout=1", cluster.settings.conf.read_text()))
    shutil.copy(etc / "topology.conf", folder)
    return path


def test_ends_are_known_without_accounting(whole: Cluster, tmp_path: Path, python: str) -> None:
    whole.kill("slurmdbd")
    records = run(tmp_path / "runs", trial(seed=1, python=python), trial("exit 0 3", seed=2, python=python))
    assert [record.status for record in records] == [Status.DONE, Status.FAILED]
    assert "exit code 3" in records[1].detail


def test_a_sweep_longer_than_the_longest_array_goes_out_in_several_and_keeps_its_limit(slurm: Slurm, tmp_path: Path, python: str) -> None:
    cluster = slurm.breakable()
    count = cluster.settings.max_array_size + 3
    records = run(tmp_path / "runs", *(trial(seed=seed, python=python) for seed in range(count)), max_parallel=6)
    assert each_done_once(records)
    scripts = sorted((path.read_text() for path in tmp_path.glob("runs/arrays/*/array.sh")), key=len)
    assert ["--array=0-2\n" in scripts[0], f"--array=0-{count - 4}%6\n" in scripts[1]] == [True, True]
    assert "--dependency=afterany:" in scripts[0]


def test_a_sweep_longer_than_a_limit_on_submitted_jobs_runs_as_there_is_room_and_keeps_its_own_limit(
    slurm: Slurm, tmp_path: Path, python: str
) -> None:
    """Three jobs of a user under it, trials of an array counted singly: nothing is refused for good, and each trial runs once."""
    slurm.breakable()
    sweep = Running(tmp_path / "runs", *(trial(seed=seed, python=python, qos="few") for seed in range(7)), max_parallel=2)
    running = [0]
    while sweep.is_alive():
        sweep.join(0.2)  # between two looks, which cost processes
        ours = submissions(tmp_path / "runs")
        running.append(sum(name in ours and state == "RUNNING" for name, state in squeue("Name", "State")))
    records = sweep.ended()
    assert each_done_once(records), [record.detail for record in records]
    assert len({record.handle["array"] for record in records}) > 1 and max(running) <= 2


def test_results_that_become_visible_late_are_waited_for(slurm: Slurm, tmp_path: Path) -> None:
    """One rank's success, and the cause of the failure of two, are to be seen four seconds after their jobs have ended."""
    slurm.breakable()
    late = interpreter(tmp_path, "tests.backends.late_trainer")
    patient = {"python": late, "visibility_s": 60.0, "gpus_per_node": 2}
    good = trial(seed=1, env={"LATE": "result.json"}, **patient)
    bad = trial("fail 1 out_of_memory", seed=2, ranks=2, env={"LATE": "failure-1.json"}, **patient)
    done, failed = run(tmp_path / "runs", good, bad)
    assert (done.status, starts(done)) == (Status.DONE, [done.attempt]), done.detail
    assert (failed.reason, failed.detail, starts(failed)) == (Reason.OUT_OF_MEMORY, "rank 1: played failure", [failed.attempt])


def test_a_job_that_leaves_no_word_is_given_up_after_a_while(slurm: Slurm, tmp_path: Path, python: str) -> None:
    (record,) = run(tmp_path / "runs", trial("exit 0 3", python=python))
    assert (record.status, record.reason) == (Status.FAILED, Reason.ERROR) and "exit code 3" in record.detail


def test_a_sweep_is_cancelled_with_as_many_commands_however_long_it_is(
    slurm: Slurm, tmp_path: Path, python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three arrays, of which some trials run and some do not."""
    count = 2 * slurm.breakable().settings.max_array_size + 3
    trials = [trial("sleep 1", seed=seed, steps=1000, python=python) for seed in range(count)]
    run(tmp_path / "runs", *trials, follow=False, max_parallel=4)
    until(lambda: list(tmp_path.glob("runs/trials/*/metrics.jsonl")))
    asked, output = [], Client.output
    monkeypatch.setattr(Client, "output", lambda client, *command, **rest: asked.append(command[0]) or output(client, *command, **rest))
    store = Store(tmp_path / "runs")
    with Backends() as backends:
        assert stop(store, store.sweep("drill").records, backends, 600.0) == []
    assert asked.count("scancel") <= 3, "one for all, and perhaps another for what the queue still shows"
    assert {record.status for record in store.sweep("drill").records} == {Status.STOPPED}
    ours = submissions(tmp_path / "runs")
    assert ours
    until(lambda: {state for name, state in squeue("Name", "State") if name in ours} == {"CANCELLED"})  # for a moment: COMPLETING


@pytest.mark.campaign("slurm")
def test_a_job_that_clears_up_after_its_result_is_let_to(slurm: Slurm, tmp_path: Path, python: str) -> None:
    """As long as the removal of a large container takes: longer than a job on this machine is let to."""
    slow = tmp_path / "slow"
    slow.write_text(f'#!/bin/sh\n{python} "$@" && sleep 20 && touch {tmp_path}/cleared\n')
    slow.chmod(0o755)
    (record,) = run(tmp_path / "runs", trial(python=str(slow)))
    assert record.status is Status.DONE and (tmp_path / "cleared").exists()
    assert {state for name, state in squeue("Name", "State") if name in submissions(tmp_path / "runs")} == {"COMPLETED"}


def test_a_job_cancelled_behind_the_launchers_back_is_a_cancelled_trial(slurm: Slurm, tmp_path: Path, python: str) -> None:
    sweep = Running(tmp_path / "runs", trial("sleep 1", seed=1, steps=1000, python=python), trial(seed=2, python=python))
    (short,) = until(lambda: list(tmp_path.glob("runs/trials/*/result.json")))
    (long,) = until(lambda: [path.parent for path in tmp_path.glob("runs/trials/*/metrics.jsonl") if path.parent != short.parent])
    handle = until(lambda: json.loads((long / "trial.json").read_text())["handle"])  # a job may begin before its launcher knows its id
    subprocess.run(["scancel", handle["job_id"]], check=True)
    stopped, done = sweep.ended()
    assert (stopped.status, stopped.reason, done.status) == (Status.STOPPED, Reason.CANCELLED, Status.DONE)
    assert len(starts(stopped)) == 1, "a cancelled job is not run again"


def test_jobs_that_a_controller_has_lost_with_its_state_are_tried_again(whole: Cluster, tmp_path: Path, python: str) -> None:
    """It ends them itself when their nodes report them; nobody has cancelled them."""
    sweep = Running(tmp_path / "runs", trial("gate", python=python))
    (trial_file,) = until(lambda: [path.parent / "trial.json" for path in tmp_path.glob("runs/trials/*/metrics.jsonl")])
    until(lambda: json.loads(trial_file.read_text())["nodes"])
    # a controller tells accounting of a start a little later; jobs of tests before this one may be listed as well
    job = json.loads(trial_file.read_text())["handle"]["job_id"]
    until(lambda: "RUNNING" in whole.output("sacct", "--noheader", "--allocations", f"--jobs={job}", "--format=State"))
    whole.kill("slurmctld")
    shutil.rmtree(whole.settings.directory / "state")
    whole.boot("slurmctld")
    (record,) = sweep.ended()
    assert (record.status, starts(record)) == (Status.DONE, [0, 1]), record.detail
    lost, _ = record.history
    assert (lost["reason"], len(lost["nodes"])) == (Reason.NODE.value, 1) and "cancelled by nobody" in lost["detail"]
