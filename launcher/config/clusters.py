"""The available backends, and the dataclass of each one's cluster.

A backend is a folder of ``launcher/backends`` whose ``__init__`` names two classes as ``module:Class``: ``CLUSTER`` holds its settings, and
``BACKEND`` runs its jobs. Nothing else knows its name; it is imported on demand.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from launcher.config.hardware import refuse_renamed
from launcher.config.schema import ClusterConfig
from trainer.shared.run.errors import ConfigError, listed, nearest
from trainer.shared.run.read import from_dict, from_record

DEFAULT = "local"
_FOLDERS = "launcher.backends"


@cache
def backend_names() -> tuple[str, ...]:
    """Returns the names of the backends as messages list them: the default, then the others in reverse alphabetical order."""
    found = sorted((module.name for module in iter_modules(import_module(_FOLDERS).__path__) if module.ispkg), reverse=True)
    return tuple(sorted(found, key=lambda name: name != DEFAULT))


def class_of(backend: str, part: str) -> Any:
    """Returns the class that ``backend`` names as its ``part``, ``CLUSTER`` or ``BACKEND``. Raises ``ConfigError`` if it does not exist."""
    if str(backend) not in backend_names():
        raise ConfigError(f"cluster.backend={backend!r} is not one of {listed(backend_names())}{nearest(str(backend), backend_names())}")
    module, name = getattr(import_module(f"{_FOLDERS}.{backend}"), part).split(":")
    return getattr(import_module(module), name)


def cluster_class(backend: str) -> type[ClusterConfig]:
    """Returns the dataclass of ``backend``. Raises ``ConfigError`` for an unknown backend."""
    return class_of(backend, "CLUSTER")  # type: ignore[no-any-return]


def cluster_from_dict(data: Mapping[str, Any]) -> ClusterConfig:
    """Reads a cluster of the class that ``data["backend"]`` names, strictly."""
    backend = data.get("backend", DEFAULT) if isinstance(data, Mapping) else DEFAULT  # from_dict refuses anything else
    if isinstance(data, Mapping) and isinstance(data.get("hardware"), Mapping):
        refuse_renamed(data["hardware"])
    return from_dict(cluster_class(backend), data, "cluster.")


def cluster_from_record(data: Mapping[str, Any]) -> ClusterConfig:
    """Reads the cluster of a trial's record, which an earlier version may have written (see ``from_record``)."""
    return from_record(cluster_class(data.get("backend", DEFAULT)), data)
