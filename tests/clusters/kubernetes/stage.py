"""Gangs of played pods, as tests of the Kubernetes backend use them."""

from __future__ import annotations

import base64
import dataclasses
import json
import time
import uuid
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from launcher.backends.kubernetes.backend import KubernetesBackend
from launcher.backends.kubernetes.cluster import KubernetesCluster
from launcher.trials.job import Handle, Job, JobState
from tests.clusters.kubernetes.fixture import Kubernetes
from trainer.shared.records.outcome import Status


def frame(name: str, content: dict[str, Any]) -> str:
    """A file as a pod's first process sends it."""
    return f"#trireme {name} 1/1 {base64.b64encode(zlib.compress(json.dumps(content).encode())).decode()}"


def log(*lines: str) -> str:
    """What a pod's first process writes, with its first and last line."""
    return "\n".join(["#trireme begin", *lines, f"#trireme end {len(lines)}"])


RESULT = {"status": "done", "attempt": 0, "losses": [2.0, 1.0], "step_time_s": 0.5, "world_size": 2}
LOG = log("[{index}] step 1", frame("result.json", RESULT))


@dataclasses.dataclass
class Stage:
    """Gangs of played pods in one namespace."""

    kubernetes: Kubernetes
    namespace: str
    folder: Path
    opened: list[KubernetesBackend] = dataclasses.field(default_factory=list)

    def cluster(self, annotations: dict[str, str] | None = None, **settings: Any) -> KubernetesCluster:
        played = {f"played/{name}": value for name, value in {"log": LOG, **(annotations or {})}.items()}
        return self.kubernetes.played(self.namespace, annotations=played, **{"nodes": 2, "gpus_per_node": 1, **settings})

    def backend(self, cluster: KubernetesCluster | None = None) -> KubernetesBackend:
        self.opened.append(KubernetesBackend(cluster or self.cluster()))
        return self.opened[-1]

    def job(self, cluster: KubernetesCluster | None = None, attempt: int = 0) -> Job:
        cluster = cluster or self.cluster()
        identifier = uuid.uuid4().hex[:12]
        directory = self.folder / identifier
        directory.mkdir()
        return Job(identifier, "played", attempt, directory, cluster, cluster.world_size, config={"run": {"steps": 2}})

    def submit(self, annotations: dict[str, str] | None = None, **settings: Any) -> Gang:
        cluster = self.cluster(annotations, **settings)
        backend, job = self.backend(cluster), self.job(cluster)
        (handle,) = backend.submit([backend.render(job)])
        return Gang(self, backend, job, handle)

    def left(self, kinds: tuple[str, ...] = ("service", "config_map", "pod")) -> list[str]:
        """Objects of ours in the namespace."""
        core = self.kubernetes.core()
        lists = [getattr(core, f"list_namespaced_{kind}")(self.namespace).items for kind in kinds]
        return [item.metadata.name for items in lists for item in items if item.metadata.name.startswith("trireme-")]


@dataclasses.dataclass
class Gang:
    stage: Stage
    backend: KubernetesBackend
    job: Job
    handle: Handle

    def until(self, wanted: Callable[[JobState], Any], seconds: float = 300.0) -> JobState:
        deadline = time.monotonic() + seconds
        while not wanted(state := self.backend.poll([self.handle])[0]):
            assert time.monotonic() < deadline, f"still {state}"
            time.sleep(0.1)
        return state

    def end(self) -> JobState:
        return self.until(lambda state: state.status.final)

    def running(self) -> Gang:
        self.until(lambda state: state.status is Status.RUNNING)
        return self

    def pod(self, index: int = 0) -> str:
        return f"{self.handle['name']}-{index}"
