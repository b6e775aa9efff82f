"""Mounts: what a container sees of the files of the machine that it runs on. Pure."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from trainer.shared.run.errors import ConfigError


@dataclass(frozen=True)
class Mount:
    """``source`` of the host as ``target`` in the container."""

    source: str
    target: str
    read_only: bool = False

    def __str__(self) -> str:
        return f"{self.source}:{self.target}" + (":ro" if self.read_only else "")

    def translate(self, path: str) -> str | None:
        """The host's name of ``path`` inside; None if it is not below ``target``."""
        return os.path.normpath(os.path.join(self.source, os.path.relpath(path, self.target))) if within(path, self.target) else None


def within(path: str, folder: str) -> bool:
    return folder == "/" or path == folder or path.startswith(folder + "/")


def parse_mount(text: str) -> Mount:
    """``SRC:DST[:ro]``; neither pyxis nor Apptainer can express a comma, and colons separate."""
    source, _, rest = text.partition(":")
    target, _, mode = rest.partition(":")
    if not source.startswith("/") or not target.startswith("/") or mode not in ("", "ro", "rw") or "," in text:
        raise ConfigError(
            f"cluster.container.mounts holds {text!r}, which is not SRC:DST or SRC:DST:ro; give absolute paths without ',' and ':'"
        )
    return Mount(os.path.normpath(source), os.path.normpath(target), mode == "ro")


def seen(path: str, mounts: Sequence[Mount]) -> tuple[str, bool] | None:
    """The host's name of ``path`` inside, and whether it can be written there; None if no mount brings it in."""
    covering = [mount for mount in reversed(mounts) if within(path, mount.target)]  # of two in one place the later one is seen
    deepest = max(covering, key=lambda mount: len(mount.target), default=None)
    return None if deepest is None else (deepest.translate(path) or "", not deepest.read_only)
