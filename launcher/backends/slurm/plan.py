"""Derives once, from a job, its form under Slurm: its size, the variables of its ranks, and the options of a container."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from launcher.backends.slurm.cluster import SlurmCluster
from launcher.backends.slurm.container import Wrapping, wrapping
from launcher.backends.slurm.mounts import HostPath, all_mounts, host_paths
from launcher.backends.slurm.variables import environment, variable_names
from launcher.config.mounts import Mount
from launcher.trials.job import Job


@dataclass(frozen=True)
class SlurmJobPlan:
    """One job of a Slurm cluster. ``code`` is the folder of the launcher's snapshot; None: the image brings its own."""

    job: Job
    code: Path | None = None

    @cached_property
    def cluster(self) -> SlurmCluster:
        assert isinstance(self.job.cluster, SlurmCluster)
        return self.job.cluster

    @cached_property
    def per_node(self) -> int:
        return min(self.job.world_size, self.cluster.gpus_per_node)

    @cached_property
    def nodes(self) -> int:
        """Returns the fewest nodes that hold the layout's ranks."""
        return math.ceil(self.job.world_size / self.per_node)

    @property
    def fills_nodes(self) -> bool:
        return self.job.world_size == self.nodes * self.per_node

    @property
    def exclusive(self) -> bool:
        """Returns whether the job gets whole nodes: as configured, else if it requests all GPUs of each, where nobody else could train."""
        if self.cluster.exclusive is not None:
            return self.cluster.exclusive
        return self.cluster.gpu_request != "none" and self.per_node == self.cluster.gpus_per_node and self.fills_nodes

    @property
    def alone(self) -> bool:
        """Returns whether its script is a job of its own, for sbatch."""
        return True

    @property
    def requeues(self) -> int:
        return self.cluster.requeues

    @property
    def step_options(self) -> list[str]:
        """Returns further options of srun, as shell text: where the ranks go, if others run in the same job."""
        return []

    @property
    def number(self) -> str:
        """Returns a number, as shell arithmetic, that no other trial has that may run beside this one: the ranks' port is made of it."""
        return "SLURM_JOB_ID * 7 + ${SLURM_RESTART_COUNT:-0}"

    @property
    def saves(self) -> bool:
        """Returns whether it writes checkpoints. Runs without any get no warning signal; they may finish before the limit."""
        return self.job.config is None or bool(self.job.config["run"]["checkpoint"]["every"])

    @cached_property
    def environment(self) -> dict[str, str]:
        return environment(self.cluster)

    @cached_property
    def names(self) -> list[str]:
        return variable_names(self.cluster)

    @cached_property
    def mounts(self) -> list[Mount]:
        """Returns the mounts of the configuration, or of an OCI bundle."""
        return self.cluster.mounts()

    @cached_property
    def paths(self) -> list[HostPath]:
        """Paths of the host that the ranks open; in no container they are all there anyway."""
        return host_paths(self.job.config, self.job.directory, self.code, self.mounts) if self.cluster.in_container else []

    @cached_property
    def container(self) -> Wrapping:
        return wrapping(self.cluster, all_mounts(self.mounts, self.paths), self.names)
