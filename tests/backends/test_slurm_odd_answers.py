"""Slurm that answers oddly: no trial is lost and none is started twice. Its commands are scripts; the launcher is the real one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.backends.slurm import submission
from launcher.cli import cancel
from launcher.cli.main import main
from launcher.trials.store import Store
from tests.backends.odd_slurm import OddSlurm
from tests.backends.slurm_support import PROJECT, Running, run, trial
from tests.sweep.support import until
from trainer.shared.records.outcome import Status

pytestmark = pytest.mark.slow

LAUNCHER = """\
import sys
from pathlib import Path
from launcher.interrupt import Interrupted
from tests.backends.slurm_support import run, trial
try:
    run(Path(sys.argv[1]), trial())
except Interrupted as end:
    sys.exit(end.exit_code)
"""


@pytest.mark.parametrize(
    "answers", ["accept; sleep 2", "queue; sleep 2; echo $id", "sleep 15; accept"], ids=["id before", "id after", "outlives the launcher"]
)
def test_ctrl_c_while_sbatch_runs_loses_no_job_and_submits_none_twice(odd: OddSlurm, tmp_path: Path, answers: str) -> None:
    """The terminal sends it to all processes of the launcher's group, of which sbatch must be none."""
    odd.does("sbatch", answers)
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(tmp_path / "runs")], cwd=PROJECT, start_new_session=True)
    until(lambda: odd.calls("sbatch", "array.sh"))
    os.killpg(launcher.pid, signal.SIGINT)
    assert launcher.wait(60) == 128 + signal.SIGINT
    (record,) = run(tmp_path / "runs", trial(), follow=False)
    assert record.status in (Status.SUBMITTED, Status.RUNNING) and record.handle["job_id"] == "100_0"
    assert odd.jobs == ["100"]


@pytest.mark.parametrize("end", ["kill -INT $PPID $$", "kill -KILL $$", "exit 1"])
def test_an_sbatch_that_ends_without_a_plain_no_is_asked_after_and_its_job_adopted(odd: OddSlurm, tmp_path: Path, end: str) -> None:
    odd.does("sbatch", f"queue; {end}")
    (record,) = run(tmp_path / "runs", trial(), follow=False)
    assert record.status in (Status.SUBMITTED, Status.RUNNING), record.detail
    assert (record.handle["job_id"], odd.jobs) == ("100_0", ["100"])


@pytest.mark.parametrize("answer", [
    "echo NOTICE: maintenance on Friday 13; echo; accept", "accept; echo Thank you for using ALPHA", "queue; echo $id;alpha", "queue; echo 'Submitted batch job' $id",
    "queue", "queue; echo accepted", "queue; echo 2026; echo $id",
])  # fmt: skip
def test_whatever_sbatch_prints_around_the_id_the_job_is_known_and_submitted_once(odd: OddSlurm, tmp_path: Path, answer: str) -> None:
    odd.does("sbatch", answer.replace(";alpha", "';alpha'"))
    (record,) = run(tmp_path / "runs", trial(), follow=False)
    assert record.status in (Status.SUBMITTED, Status.RUNNING), record.detail
    assert (record.handle["job_id"], odd.jobs) == ("100_0", ["100"])


def test_an_sbatch_that_ends_well_and_submits_nothing_is_said_and_not_repeated(odd: OddSlurm, tmp_path: Path) -> None:
    odd.does("sbatch", "echo welcome")
    (record,) = run(tmp_path / "runs", trial(), follow=False)
    assert record.status is Status.FAILED and "did not say which job it submitted (it said 'welcome')" in record.detail
    assert odd.calls("sbatch", "array.sh") == 1


def test_a_notice_of_squeue_is_not_taken_for_an_id(odd: OddSlurm, tmp_path: Path) -> None:
    odd.does("sbatch", "queue; exit 1")
    odd.does("squeue", "echo Welcome to ALPHA; rows")
    (record,) = run(tmp_path / "runs", trial(), follow=False)
    assert (record.handle["job_id"], odd.jobs) == ("100_0", ["100"])


def test_a_job_that_only_asks_whether_it_would_be_taken_is_taken_back_whatever_sbatch_prints(odd: OddSlurm, tmp_path: Path) -> None:
    busy = "sbatch: error: Batch job submission failed: Requested node configuration is not available"
    odd.does("test", f"echo '{busy}' >&2; exit 1")
    odd.does("sbatch", "echo NOTICE; accept")
    run(tmp_path / "runs", trial(), follow=False)
    assert odd.calls("sbatch", "--begin") == odd.calls("scancel", "--name=trireme-test-") == 1
    assert len(odd.jobs) == 1, "the trial's own"


@pytest.mark.parametrize("answer", ["echo Welcome to ALPHA; rows; echo bye", "rows | sed 's/0|0|$/N.A|N.A|/'", "echo Welcome to ALPHA"])
def test_commands_that_read_the_queue_survive_what_else_it_says(
    odd: OddSlurm, tmp_path: Path, answer: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cancel, "_PATIENCE_SECONDS", 5.0)
    (record,) = run(tmp_path / "runs", trial(), follow=False)
    odd.does("squeue", answer)
    for command, sweep in (("status", "drill"), ("rank", "drill"), ("cancel", record.id)):
        assert main([command, sweep, "--dir", str(tmp_path / "runs")]) in (0, 1), command
    assert "Traceback" not in capsys.readouterr().err
    assert not odd.jobs


