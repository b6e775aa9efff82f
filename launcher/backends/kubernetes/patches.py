"""Applies ``cluster.patch`` to an object, unless it removes fields that the launcher needs. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from launcher.backends.kubernetes.manifests import CONTAINER, DIRECTORY, JOB, PROGRAMS_VOLUME, Manifest, merge
from trainer.shared.run.errors import ConfigError

Steps = tuple[str, ...]
"""Keys, and in lists names of items, from the outermost to the innermost."""

_PODS: tuple[Steps, ...] = (
    ("spec",), ("spec", "template", "spec"), ("spec", "replicatedJobs", CONTAINER, "template", "spec", "template", "spec"),
    ("spec", "tasks", CONTAINER, "template", "spec"),
)  # fmt: skip
"""Paths of the pods' specification in each kind. Lists of named items are searched by name."""
_CONTAINERS = tuple((*pod, "containers", CONTAINER) for pod in _PODS)
"""The one that the ranks run in."""
_INDEXED = (("spec",), ("spec", "replicatedJobs", CONTAINER, "template", "spec"))
_COUNTS: tuple[Steps, ...] = (
    *((*job, field) for job in _INDEXED for field in ("completionMode", "completions", "parallelism")),
    ("spec", "replicatedJobs", CONTAINER, "replicas"), ("spec", "tasks", CONTAINER, "replicas"), ("spec", "trainer", "numNodes"),
)  # fmt: skip
"""Paths of the number and index of the pods."""
_SAME: tuple[Steps, ...] = (
    ("apiVersion",), ("kind",), ("metadata", "name"), ("metadata", "namespace"), ("metadata", "annotations", DIRECTORY),
    ("spec", "selector", JOB), *_COUNTS, *((*pod, "volumes", PROGRAMS_VOLUME, "configMap", "name") for pod in _PODS),
)  # fmt: skip
_FILES = ("data", "binaryData")
"""Paths of a ConfigMap that pods read and the trial's record describes."""
_PARTS: tuple[Steps, ...] = (
    ("spec",), ("spec", "template"), ("spec", "replicatedJobs"), ("spec", "tasks"), ("spec", "trainer"), *_PODS, *_CONTAINERS,
)  # fmt: skip
"""Paths of the pods' template in each kind."""
_NAMED: tuple[Steps, ...] = (
    ("spec", "trainer", "env"), *((*pod, "volumes") for pod in _PODS),
    *((*container, items) for container in _CONTAINERS for items in ("env", "volumeMounts")),
)  # fmt: skip
"""Lists whose items may be added to and changed, but have to stay."""
_ORDERED: tuple[Steps, ...] = (
    ("spec", "trainer", "command"), ("spec", "runtimePatches"), *((*container, "command") for container in _CONTAINERS),
)  # fmt: skip
"""Lists in which more may stand before, between and after the launcher's own items."""
_LONGEST = 60
"""Characters of a value in an error."""


def patched(kind: str, manifest: Manifest, patch: Mapping[str, Any], labels: Sequence[str]) -> Manifest:
    """Returns ``manifest`` of ``kind`` with ``patch`` applied. Raises ``ConfigError`` if the object would be invalid or not be found
    again."""
    changed: Manifest = merge(manifest, patch)
    for path in _lost(manifest, changed, labels):
        place, value = _culprit(patch, path)
        raise ConfigError(
            f"cluster.patch.{'.'.join((kind, *place))}={json.dumps(value, default=str)[:_LONGEST]} changes or takes away "
            f"{'.'.join(path)}, which the launcher itself needs; leave it out of the patch"
        )
    return changed


def _lost(before: Manifest, after: Manifest, labels: Sequence[str]) -> Iterator[Steps]:
    """Paths whose values have to stay as they are and have not, and those of parts that have become something else."""
    own = [("metadata", "labels", label) for label in labels]
    files = [(part, file) for part in _FILES for file in before.get(part, ())]
    for path in _PARTS:
        there, now = _at(before, path), _at(after, path)
        if there and not (now and isinstance(now, type(there))):
            yield path
    yield from (path for path in (*_SAME, *own, *files) if _at(after, path) != _at(before, path))
    items = [(*path, name) for path in _NAMED for name in _inside(_at(before, path))]
    yield from (path for path in items if not _serves(_at(before, path), _at(after, path)))
    yield from (path for path in _ORDERED if not _holds(_at(after, path), _at(before, path) or []))


def _serves(before: Manifest, after: Any) -> bool:
    """Returns whether a variable still has a value, a volume a source, and a mount its path."""
    return isinstance(after, Mapping) and len(after) > 1 and after.get("mountPath") == before.get("mountPath")


def _holds(items: Any, own: Sequence[Any]) -> bool:
    """Returns whether all of ``own`` are among ``items``, in order."""
    left = iter(items if isinstance(items, list) else ())
    return all(item in left for item in own)


def _at(item: Any, path: Steps) -> Any:
    for step in path:
        item = _inside(item).get(step)
    return item


def _inside(item: Any) -> Mapping[str, Any]:
    """Its parts: those of a mapping by key, those of a list by name."""
    if isinstance(item, list):
        return {part["name"]: part for part in item if isinstance(part, Mapping) and isinstance(part.get("name"), str)}
    return item if isinstance(item, Mapping) else {}


def _culprit(patch: Mapping[str, Any], path: Steps) -> tuple[Steps, Any]:
    """Returns how far along ``path`` the patch reaches, and its value there."""
    item: Any = patch
    for number, step in enumerate(path):
        if step not in _inside(item):
            return path[:number], item
        item = _inside(item)[step]
    return path, item
