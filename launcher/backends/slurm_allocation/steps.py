"""Derives what a trial needs of its allocation, and the script that holds the allocation. Pure."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.backends.slurm.options import directives, options
from launcher.backends.slurm.plan import SlurmJobPlan
from launcher.backends.slurm.script import template
from launcher.backends.slurm.states import ExitCode
from launcher.backends.slurm_allocation.cluster import SlurmAllocationCluster
from launcher.trials.job import Job, JobState
from trainer.shared.records.outcome import Reason, Status

_NODES = '--nodelist="$SLURM_JOB_NODELIST"'


@dataclass(frozen=True)
class StepPlan(SlurmJobPlan):
    """A trial whose ranks are steps on nodes that the steward has chosen."""

    @property
    def alone(self) -> bool:
        return False

    @property
    def step_options(self) -> list[str]:
        """Each step has processors and GPUs of its own, and takes no memory from those that run beside it."""
        cluster = self.cluster
        kind = f"{cluster.gpu_type}:" if cluster.gpu_type else ""
        asked = {"gpus_per_node": f"--gpus-per-node={kind}{self.per_node}", "gres": f"--gres=gpu:{kind}{self.per_node}"}
        gpus = asked.get(cluster.gpu_request)
        return ["--exact", "--mem=0", _NODES, *([shlex.quote(gpus)] if gpus else [])]

    @property
    def number(self) -> str:
        return "SLURM_JOB_ID * 7 + ${trireme_number:-0}"

    @property
    def slots(self) -> int:
        """Returns how many ranks' room it takes on each of its nodes: all with ``cluster.exclusive=true``, where nobody runs beside it."""
        return self.cluster.gpus_per_node if self.cluster.exclusive else self.per_node


def held(job: Job, cluster: SlurmAllocationCluster) -> dict[str, str | None]:
    """Returns the options of sbatch for the allocation in which ``job`` and other trials of ``cluster`` run."""
    nodes = cluster.allocation_nodes or cluster.nodes
    whole = replace(cluster, nodes=nodes)
    asks = replace(job, cluster=whole, world_size=nodes * cluster.gpus_per_node, config=None, avoid=(), after=())
    return options(SlurmJobPlan(asks))


def steward_script(cluster: SlurmAllocationCluster, chosen: dict[str, str | None], name: str, folder: Path, sweep: str) -> str:
    """Returns the script that holds the allocation ``name`` and runs the scripts that appear in ``folder``."""
    lines = directives({"job-name": name, **chosen, "output": "/dev/null"}, cluster)
    return template(Path(__file__).parent / "steward.sh.jinja").render(  # type: ignore[no-any-return]
        directives="\n".join(lines), sweep=sweep, folder=str(folder), slots=cluster.gpus_per_node, idle=int(cluster.idle_s), codes=ExitCode
    )


def without_end(state: JobState, began: bool) -> tuple[Status, Reason, str]:
    """Judges a trial that has no exit code, and whose allocation ended as ``state`` says."""
    before = "" if began else " before the trial began"
    words = f": {state.detail}" if state.detail else ""
    if state.status is Status.STOPPED and state.reason is Reason.CANCELLED:
        return Status.STOPPED, Reason.CANCELLED, f"its allocation ended{before}{words}"
    lasting = state.reason in (Reason.CANNOT_START, Reason.HOST_MEMORY, Reason.NODE)
    if state.reason is not None and lasting:
        return Status.FAILED, state.reason, f"its allocation ended{before}{words}"
    # its time is over, or it was preempted: neither is the trial's fault, and another allocation may have more
    return Status.FAILED, Reason.PREEMPTED, f"its allocation ended{before}{words}"
