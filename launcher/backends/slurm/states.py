"""From Slurm's words for how a job stands to our statuses and reasons. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import IntEnum

from launcher.backends.slurm.errors import SchedulerUnavailable, plain
from launcher.trials.job import JobState
from trainer.shared.records.outcome import Reason, Status
from trainer.shared.records.trial_files import EXIT_STOPPED

WAITING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
BY_SLURM = "CANCELLED by Slurm"
"""Reason for a bare CANCELLED in the accounting, which names the user if a person cancelled the job ("CANCELLED by 1000")."""
HALTED = {"SUSPENDED", "STOPPED"}
ACTIVE = {"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"}

ENDED: dict[str, tuple[Status, Reason | None, str]] = {
    "COMPLETED": (Status.DONE, None, ""),
    "CANCELLED": (Status.STOPPED, Reason.CANCELLED, "cancelled"),
    "TIMEOUT": (
        Status.FAILED,
        Reason.TIME_LIMIT,
        "over its time limit (cluster.time) before a checkpoint was saved; allow more time or a larger cluster.stop_signal",
    ),
    "DEADLINE": (Status.FAILED, Reason.TIME_LIMIT, "its deadline passed"),
    "PREEMPTED": (Status.FAILED, Reason.PREEMPTED, "preempted"),
    "NODE_FAIL": (Status.FAILED, Reason.NODE, "a node failed"),
    "BOOT_FAIL": (Status.FAILED, Reason.NODE, "a node failed to boot"),
    "OUT_OF_MEMORY": (Status.FAILED, Reason.HOST_MEMORY, "over its memory limit (cluster.mem_gb)"),
    "REVOKED": (Status.FAILED, Reason.NODE, "taken over by another cluster"),
    BY_SLURM: (Status.FAILED, Reason.NODE, "ended by Slurm itself, cancelled by nobody; so end jobs that a controller has forgotten"),
}
"""Final states of Slurm but FAILED, whose exit code tells more."""

_BEGUN_ANEW = (Status.STOPPED, Reason.PREEMPTED, "put back into the queue")


class ExitCode(IntEnum):
    """Exit codes of the job script that mean something to the launcher."""

    BAD_NODE = 69  # the health check found a bad node
    UNUSABLE = 73  # the node cannot read the script, or write its log
    SETUP = 78  # a line of cluster.setup failed
    STOPPED = EXIT_STOPPED  # the ranks saved a checkpoint and stopped, and the job could not put itself back into the queue


EXIT_CODES: dict[int, tuple[Reason, str]] = {
    0: (Reason.ERROR, "the job failed, and Slurm does not know its exit code"),
    2: (Reason.CONFIGURATION, "the ranks refused their configuration"),
    ExitCode.BAD_NODE: (Reason.NODE, "the health check found a bad node"),
    ExitCode.UNUSABLE: (
        Reason.CANNOT_START,
        "its node cannot use the trial's folder, or that of its checkpoints; are sweep.dir and run.checkpoint.dir shared with the nodes?",
    ),
    ExitCode.SETUP: (Reason.CANNOT_START, "a line of cluster.setup failed"),
    ExitCode.STOPPED: (Reason.PREEMPTED, "stopped after a checkpoint, and not put back into the queue by the job itself"),
    126: (Reason.CANNOT_START, "the interpreter of the ranks (cluster.python) cannot be executed"),
    127: (Reason.CANNOT_START, "the interpreter of the ranks (cluster.python) was not found"),
    137: (Reason.NODE, "a rank was killed (SIGKILL); often the node had no memory left"),
    143: (Reason.NODE, "a rank was ended from outside (SIGTERM)"),
}

NEVER: dict[str, tuple[Reason, str]] = {
    "PartitionConfig": (Reason.CANNOT_START, "asks for more nodes, time, CPUs or memory than cluster.partition allows or has"),
    "PartitionNodeLimit": (Reason.CANNOT_START, "asks for more nodes than cluster.partition allows"),
    "PartitionTimeLimit": (Reason.CANNOT_START, "cluster.time is more than cluster.partition allows"),
    "BadConstraints": (Reason.CANNOT_START, "no nodes meet cluster.constraint"),
    "DependencyNeverSatisfied": (Reason.UPSTREAM, "a job that it comes after has failed (cluster.dependency, or a stage before it)"),
    "InvalidAccount": (Reason.CANNOT_START, "cluster.account is not valid"),
    "InvalidQOS": (Reason.CANNOT_START, "cluster.qos is not valid"),
    "launch failed requeued held": (Reason.NODE, "its node could not start it, and Slurm holds it back"),
    "JobHoldMaxRequeue": (Reason.NODE, "its nodes could not start it again and again, and Slurm holds it back"),
}
"""Pending reasons that never clear."""

_AFTER_A_FAILURE = {("CANCELLED", "DependencyNeverSatisfied"), (BY_SLURM, "Dependency")}
"""Reasons in queue and accounting for a job that Slurm removed because the job before it failed."""

_OVER_A_JOBS_LIMIT = re.compile(r"(QOS|Assoc)(Max\w+Per(Job|Node)(Limit)?|Min\w+)")
"""Limits of a quality of service or an account that one job exceeds alone."""

HINTS = (
    (r"QOS|Assoc", "a limit of cluster.qos or the account: other jobs under it have to end first; `sacctmgr show qos` lists limits"),
    (r"JobHeld", "held; `scontrol release` lets it go"),
    (r"Partition(Down|Inactive)", "cluster.partition takes no jobs now"),
    (r"ReqNodeNotAvail|Nodes required", "nodes that it needs are down, drained or reserved"),
    (r"Reservation", "cluster.reservation has not begun, or is over"),
)
"""Explains pending reasons that may clear."""


@dataclass(frozen=True)
class QueueEntry:
    """Holds one job's entry of squeue or sacct."""

    name: str
    state: str  # PENDING, RUNNING, ..., without what Slurm appends ("CANCELLED by 0")
    reason: str = ""  # why it waits
    started: float | None = None  # for one that waits: when the queue expects it to start
    nodes: str = ""  # as Slurm writes them: n[1-2]
    restarts: int = 0
    exit_code: int = 0
    exit_signal: int = 0
    ended_at: float | None = None
    steps: frozenset[str] = field(default=frozenset())  # states of its steps
    runs: tuple[QueueEntry, ...] = ()  # earlier ones, of the job's restarts; by the accounting

    @property
    def ended(self) -> bool:
        return self.state == "FAILED" or self.state in ENDED


