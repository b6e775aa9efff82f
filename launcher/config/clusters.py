"""The backends that are there, and the dataclass of each one's cluster.

A backend is a folder of ``launcher/backends`` whose ``__init__`` names two classes as ``module:Class``: ``CLUSTER``, its settings, and
``BACKEND``, what runs its jobs. Nothing else knows its name; it is imported when it is asked for.
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
    """Names of the backends, in the order in which messages list them: the default's, and the others against the alphabet."""
    found = sorted((module.name for module in iter_modules(import_module(_FOLDERS).__path__) if module.ispkg), reverse=True)
    return tuple(sorted(found, key=lambda name: name != DEFAULT))


def class_of(backend: str, part: str) -> Any:
    """The class that ``backend`` names as its ``part``: ``CLUSTER`` or ``BACKEND``. ``ConfigError`` if there is no such backend."""
    if str(backend) not in backend_names():
        raise ConfigError(f"cluster.backend={backend!r} is not one of {listed(backend_names())}{nearest(str(backend), backend_names())}")
    module, name = getattr(import_module(f"{_FOLDERS}.{backend}"), part).split(":")
    return getattr(import_module(module), name)


def cluster_class(backend: str) -> type[ClusterConfig]:
    """The dataclass of ``backend``; ``ConfigError`` if there is no such backend."""
    return class_of(backend, "CLUSTER")  # type: ignore[no-any-return]


def cluster_from_dict(data: Mapping[str, Any]) -> ClusterConfig:
    """A cluster of the class that ``data["backend"]`` names, strictly read."""
    backend = data.get("backend", DEFAULT) if isinstance(data, Mapping) else DEFAULT  # what is no mapping is refused where it is read
    if isinstance(data, Mapping) and isinstance(data.get("hardware"), Mapping):
        refuse_renamed(data["hardware"])
    return from_dict(cluster_class(backend), data, "cluster.")


def cluster_from_record(data: Mapping[str, Any]) -> ClusterConfig:
    """The same of what a trial's record holds, which an earlier version may have written (see ``from_record``)."""
    return from_record(cluster_class(data.get("backend", DEFAULT)), data)
