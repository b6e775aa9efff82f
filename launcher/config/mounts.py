"""Mounts: the host's files that a container sees. Pure."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from trainer.shared.run.errors import ConfigError


@dataclass(frozen=True)
class Mount:
    """A path of the host, ``source``, that is ``target`` in the container."""

    source: str
    target: str
    read_only: bool = False

    def __str__(self) -> str:
        return f"{self.source}:{self.target}" + (":ro" if self.read_only else "")

    def translate(self, path: str) -> str | None:
        """Returns the path on the host of ``path`` in the container; None if it is not below ``target``."""
        return os.path.normpath(os.path.join(self.source, os.path.relpath(path, self.target))) if within(path, self.target) else None


def within(path: str, folder: str) -> bool:
    return folder == "/" or path == folder or path.startswith(folder + "/")


def parse_mount(text: str) -> Mount:
    """Parses ``SRC:DST[:ro]``. Refuses commas, which neither pyxis nor Apptainer can express; colons separate."""
    source, _, rest = text.partition(":")
    target, _, mode = rest.partition(":")
    if not source.startswith("/") or not target.startswith("/") or mode not in ("", "ro", "rw") or "," in text:
        raise ConfigError(
            f"cluster.container.mounts holds {text!r}, which is not SRC:DST or SRC:DST:ro; give absolute paths without ',' and ':'"
        )
    return Mount(os.path.normpath(source), os.path.normpath(target), mode == "ro")


def seen(path: str, mounts: Sequence[Mount]) -> tuple[str, bool] | None:
    """Returns the path on the host of ``path`` in the container, and whether it can be written there; None if no mount covers it."""
    covering = [mount for mount in reversed(mounts) if within(path, mount.target)]  # of two mounts on one target the later one is visible
    deepest = max(covering, key=lambda mount: len(mount.target), default=None)
    return None if deepest is None else (deepest.translate(path) or "", not deepest.read_only)