def judge(row: QueueEntry, attempt: int) -> JobState:
    """The state of the job of ``row``, whose last start was ``attempt`` of its trial."""
    if row.state in WAITING or not (row.ended or row.state in ACTIVE):
        if (why := _never(row.reason)) is not None:
            return JobState(Status.FAILED, *why, attempt=attempt)
        again = "put back into the queue; " if row.restarts else ""
        return JobState(Status.SUBMITTED, None, again + waits_for(row.reason), attempt=attempt, expected=row.started)
    if not row.ended:
        nodes = () if row.state == "COMPLETING" else tuple(expand(row.nodes))  # while a job completes, nodes leave it one by one
        halted = "suspended by Slurm, or its staff: its steps take as much longer" if row.state in HALTED else ""
        return JobState(Status.RUNNING, None, halted, row.started, nodes, attempt=attempt, clearing_up=row.state == "COMPLETING")
    return _end(row, _verdict(row), attempt)


def earlier(runs: Sequence[QueueEntry], first: int, newest: int) -> tuple[JobState, ...]:
    """Returns the ends of attempts from ``first`` on that Slurm followed by another; ``newest`` is the last."""
    numbered = [(first + number, run) for number, run in enumerate(runs) if run.started is not None]
    return tuple(_end(run, _verdict(run) if run.ended else _BEGUN_ANEW, attempt) for attempt, run in numbered if attempt < newest)


def _end(row: QueueEntry, verdict: tuple[Status, Reason | None, str], attempt: int) -> JobState:
    status, reason, detail = verdict
    where = f" ({row.nodes})" if row.nodes and status is not Status.DONE else ""
    return JobState(status, reason, detail + where, row.started, tuple(expand(row.nodes)), row.ended_at, attempt)


def _never(reason: str) -> tuple[Reason, str] | None:
    """Returns reason and words for a job whose pending reason never clears; None otherwise."""
    if _OVER_A_JOBS_LIMIT.fullmatch(reason):
        return (
            Reason.CANNOT_START,
            f"asks for more nodes, time, CPUs, GPUs or memory than cluster.qos or the account allows a job ({reason})",
        )
    return NEVER.get(reason)


def waits_for(reason: str) -> str:
    """Returns ``waits: QOSMaxJobsPerUserLimit``, explained where Slurm's word is terse; empty without one."""
    if reason in ("", "None"):
        return ""
    return f"waits: {reason}" + next((f" ({words})" for pattern, words in HINTS if re.match(pattern, reason)), "")


