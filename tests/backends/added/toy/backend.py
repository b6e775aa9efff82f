"""Hosts that are reached by one command each. Nothing is ever started."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from launcher.backends.contract import Backend, Request
from launcher.config.schema import ClusterConfig
from launcher.trials.job import Handle, Job, JobState
from trainer.shared.records.outcome import Reason, Status
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.keys import key


@dataclass
class ToyCluster(ClusterConfig):
    """Hosts with names."""

    backend: str = key("toy", "toy", choices=("toy",))
    hosts: list[str] = key(list, "names of the hosts")
    own_network: ClassVar[bool] = True


class ToyBackend(Backend):
    """One command for each rank."""

    def check(self) -> None:
        assert isinstance(self.cluster, ToyCluster)
        if len(self.cluster.hosts) < self.cluster.nodes:
            raise ConfigError(f"cluster.hosts names {len(self.cluster.hosts)} hosts for cluster.nodes={self.cluster.nodes}; name more")

    def render(self, job: Job) -> Request:
        assert isinstance(job.cluster, ToyCluster)
        words = shlex.join(["python", "-m", "trainer", str(job.config_path), "--out", str(job.directory)])
        per_host = job.cluster.gpus_per_node
        return Request(job, "".join(f"{job.cluster.hosts[rank // per_host]}: RANK={rank} {words}\n" for rank in range(job.world_size)))

    def submit(self, requests: Sequence[Request]) -> list[Handle]:
        raise AssertionError("nothing is to be started")

    def find(self, jobs: Sequence[Job]) -> dict[str, Handle]:
        return {}

    def poll(self, handles: Sequence[Handle]) -> list[JobState]:
        return [JobState(Status.FAILED, Reason.NODE, "nothing was ever started") for _ in handles]

    def cancel(self, handles: Sequence[Handle]) -> None:
        pass
