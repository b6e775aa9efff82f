"""The contract between the launcher and the schedulers that run trials.

``render`` changes nothing: it is what ``--dry-run`` prints. ``submit`` is the only effect and takes many requests at once; ``poll``
asks once for all. A backend never decides what a trial's result is: the trainer's ``result.json`` does, a backend only says
reports the job's state and, without a result, the scheduler's reason.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from launcher.backends.logs import read_logs
from launcher.config.schema import ClusterConfig
from launcher.trials.job import Handle, Job, JobState


class BackendError(RuntimeError):
    """The place refuses, or cannot be reached for longer than is worth waiting. ``str(error)`` is one plain line for a person."""

    exit_code = 1


class NoRoom(BackendError):
    """The place takes no more jobs until others have ended."""


@dataclass(frozen=True)
class Request:
    """Holds the exact script, manifest or command of one job, as text that a person can repeat by hand."""

    job: Job
    text: str
    files: dict[str, str] = field(default_factory=dict)  # further files, by name, written to the trial's directory


class Backend(ABC):
    """Runs trials at one place. Holds no state that handles, job names and the trial directories do not recover."""

    poll_seconds: float = 2.0
    """Least seconds between two calls of ``poll``."""
    outlives_launcher: bool = True
    """Jobs outlive the launcher. After a crash, a job may exist although its handle was never recorded."""
    visibility_s: float = 0.0
    """Seconds for which files of an ended job may stay invisible here: network file systems cache absences."""
    leaves_objects: bool = False
    """True if the objects of an ended job stay until ``collect`` removes them."""
    chains: bool = False
    """Takes a job before those that it comes after (``Job.after``) have ended, starts it once all have succeeded, and takes it away, for
    ``Reason.UPSTREAM``, if one has not. Otherwise the sweep loop waits."""
    throttles: bool = False
    """Takes a whole sweep at once and keeps to ``Job.max_parallel`` itself (job arrays). Otherwise the sweep loop does."""

    def __init__(self, cluster: ClusterConfig):
        self.cluster = cluster

    @abstractmethod
    def check(self) -> None:
        """Raises ``ConfigError`` if this cluster cannot be used at all (no sbatch, no API server, missing plugin, no permission)."""

    def refusals(self, jobs: Sequence[Job]) -> dict[str, str]:
        """Returns one line, by job name, for each job that the scheduler would always refuse. Called before anything is written."""
        return {}

    def remarks(self, jobs: Sequence[Job]) -> list[str]:
        """Returns advice on how ``jobs`` would run, one line each. Called before they are submitted."""
        return []

    @abstractmethod
    def render(self, job: Job) -> Request:
        """Renders the request that ``submit`` would send. Pure: asks no clock and no server."""

    def shared_request(self, job: Job) -> str | None:
        """Returns the text of a request that is sent once for all trials of a sweep, of which ``job`` is the first; None where each is
        started for itself."""
        return None

    def validate(self, request: Request) -> str | None:
        """Returns the scheduler's answer to a dry run of a request, or None. Raises ``ConfigError`` if it refuses, ``BackendError`` if
        silent."""
        return None

    @abstractmethod
    def submit(self, requests: Sequence[Request]) -> list[Handle]:
        """Starts the jobs; one handle each, in order. A job of the same name that exists already is adopted, not started twice.

        ``ConfigError`` or ``BackendError`` when they cannot be started. Those that ``find`` still finds keep running. ``NoRoom`` when those
        that it does not find have to wait until there are fewer jobs; nothing is left of them.
        """

    @abstractmethod
    def find(self, jobs: Sequence[Job]) -> dict[str, Handle]:
        """Returns handles, by job name, of jobs that exist on the backend: orphans of a launcher killed between submission and record.
        Raises as ``poll`` does."""

    @abstractmethod
    def poll(self, handles: Sequence[Handle]) -> list[JobState]:
        """Returns the states of all jobs, in order, from one query; an unknown job is ``failed`` with reason ``node``. Raises
        ``BackendError`` if nobody answers now: states are unchanged; ``ConfigError`` if the query is no longer permitted: the command
        ends."""

    @abstractmethod
    def cancel(self, handles: Sequence[Handle]) -> None:
        """Ends the jobs; unknown or ended ones are ignored."""

    def can_place(self, job: Job) -> bool:
        """Returns whether enough nodes remain for ``job`` without those that it avoids. True if unknown."""
        return True

    def readmit(self, job: Job, handle: Handle) -> bool:
        """Lets a job that waits avoid only the nodes that ``job`` names now. False where that cannot be changed any more."""
        return False

    def capacity(self) -> int | None:
        """Ranks that may be alive at once over all jobs; None where a queue decides."""
        return None

    def admits(self, job: Job, others: Iterable[Job]) -> str:
        """Returns why ``job`` must wait for others; empty if it may be submitted. Without gang scheduling, two half-started jobs would
        deadlock."""
        return ""

    def collect(self, job: Job, handle: Handle, remove: bool = True) -> None:  # noqa: B027 - optional by design
        """Copies an ended job's results and logs into its directory, unless files are shared, and removes its objects (only with
        ``remove``). Raises ``BackendError`` if they are out of reach now, or if something of the job still runs and may not be ended."""

    def logs(self, job: Job, handle: Handle | None, follow: bool = False) -> Iterator[str]:
        """Yields lines of all ranks, prefixed ``[rank] `` if there are several; with ``follow``, until the job ends. By default from shared
        files."""

        asked, final = float("-inf"), handle is None

        def ended() -> bool:
            nonlocal asked, final
            if handle is not None and not final and time.monotonic() - asked >= self.poll_seconds:
                asked, final = time.monotonic(), self.poll([handle])[0].status.final
            return final

        return read_logs(job, ended if follow else None)

    def hurry(self) -> None:  # noqa: B027 - optional by design
        """The command is asked to end: from now on ask once, and do not wait for a place that does not answer. For signal handlers too."""

    def close(self) -> None:  # noqa: B027 - optional by design
        """Releases worker pools and connections. Running jobs of remote backends continue."""