def _verdict(row: QueueEntry) -> tuple[Status, Reason | None, str]:
    if (row.state, row.reason) in _AFTER_A_FAILURE:
        return Status.FAILED, *NEVER["DependencyNeverSatisfied"]
    if row.state in ENDED:
        return ENDED[row.state]
    if "OUT_OF_MEMORY" in row.steps:
        return ENDED["OUT_OF_MEMORY"]
    if row.exit_signal == 53:
        return Status.FAILED, Reason.CANNOT_START, "its node could not start the job script"
    if row.exit_signal:
        return Status.FAILED, Reason.NODE, f"the job script was killed by signal {row.exit_signal}"
    reason, detail = EXIT_CODES.get(row.exit_code, (Reason.ERROR, f"the job ended with exit code {row.exit_code}"))
    return Status.FAILED, reason, detail


# ---------------------------------------------------------------- reading squeue and sacct

QUEUE_FIELDS = ("JobArrayID", "Name", "State", "Reason", "StartTime", "NodeList", "RestartCnt", "exit_code")
ACCOUNT_FIELDS = ("JobID", "JobName", "State", "ExitCode", "Start", "End", "NodeList", "Reason")


_IDENTIFIER = re.compile(r"\d+[\w.+\[\],%-]*")


def read_queue(text: str) -> dict[str, QueueEntry]:
    """Rows of ``squeue --array --Format`` with ``QUEUE_FIELDS``, by job id (12_3). ``SchedulerUnavailable`` when no line is a row."""
    rows = {}
    for identifier, name, state, reason, start, nodes, restarts, code in _cells("squeue", text, len(QUEUE_FIELDS)):
        status = _number(code)  # as of wait(2)
        rows[identifier] = QueueEntry(name, state, reason, _seconds(start), nodes, _number(restarts), status >> 8, status & 127)
    return rows


def read_accounts(text: str) -> dict[str, QueueEntry]:
    """Returns rows of ``sacct --duplicates``, by job id: the last run of each, with the number before. Raises ``SchedulerUnavailable``
    without any."""
    rows: dict[str, QueueEntry] = {}
    for identifier, name, words, code, start, end, nodes, why in _cells("sacct", text, len(ACCOUNT_FIELDS)):
        job, _, step = identifier.partition(".")
        state, before = BY_SLURM if words == "CANCELLED" else words.split(" ")[0], rows.get(job)
        if step and before is not None:
            rows[job] = replace(before, steps=before.steps | {state})
        elif not step:
            runs = (*before.runs, before) if before is not None and before.name == name else ()  # else an older job with the same id
            exit_code, _, exit_signal = code.partition(":")
            nodes = "" if nodes == "None assigned" else nodes
            rows[job] = QueueEntry(
                name, state, why, _seconds(start), nodes, len(runs), _number(exit_code), _number(exit_signal), _seconds(end), runs=runs
            )
    return rows


def _cells(command: str, text: str, columns: int) -> list[list[str]]:
    """Splits lines that are rows; a site's commands may print others. Raises ``SchedulerUnavailable`` without rows: jobs would count as
    lost."""
    lines = [[part.strip() for part in line.split("|")[:columns]] for line in text.splitlines()]
    rows = [parts for parts in lines if len(parts) == columns and _IDENTIFIER.fullmatch(parts[0])]
    if text.strip() and not rows:
        raise SchedulerUnavailable(f"the answer of {command} cannot be read: {plain(text)[:80]!r}")
    return rows


def _number(cell: str) -> int:
    """Parses a number; 0 for text such as N/A, Slurm's "unknown"."""
    return int(cell) if cell.isdecimal() else 0


def _seconds(text: str) -> float | None:
    """Slurm's local time; None for N/A and Unknown."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def expand(nodes: str) -> list[str]:
    """``r[1-2]n[01-03,7],login`` as names: numbers are as wide as they are written."""
    if nodes in ("", "(null)"):
        return []
    return [host for name in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodes) for host in _hosts(name)]


def _hosts(name: str) -> list[str]:
    """One name of a node list, for each of the numbers in its brackets."""
    before, _, rest = name.partition("[")
    if not rest:
        return [name]
    listed, _, after = rest.partition("]")
    ranges = [(first, last or first) for first, _, last in (part.partition("-") for part in listed.split(","))]
    numbers = [f"{number:0{len(first)}d}" for first, last in ranges for number in range(int(first), int(last) + 1)]
    return [f"{before}{number}{end}" for number in numbers for end in _hosts(after)]