def test_a_trial_waits_for_a_limit_on_submitted_jobs_and_goes_out_when_there_is_room(
    odd: OddSlurm, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    odd.does("sbatch", "[ $(wc -l <sbatch.calls) -gt 2 ] || { echo 'sbatch: error: QOSMaxSubmitJobPerUserLimit' >&2; exit 1; }; accept")
    (record,) = run(tmp_path / "runs", trial(), follow=False)
    assert record.handle["job_id"] == "100_0", record.detail
    assert "(QOSMaxSubmitJobPerUserLimit); trials wait, and are submitted as there is room" in caplog.text
    assert [path.name for path in tmp_path.glob("runs/arrays/*")] == [record.handle["array"]], "nothing is left of what was not accepted"


FEW = """\
asked=$(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\).*/\\1/p' "$script"); asked=${asked:-0}; there=$(cat accepted 2>/dev/null | wc -l)
[ $((asked + 1 + there)) -le 3 ] || { echo 'sbatch: error: AssocMaxSubmitJobLimit' >&2; exit 1; }
seq 0 $asked >>accepted; accept"""


def test_of_a_sweep_longer_than_a_limit_on_submitted_jobs_as_many_go_out_as_there_is_room_for(odd: OddSlurm, tmp_path: Path) -> None:
    """A limit counts the trials of an array singly: three of eight are submitted, the others are planned and nothing of them exists."""
    odd.does("sbatch", FEW)
    sweep = Running(tmp_path / "runs", *(trial(seed=seed) for seed in range(8)), follow=False)
    store = Store(tmp_path / "runs")
    until(lambda: store.names())
    records = until(lambda: (found := store.sweep("drill").records) and sum(one.handle is not None for one in found) == 3 and found)
    records = until(
        lambda: (found := store.sweep("drill").records) and all("AssocMaxSubmitJobLimit" in one.detail for one in found[3:]) and found
    )
    assert [one.status is Status.PLANNED for one in records] == [False] * 3 + [True] * 5
    assert not [path for one in records[3:] for path in one.directory.glob("logs/*.array.json")]
    until(lambda: not sweep.is_alive() or (odd.folder / "accepted").unlink(missing_ok=True))  # those that were there have ended
    jobs = [one.handle["job_id"] for one in sweep.ended()]
    assert len(set(jobs)) == 8 and {job.partition("_")[0] for job in jobs} == set(odd.jobs), "each submitted once, and nothing else"
    assert {one.attempt for one in sweep.ended()} == {0}


@pytest.mark.parametrize("answer", ["sleep 600; accept", "queue; sleep 600"], ids=["nothing submitted", "submitted"])
def test_an_sbatch_that_hangs_is_ended_and_its_trial_submitted_once(
    odd: OddSlurm, tmp_path: Path, answer: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(submission, "_SUBMISSION_SECONDS", 2.0)
    odd.does("sbatch", f"[ -e hung ] && accept || {{ touch hung; {answer}; }}")
    (record,) = run(tmp_path / "runs", trial(), follow=False)
    assert (record.handle["job_id"], odd.jobs) == ("100_0", ["100"])
    assert "sbatch did not answer within 2 s; trying again" in capsys.readouterr().err


NO_ARRAYS = """\
asked=$(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\).*/\\1/p' "$script")
[ "${asked:--1}" -lt LONGEST ] || { echo 'sbatch: error: Batch job submission failed: Invalid job array specification' >&2; exit 1; }
sed -n "s/^#SBATCH --dependency=/$((100 + $(cat jobs 2>/dev/null | wc -l))) /p" "$script" >>dependencies; accept"""


@pytest.mark.parametrize(("says", "longest", "ids"), [
    ("MaxArraySize = 0", 0, ["100", "101", "102", "103"]),  # no arrays at all
    ("MaxArraySize = 1001", 0, ["100", "101", "102", "103"]),  # nor here, by a rule of the site's own
    ("MaxArraySize = 1001", 2, ["100_0", "100_1", "101_0", "101_1"]),  # its limit has changed
    ("MaxArraySize = 1001\nSchedulerParameters = bf_max_job_test=9,max_array_tasks=2", 2, ["100_0", "100_1", "101_0", "101_1"]),
])  # fmt: skip
def test_what_a_slurm_takes_in_no_array_goes_out_in_smaller_ones_or_in_none(
    odd: OddSlurm, tmp_path: Path, says: str, longest: int, ids: list[str]
) -> None:
    (odd.folder / "scontrol").write_text(f"#!/bin/sh\ncat <<E\n{says}\nAccountingStorageType = (null)\nE\n")
    odd.does("sbatch", NO_ARRAYS.replace("LONGEST", str(longest)))
    records = run(tmp_path / "runs", *(trial(seed=seed) for seed in range(4)), follow=False)
    assert [record.handle["job_id"] for record in records] == ids, [record.detail for record in records]
    assert len(list(tmp_path.glob("runs/arrays/*"))) == len(set(odd.jobs)), "nothing is left of what was not accepted"


def test_jobs_without_arrays_keep_a_sweeps_limit(odd: OddSlurm, tmp_path: Path) -> None:
    (odd.folder / "scontrol").write_text("#!/bin/sh\necho MaxArraySize = 0\n")
    odd.does("sbatch", NO_ARRAYS.replace("LONGEST", "0"))
    run(tmp_path / "runs", *(trial(seed=seed) for seed in range(5)), follow=False, max_parallel=2)
    assert (odd.folder / "dependencies").read_text().split("\n") == ["102 afterany:100", "103 afterany:101", "104 afterany:102", ""]
