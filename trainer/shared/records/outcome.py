"""The status of a trial and the reasons of failures: two enums that trainer, backends and ranking share."""

from __future__ import annotations

from enum import Enum


class Status(str, Enum):
    """The state of a trial. The last four are final."""

    PLANNED = "planned"
    SUBMITTED = "submitted"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    PRUNED = "pruned"
    STOPPED = "stopped"

    @property
    def final(self) -> bool:
        return self in (Status.DONE, Status.FAILED, Status.PRUNED, Status.STOPPED)


class Reason(str, Enum):
    """The reason why a trial failed, was pruned or stopped."""

    OUT_OF_MEMORY = "out of memory"
    HOST_MEMORY = "host memory"
    COMMUNICATION = "communication"
    NODE = "node"
    CONFIGURATION = "configuration"
    PREEMPTED = "preempted"
    TIME_LIMIT = "time limit"
    NUMERICS = "numerics"
    CANNOT_START = "cannot start"
    UPSTREAM = "upstream failed"
    CANCELLED = "cancelled"
    CANNOT_WIN = "cannot win"
    MEASURED = "measured"
    ERROR = "error"

    @property
    def retryable(self) -> bool:
        """Returns True for faults of the infrastructure, not of the trial: worth another attempt."""
        return self in (Reason.NODE, Reason.PREEMPTED, Reason.COMMUNICATION)


MEANINGS: dict[Reason, tuple[str, str]] = {
    Reason.OUT_OF_MEMORY: (
        "The device's memory did not suffice, or counted bytes exceeded run.memory_gb.",
        "Raise layout.tensor, layout.pipeline, layout.sharding or layout.recompute, or lower layout.micro_batch.",
    ),
    Reason.HOST_MEMORY: (
        "The host's memory did not suffice: the kernel killed a rank, or an allocation failed.",
        "Run fewer ranks per node, ask for more memory (cluster.mem_gb under Slurm), or use a smaller vocabulary or model.",
    ),
    Reason.COMMUNICATION: (
        "A collective failed or did not complete in time, and no rank knew a better reason: a rank died (no word from it for 15 s), hangs "
        "(it waits in no collective, and says where its program was), or computes more slowly than run.timeout_s allows.",
        "Look at the ranks that the detail names, first at those that wait in no collective; then at the network. Raise run.timeout_s if "
        "steps are that long.",
    ),
    Reason.NODE: (
        "A node died, was drained, or lost its network; or the job is no longer known.",
        "Nothing, if the next attempt succeeds: it avoids the node. Otherwise give the node's name to its administrator.",
    ),
    Reason.CONFIGURATION: (
        "Values do not fit together, or a file or folder that they name is missing, damaged or cannot be written.",
        "Read the detail: it names the key, the value, what is allowed and what to do.",
    ),
    Reason.PREEMPTED: (
        "The cluster took the trial's nodes for other work.",
        "Nothing: it continues from its checkpoint where run.checkpoint.every is set, else it starts again.",
    ),
    Reason.TIME_LIMIT: (
        "The job's time limit ended it.",
        "Raise the limit (cluster.time), or save checkpoints (run.checkpoint.every) so that the next attempt continues.",
    ),
    Reason.NUMERICS: (
        "The loss or the gradient norm became NaN or infinite, or every step was skipped.",
        "Lower optimizer.lr, use bf16 instead of fp16, or look at the data of the step that is named.",
    ),
    Reason.CANNOT_START: (
        "The job could not start: image, program, quota or limits.",
        "Read the detail: it holds the cluster's own words.",
    ),
    Reason.UPSTREAM: (
        "What it depends on has failed: a stage before it, or a job of cluster.dependency.",
        "Fix that one and repeat the command: finished stages are not repeated.",
    ),
    Reason.CANCELLED: ("Somebody cancelled it, or the launcher was interrupted.", "Repeat the command to run it."),
    Reason.CANNOT_WIN: (
        "A search stopped it because it could no longer beat the best layout.",
        "Nothing: this saves time. 'trireme train' with its layout measures it in full.",
    ),
    Reason.MEASURED: (
        "A search ended it because more steps would not have made its step time better known (search.enough). It counts as measured.",
        "Nothing: this saves time. 'trireme train' with its layout runs all of its steps, and so does a search with search.enough=0.",
    ),
    Reason.ERROR: ("An error that has no reason of its own.", "Read the log: 'trireme logs TRIAL'."),
}
"""The meaning of each reason and its remedy."""
