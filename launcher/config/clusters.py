"""Which dataclass describes the cluster of each backend. Imported lazily, so that a local run loads nothing of Slurm."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from launcher.config.renamed import refuse_renamed
from launcher.config.schema import BACKENDS, ClusterConfig
from trainer.shared.run.errors import ConfigError, listed, nearest
from trainer.shared.run.read import from_dict, from_record

CLUSTER_CLASSES = {
    "local": "launcher.config.schema:LocalCluster",
    "slurm": "launcher.config.slurm:SlurmCluster",
    "kubernetes": "launcher.config.kubernetes:KubernetesCluster",
}


def cluster_class(backend: str) -> type[ClusterConfig]:
    """The dataclass of ``backend``; ``ConfigError`` if there is no such backend."""
    if str(backend) not in CLUSTER_CLASSES:
        raise ConfigError(f"cluster.backend={backend!r} is not one of {listed(BACKENDS)}{nearest(str(backend), BACKENDS)}")
    module, name = CLUSTER_CLASSES[backend].split(":")
    return getattr(import_module(module), name)  # type: ignore[no-any-return]


def cluster_from_dict(data: Mapping[str, Any]) -> ClusterConfig:
    """A cluster of the class that ``data["backend"]`` names, strictly read."""
    backend = data.get("backend", "local") if isinstance(data, Mapping) else "local"  # what is no mapping is refused where it is read
    if isinstance(data, Mapping) and isinstance(data.get("hardware"), Mapping):
        refuse_renamed(data["hardware"])
    return from_dict(cluster_class(backend), data, "cluster.")


def cluster_from_record(data: Mapping[str, Any]) -> ClusterConfig:
    """The same of what a trial's record holds, which an earlier version may have written (see ``from_record``)."""
    return from_record(cluster_class(data.get("backend", "local")), data)
