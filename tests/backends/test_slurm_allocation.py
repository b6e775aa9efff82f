"""Trials as steps of one Slurm allocation: the conformance suite on a real cluster, and what only this backend promises."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.backends import backend_for
from launcher.backends.slurm_allocation.allocation import Allocation
from launcher.backends.slurm_allocation.backend import SlurmAllocationBackend
from launcher.backends.slurm_allocation.cluster import SlurmAllocationCluster
from launcher.backends.slurm_allocation.steps import held
from launcher.cli.main import main
from launcher.config.schema import Config
from launcher.trials.job import Job, JobState
from launcher.trials.store import Record, Store
from tests.backends.conformance import Conformance, Ground, SearchConformance, closing
from tests.backends.slurm_support import CLUSTER, PROJECT, Running, interpreter, run, squeue, submissions, trial
from tests.clusters.slurm.fixture import Slurm
from tests.sweep.support import starts, until
from trainer.shared.records.outcome import Reason, Status

SETTINGS = {name: value for name, value in vars(CLUSTER).items() if name not in ("backend", "requeues")}
ALLOCATION = SlurmAllocationCluster(**SETTINGS)
SWEEP = """
import sys
from pathlib import Path
from tests.backends.slurm_support import run
from tests.backends.test_slurm_allocation import step
run(Path(sys.argv[1]), *(step(seed=seed, behaviour="sleep 0.4", python=sys.argv[2], gpus_per_node=2) for seed in range(12)))
"""


@pytest.fixture(scope="module")
def ground(slurm: Slurm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    folder = tmp_path_factory.mktemp("runs") / "trials"
    cluster = dataclasses.replace(ALLOCATION, gpus_per_node=2, code="snapshot", allocation_nodes=2, idle_s=20)
    unknown = {"allocation": "trireme-nobody-00000000", "entry": "1-nobody", "folder": str(folder), "attempt": 0, "directory": str(folder)}
    yield from closing(Ground(lambda: backend_for(cluster), cluster, folder, unknown=unknown))


@pytest.mark.campaign("slurm")
class TestSlurmAllocation(Conformance):
    """The conformance suite."""


@pytest.mark.campaign("slurm")
class TestSearchInAllocation(SearchConformance):
    """Inference."""


def step(seed: int = 1, **keys: Any) -> Config:
    """A resolved trial in an allocation."""
    cluster = {name: keys.pop(name) for name in list(keys) if name in SlurmAllocationCluster.__dataclass_fields__}
    config = trial(seed=seed, **keys)
    return dataclasses.replace(config, cluster=dataclasses.replace(ALLOCATION, **cluster))


def entries(runs: Path) -> list[str]:
    """Names of the jobs that Slurm was given by the sweeps in ``runs``."""
    ours = {path.name for path in runs.glob("allocations/*")}
    return [name for (name,) in squeue("Name") if name in ours]


@pytest.fixture
def python(tmp_path: Path) -> str:
    return interpreter(tmp_path, "tests.backends.played_trainer")


def test_trials_of_a_sweep_are_steps_of_one_job_which_ends_with_the_sweep(slurm: Slurm, tmp_path: Path, python: str) -> None:
    """Three trials on two slots: two side by side, the third after them."""
    three = [step(seed=seed, behaviour="sleep 0.5", python=python, gpus_per_node=2) for seed in (1, 2, 3)]
    done = run(tmp_path, *three)
    assert [(record.status, starts(record)) for record in done] == [(Status.DONE, [0])] * 3, [record.detail for record in done]
    assert len(entries(tmp_path)) == 1
    began = sorted(record.started or 0.0 for record in done)
    assert began[1] - began[0] < 2 <= began[2] - began[0], began
    until(lambda: set(states(tmp_path)) <= {"COMPLETED", "COMPLETING"})


def states(runs: Path) -> list[str]:
    ours = {path.name for path in runs.glob("allocations/*")}
    return [state for name, state in squeue("Name", "State") if name in ours]


@pytest.mark.campaign("slurm")
def test_a_launcher_inside_a_job_runs_its_trials_there(slurm: Slurm, tmp_path: Path, python: str) -> None:
    """It is killed while they run, and repeated: nothing is lost, nothing is done twice, and no job is added to the queue."""
    runs, command = tmp_path / "runs", f"{sys.executable} -c '{SWEEP}' {tmp_path}/runs {python}"
    kill = f"until ls {runs}/trials/*/starts >/dev/null 2>&1; do sleep 0.1; done\nkill -KILL $!\nwait $!\necho killed: $?"
    (tmp_path / "outer.sh").write_text(f"#!/bin/bash\n{command} &\n{kill}\n{command}\n")
    asked = ["sbatch", "--wait", "--parsable", "--nodes=2", "--ntasks-per-node=2", f"--output={tmp_path}/out", str(tmp_path / "outer.sh")]
    subprocess.run(asked, check=True, cwd=PROJECT, capture_output=True, text=True)
    said = (tmp_path / "out").read_text()
    assert "killed: 137" in said, said
    each_of_twelve_done_once(runs)
    assert not entries(runs) and not submissions(runs)
    assert len({node for record in records(runs) for node in record.nodes}) == 2


@pytest.mark.campaign("slurm")
def test_a_launcher_that_is_killed_and_repeated_finds_its_allocation(slurm: Slurm, tmp_path: Path, python: str) -> None:
    runs, command = tmp_path / "runs", [sys.executable, "-c", SWEEP, str(tmp_path / "runs"), python]
    first = subprocess.Popen(command, cwd=PROJECT, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    until(lambda: list(runs.glob("trials/*/starts")))
    first.kill()
    first.wait()
    subprocess.run(command, check=True, cwd=PROJECT, capture_output=True)
    each_of_twelve_done_once(runs)
    assert len(entries(runs)) == 1


@pytest.mark.campaign("slurm")
def test_a_search_of_twelve_trials_is_one_entry_of_the_queue(slurm: Slurm, tmp_path: Path, python: str) -> None:
    place = ["cluster=slurm_allocation", "cluster.nodes=1", "cluster.gpus_per_node=4", "cluster.gpu_request=none", "cluster.code=image"]
    quick = ["cluster.poll_seconds=0.2", "cluster.visibility_s=1", "run.device=cpu", "run.steps=4", "run.global_batch=16"]
    what = ["model=gpt_tiny", "hardware=cpu", "data=synthetic", "search.max_trials=12", "sweep.name=twelve", f"sweep.dir={tmp_path}/runs"]
    assert main(["search", *what, *place, *quick, f"cluster.python={python}"]) == 0
    each_of_twelve_done_once(tmp_path / "runs")
    assert len(entries(tmp_path / "runs")) == 1


@pytest.mark.campaign("slurm")
def test_trials_outlive_their_allocation_in_another_one(slurm: Slurm, tmp_path: Path, python: str) -> None:
    """One allocation is lost with the node that it had; what it ran and what it had not begun is done in the next."""
    running = Running(tmp_path, *(step(seed=seed, behaviour="sleep 1", python=python) for seed in (1, 2)))
    until(lambda: list(tmp_path.glob("trials/*/starts")))
    (name,) = entries(tmp_path)
    subprocess.run(["scancel", "--signal=KILL", "--batch", f"--name={name}"], check=True)  # without --batch it would be cancelled
    done = running.ended()
    assert [record.status for record in done] == [Status.DONE] * 2, [record.detail for record in done]
    assert len(entries(tmp_path)) == 2


def records(runs: Path) -> list[Record]:
    return [Store(runs).load(path.name) for path in (runs / "trials").iterdir()]


def each_of_twelve_done_once(runs: Path) -> None:
    ended = [(record.status, starts(record)) for record in records(runs)]
    assert ended == [(Status.DONE, [0])] * 12, [record.detail for record in records(runs)]


# ---------------------------------------------------------------- without a cluster


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)


ENDS = [
    # files of the entry, the allocation's state, what that makes of the trial
    ({}, JobState(Status.SUBMITTED, None, "waits: Priority", expected=99.0), Status.SUBMITTED, None, "waits: Priority"),
    ({}, JobState(Status.RUNNING), Status.SUBMITTED, None, "waits: for nodes of its allocation"),
    ({"cancel": ""}, JobState(Status.SUBMITTED), Status.STOPPED, Reason.CANCELLED, "cancelled"),
    ({"started": "17 n[1-2]"}, JobState(Status.RUNNING), Status.RUNNING, None, ""),
    ({"started": "17 n1", "cancel": ""}, JobState(Status.RUNNING), Status.RUNNING, None, ""),
    ({"started": "17 n1", "code": "0"}, JobState(Status.FAILED, Reason.NODE), Status.DONE, None, ""),
    ({"started": "17 n1", "code": "143", "cancel": ""}, JobState(Status.RUNNING), Status.STOPPED, Reason.CANCELLED, "cancelled"),
    ({"started": "17 n1", "code": "0", "cancel": ""}, JobState(Status.RUNNING), Status.DONE, None, ""),
    ({"started": "17 n1", "code": "78"}, JobState(Status.RUNNING), Status.FAILED, Reason.CANNOT_START, "a line of cluster.setup failed (n1)"),
    ({"started": "17 n1"}, JobState(Status.FAILED, Reason.TIME_LIMIT, "late"), Status.FAILED, Reason.PREEMPTED, "its allocation ended: late"),
    ({}, JobState(Status.DONE), Status.FAILED, Reason.PREEMPTED, "its allocation ended before the trial began"),
    ({}, JobState(Status.FAILED, Reason.CANNOT_START, "no"), Status.FAILED, Reason.CANNOT_START, "its allocation ended before the trial began: no"),
    ({}, JobState(Status.STOPPED, Reason.CANCELLED), Status.STOPPED, Reason.CANCELLED, "its allocation ended before the trial began"),
    ({"started": "17 n1"}, JobState(Status.FAILED, Reason.NODE, "n1"), Status.FAILED, Reason.NODE, "its allocation ended: n1"),
]  # fmt: skip


@pytest.mark.usefixtures("outside")
@pytest.mark.parametrize(("files", "allocation", "status", "reason", "words"), ENDS)
def test_a_trial_is_judged_by_its_exit_code_and_without_one_by_its_allocation(
    files: dict[str, str], allocation: JobState, status: Status, reason: Reason | None, words: str, tmp_path: Path
) -> None:
    backend = SlurmAllocationBackend(dataclasses.replace(ALLOCATION, visibility_s=0))
    job = Job("ab12cd34ef56", "s", 0, tmp_path / "trials" / "ab12cd34ef56", ALLOCATION, 1)
    (job.directory / "logs").mkdir(parents=True)
    place = Allocation(tmp_path / "allocations" / "a")
    place.settle("7", "a", inside=False)
    handle = place.put(job, "exit", "1 1 -", "image")
    for name, text in files.items():
        (place.folder / "jobs" / handle["entry"] / name).write_text(text)
    state = backend._state(handle, {place.folder: allocation})
    assert (state.status, state.reason, state.detail, state.expected) == (status, reason, words, allocation.expected)
    assert backend.find([job]) == {job.name: handle}


@pytest.mark.usefixtures("outside")
def test_an_allocation_asks_once_for_the_room_of_all_its_trials() -> None:
    cluster = dataclasses.replace(
        ALLOCATION, gpus_per_node=4, nodes=1, allocation_nodes=3, gpu_request="gpus_per_node", time="60", partition="p", exclude="n9"
    )
    job = Job("ab12cd34ef56", "s", 0, Path("/r/trials/ab12cd34ef56"), cluster, 2, avoid=("n7",), max_parallel=2)
    asked = held(job, cluster)
    assert {name: asked.get(name) for name in ("nodes", "ntasks-per-node", "gpus-per-node", "time", "partition", "exclude")} == {
        "nodes": "3", "ntasks-per-node": "4", "gpus-per-node": "4", "time": "60", "partition": "p", "exclude": "n9",
    }  # fmt: skip
    assert "no-requeue" in asked and "requeue" not in asked
    backend = SlurmAllocationBackend(cluster)
    text = backend.render(job).text
    for words in ("--exact", "--mem=0", '--nodelist="$SLURM_JOB_NODELIST"', "--gpus-per-node=2", "SLURM_JOB_ID * 7 + ${trireme_number:-0}"):
        assert words in text
    assert "#SBATCH" not in text and "sbatch" not in text, "it is no job of its own"
    assert "-lt 0 ]; then" in text, "a trial never puts the allocation back into the queue"
    assert backend._need(job) == "1 2 n9,n7"
    assert backend.can_place(job)


def test_a_dry_run_shows_the_allocation_once_and_then_the_steps_of_each_trial(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    what = ["model=gpt_tiny", "data=synthetic", "cluster=slurm_allocation", "cluster.nodes=1", "cluster.gpus_per_node=2", "run.seed=1,2"]
    for outer, words in (None, "# submitted once: "), ("17", "# started once in job 17, in which this command runs; nothing is submitted"):
        monkeypatch.setenv("SLURM_JOB_ID", outer) if outer else monkeypatch.delenv("SLURM_JOB_ID", raising=False)
        assert main(["train", "-m", *what, "cluster.allocation_nodes=3", f"sweep.dir={tmp_path}/runs", "--dry-run"]) == 0
        first, *trials = capsys.readouterr().out.split("# trial ")
        assert first.startswith(words) and first.count("#SBATCH --nodes=3\n") == (outer is None)
        assert len(trials) == 2 and all("#SBATCH" not in each and "srun --nodes=1 --ntasks=2" in each for each in trials)
    assert not (tmp_path / "runs").exists()


@pytest.mark.usefixtures("outside")
def test_a_trial_that_is_larger_than_its_allocation_is_refused(tmp_path: Path) -> None:
    cluster = dataclasses.replace(ALLOCATION, gpus_per_node=2, nodes=4, allocation_nodes=2)
    job = Job("ab12cd34ef56", "s", 0, tmp_path / "trials" / "ab12cd34ef56", cluster, 8)
    words = "the trial needs 4 nodes, and cluster.allocation_nodes has 2; raise it, or use a smaller layout"
    assert SlurmAllocationBackend(cluster).refusals([job]) == {job.name: words}


@pytest.mark.usefixtures("outside")
def test_a_place_that_a_job_has_not_reached_is_not_an_allocation(tmp_path: Path) -> None:
    """A launcher that was killed between the intent and the entry has not handed the trial over."""
    job = Job("ab12cd34ef56", "s", 0, tmp_path / "trials" / "ab12cd34ef56", ALLOCATION, 1)
    place = Allocation(tmp_path / "allocations" / "a")
    (job.directory / "logs").mkdir(parents=True)
    handle = place.put(job, "exit", "1 1 -", "image")
    (place.folder / "jobs" / handle["entry"]).rename(tmp_path / "gone")
    assert SlurmAllocationBackend(ALLOCATION).find([job]) == {}
