"""One allocation on disk: the folder by which launchers hand trials to its steward, and learn how they stand.

    <root>/allocations/<sweep>.json          the newest allocation of a sweep, and what it was asked for with
    <root>/allocations/<name>/array.sh       the steward's script; lock and job_id as for arrays (``slurm.submission``)
                              place.json     Slurm's id and name of the job
                              jobs/<entry>/  a trial's attempt: what it needs, its script; from the steward: started, code
                              leave, left    the launcher needs it no more; the steward has ended
    <trial>/logs/attempt0.step.json          the intent: allocation and entry

An entry appears whole (one rename), after its intent. A launcher that was killed in between finds the intent without an entry, and hands
the trial over again; with an entry, the trial is adopted.
"""

from __future__ import annotations

import fcntl
import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.trials.job import Handle, Job
from trainer.shared.run.files import read_json, write_text

JOBS, LEAVE, LEFT, PLACE = "jobs", "leave", "left", "place.json"


@dataclass(frozen=True)
class StepEntry:
    """The state of an attempt, by its files."""

    folder: Path

    @property
    def exists(self) -> bool:
        return self.folder.is_dir()

    @property
    def code(self) -> int | None:
        """Returns the exit code of its script; None while there is none."""
        text = _text(self.folder / "code").strip()
        return int(text) if text.isdecimal() else None

    @property
    def started(self) -> tuple[float, str] | None:
        """Returns when its script was started (unix seconds) and on which nodes; None before."""
        seconds, _, nodes = _text(self.folder / "started").strip().partition(" ")
        return (float(seconds), nodes) if seconds.isdecimal() else None

    @property
    def cancelled(self) -> bool:
        return (self.folder / "cancel").exists()

    def cancel(self) -> None:
        if self.exists and self.code is None:
            (self.folder / "cancel").touch()


@dataclass(frozen=True)
class Allocation:
    """A job of Slurm's that runs the scripts in ``folder``."""

    folder: Path

    @property
    def place(self) -> Handle | None:
        """Returns the job's handle; None if it never came to be."""
        return read_json(self.folder / PLACE)

    def settle(self, job_id: str, name: str, inside: bool) -> None:
        """Records the job. ``inside``: launchers run in it, and one of them started the steward."""
        place = {"job_id": job_id, "array": name, "attempt": 0, "directory": str(self.folder), "inside": inside}
        write_text(self.folder / PLACE, json.dumps(place))

    @property
    def takes_more(self) -> bool:
        return not (self.folder / LEAVE).exists() and not (self.folder / LEFT).exists()

    @property
    def tended(self) -> bool:
        """Returns whether a steward of this machine, or a script that one started, is alive."""
        if not (self.folder / "steward.lock").exists():
            return False
        with (self.folder / "steward.lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def put(self, job: Job, script: str, need: str, code: str) -> Handle:
        """Hands an attempt to the steward, and returns its handle."""
        name = f"{time.time_ns()}-{job.name}"  # in the order in which they came
        intent = {"allocation": self.folder.name, "entry": name, "code": code}
        write_text(intent_path(job), json.dumps(intent))
        making = self.folder / "making" / name
        shutil.rmtree(making, ignore_errors=True)
        making.mkdir(parents=True)
        (making / "script").write_text(script, encoding="utf-8")
        (making / "need").write_text(need + "\n", encoding="utf-8")
        (self.folder / JOBS).mkdir(exist_ok=True)
        making.rename(self.folder / JOBS / name)
        return handle_of(job, intent)

    def release(self) -> None:
        """Gives it back as soon as nothing runs there."""
        (self.folder / LEAVE).touch()

    @property
    def busy(self) -> bool:
        return any(StepEntry(path).code is None for path in (self.folder / JOBS).glob("*"))


def allocation_of(handle: Handle) -> Allocation:
    """Returns the allocation of a handle, which need not exist."""
    return Allocation(Path(handle["folder"]) / handle["allocation"])


def entry_of(handle: Handle) -> StepEntry:
    return StepEntry(allocation_of(handle).folder / JOBS / handle["entry"])


def allocations(job: Job) -> Path:
    """Returns the folder of all allocations of a root."""
    return job.directory.parent.parent / "allocations"


def intent_path(job: Job) -> Path:
    return job.directory / "logs" / f"attempt{job.attempt}.step.json"


def handle_of(job: Job, intent: dict[str, Any]) -> Handle:
    return intent | {"folder": str(allocations(job)), "attempt": job.attempt, "directory": str(job.directory)}


def found(job: Job) -> Handle | None:
    """Returns the handle of an attempt that was handed over; None if it never was."""
    intent = read_json(intent_path(job))
    if intent is None:
        return None
    handle = handle_of(job, intent)
    return handle if entry_of(handle).exists else None


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except FileNotFoundError:
        return ""
