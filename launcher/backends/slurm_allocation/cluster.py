"""Settings of a Slurm allocation that trials share, beyond those of jobs of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Optional

from launcher.backends.slurm.cluster import SlurmCluster
from trainer.shared.run.schema import key


@dataclass
class SlurmAllocationCluster(SlurmCluster):
    """Steps of one job. What a trial asks for under ``slurm`` (partition, time, ...) is asked for once, for the allocation."""

    backend: str = key("slurm_allocation", "slurm_allocation", choices=("slurm_allocation",))
    requeues: int = key(0, "0: an allocation is not put back into the queue; its trials are, by the sweep", minimum=0, maximum=0)
    allocation_nodes: Optional[int] = key(
        None, "nodes of the allocation that is asked for: trials run side by side where they need fewer; null = cluster.nodes. "
        "Inside of an allocation, its own count", minimum=1,
    )  # fmt: skip
    idle_s: float = key(
        300.0, "seconds for which an allocation without a trial waits for the next before it is given back; the end of the command gives it "
        "back at once", minimum=0,
    )  # fmt: skip

    passing: ClassVar[tuple[str, ...]] = (*SlurmCluster.passing, "allocation_nodes", "idle_s")
