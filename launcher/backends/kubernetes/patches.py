"""``cluster.patch``: laid over an object, unless it takes away what the launcher itself needs of it. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from launcher.backends.kubernetes.manifests import CONTAINER, DIRECTORY, Manifest, merge
from trainer.spec import ConfigError

Steps = tuple[str, ...]
"""Keys from the outermost to the innermost."""

_HEAD: tuple[Steps, ...] = (
    ("apiVersion",), ("kind",), ("metadata", "name"), ("metadata", "namespace"), ("metadata", "annotations", DIRECTORY),
)  # fmt: skip
_FILES = ("data", "binaryData")
"""Of a ConfigMap: what the pods read, which is what the trial's record says."""
_PARTS: tuple[Steps, ...] = (("spec",), ("spec", "template"), ("spec", "replicatedJobs"), ("spec", "tasks"), ("spec", "trainer"))
"""What the pods are made of, in one kind or another."""
_CONTAINERS = ("spec", "containers")
"""Of a pod; the one that the ranks run in has to be among them."""
_LONGEST = 60
"""Characters of a value in an error."""


def patched(kind: str, manifest: Manifest, patch: Mapping[str, Any], labels: Sequence[str]) -> Manifest:
    """``manifest``, an object of ``kind`` or the template of pods, with ``patch`` laid over it. ``labels`` are the launcher's own.
    ``ConfigError`` where the object could not be created, or not be found again."""
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
    yield from (path for path in (*_HEAD, *own, *files) if _at(after, path) != _at(before, path))
    for path in _PARTS:
        there, now = _at(before, path), _at(after, path)
        if there and not (now and isinstance(now, type(there))):
            yield path
    if CONTAINER in _names(before, _CONTAINERS) and CONTAINER not in _names(after, _CONTAINERS):
        yield _CONTAINERS


def _names(manifest: Manifest, path: Steps) -> list[Any]:
    """Names of the items of a list; empty where there is none."""
    items = _at(manifest, path)
    return [item.get("name") for item in items if isinstance(item, Mapping)] if isinstance(items, list) else []


def _at(item: Any, path: Steps) -> Any:
    for step in path:
        item = item.get(step) if isinstance(item, Mapping) else None
    return item


def _culprit(patch: Mapping[str, Any], path: Steps) -> tuple[Steps, Any]:
    """How far along ``path`` the patch goes, and what it has there."""
    item: Any = patch
    for number, step in enumerate(path):
        if not isinstance(item, Mapping) or step not in item:
            return path[:number], item
        item = item[step]
    return path, item
