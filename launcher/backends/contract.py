"""The contract between the launcher and the places where trials run.

``render`` changes nothing: it is what ``--dry-run`` prints. ``submit`` is the only effect and takes many requests at once; ``poll``
asks once for all. A backend never decides what a trial's result is: the trainer's ``result.json`` does, a backend only says
how the job stands and, when there is no result, what the place knows of the reason.
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
    """What would be submitted for one job: the exact script, manifest or command, as text a person can repeat by hand."""

    job: Job
    text: str
    files: dict[str, str] = field(default_factory=dict)  # further files, by name, written to the trial's directory


class Backend(ABC):
    """One place where trials run. Constructed with the cluster configuration of a sweep; holds no state that is not
    recoverable from handles, job names and the trial directories."""

    poll_seconds: float = 2.0
    """How often ``poll`` is asked at most."""
    outlives_launcher: bool = True
    """Jobs outlive the launcher. After a crash, a job may exist although its handle was never recorded."""
    visibility_s: float = 0.0
    """For how long what the ranks wrote may stay unseen here after their job has ended: network file systems remember what was not
    there."""
    leaves_objects: bool = False
    """What an ended job leaves at its place stays there until ``collect`` removes it."""
    chains: bool = False
    """Takes a job before those that it comes after (``Job.after``) have ended, starts it once all have succeeded, and takes it away, for
    ``Reason.UPSTREAM``, if one has not. Otherwise the sweep loop waits."""
    throttles: bool = False
    """Takes a whole sweep at once and keeps to ``Job.max_parallel`` itself (job arrays). Otherwise the sweep loop does."""

    def __init__(self, cluster: ClusterConfig):
        self.cluster = cluster

    @abstractmethod
    def check(self) -> None:
        """Raise ``ConfigError`` if this cluster cannot be used at all (no sbatch, no API server, missing plugin, no permission)."""

    def refusals(self, jobs: Sequence[Job]) -> dict[str, str]:
        """One plain line, by job name, for each of ``jobs`` that the place would refuse whenever it was submitted. Asked before anything is
        written of them; what cannot be known beforehand fails when it is submitted."""
        return {}

    def remarks(self, jobs: Sequence[Job]) -> list[str]:
        """What a person should know of how ``jobs`` would run, one plain line each. Asked before they are submitted."""
        return []

    @abstractmethod
    def render(self, job: Job) -> Request:
        """What ``submit`` would send. It has no effect, and asks no clock and no server."""

    def validate(self, request: Request) -> str | None:
        """The place's own answer to a request that is not submitted: nothing is started or stored. None: there is nobody to ask.

        ``ConfigError`` when it would be refused, ``BackendError`` when nobody answers now.
        """
        return None

    @abstractmethod
    def submit(self, requests: Sequence[Request]) -> list[Handle]:
        """Start the jobs; one handle each, in order. A job of the same name that exists already is adopted, not started twice.

        ``ConfigError`` or ``BackendError`` when they cannot be started. Those that ``find`` still finds keep running. ``NoRoom`` when those
        that it does not find have to wait until there are fewer jobs; nothing is left of them.
        """

    @abstractmethod
    def find(self, jobs: Sequence[Job]) -> dict[str, Handle]:
        """Handles, by job name, of jobs that exist on the backend: orphans of a launcher killed between submission and record."""

    @abstractmethod
    def poll(self, handles: Sequence[Handle]) -> list[JobState]:
        """How the jobs stand, in order, in one question. A job that nobody knows any more is ``failed`` with reason ``node``.

        ``BackendError`` when nobody answers now; jobs then stand as they did, and the question is asked again. ``ConfigError`` when there
        will be no answer, because the place does not allow the question any more: the command ends, and the jobs stand as they did.
        """

    @abstractmethod
    def cancel(self, handles: Sequence[Handle]) -> None:
        """End the jobs; unknown or ended ones are ignored."""

    def can_place(self, job: Job) -> bool:
        """Whether there are enough nodes for ``job`` without those that it avoids. True if that is not known.

        Asked before a job that avoids nodes is submitted: it then avoids fewer of them.
        """
        return True

    def readmit(self, job: Job, handle: Handle) -> bool:
        """Let a job that waits avoid only the nodes that ``job`` names now. False where that cannot be changed any more."""
        return False

    def capacity(self) -> int | None:
        """Ranks that may be alive at once over all jobs; None where a queue decides."""
        return None

    def admits(self, job: Job, others: Iterable[Job]) -> str:
        """Why ``job`` must not be submitted now, given the jobs that are submitted or about to be; empty when it may.

        For places that start the parts of a job one by one: jobs that each hold a part would wait for each other for ever.
        """
        return ""

    def collect(self, job: Job, handle: Handle, remove: bool = True) -> None:  # noqa: B027 - optional by design
        """Bring results and logs of an ended job into its directory, where no file system is shared, and remove what is left of it.

        Without ``remove`` nothing is ended or removed (see ``leaves_objects``). ``BackendError`` when they are out of reach now, or when
        something of the job still runs and may not be ended.
        """

    def logs(self, job: Job, handle: Handle | None, follow: bool = False) -> Iterator[str]:
        """Lines of all ranks, each prefixed ``[rank] `` when there are several; with ``follow``, until the job ends.

        Here: from the log files in the trial's directory, for backends that share a file system with the launcher.
        """

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
        """Release what the backend holds (worker pools, connections). Running jobs of remote backends continue."""
