"""Decides which host paths a container of a Slurm job mounts.

A run opens its paths by one name inside and outside. A path that no configured mount (or OCI bundle) covers is mounted by itself; one that
cannot be is refused before submission.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.config.mounts import Mount, parse_mount, seen, within
from launcher.config.schema import ContainerConfig
from trainer.shared.corpora.sources import STDLIB
from trainer.shared.records.artifacts import ArtifactKind
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.read import SECTION

SYSTEM = ("/bin", "/boot", "/dev", "/etc", "/lib", "/lib32", "/lib64", "/proc", "/run", "/sbin", "/sys", "/usr")
"""Folders that belong to the image, with all that is in them."""
PARENTS = ("/", "/home", "/mnt", "/opt", "/root", "/srv", "/tmp", "/var")
"""Folders that an image may use too: something in them can be mounted, they themselves cannot."""


@dataclass(frozen=True)
class HostPath:
    """A file or folder of the host that the ranks of a run open as ``path``."""

    key: str  # the setting that says so
    path: str
    source: str  # its name on the host
    written: bool = False


def runtime(container: ContainerConfig) -> str:
    """pyxis, apptainer, oci or none; ``auto`` goes by the image: X.sif, a folder (OCI bundle), else pyxis."""
    if container.image is None:
        return "none"
    if container.runtime != "auto":
        return container.runtime
    if container.image.endswith(".sif"):
        return "apptainer"
    is_path = container.image.startswith(("/", "./", "../"))
    return "oci" if is_path and not container.image.endswith(".sqsh") else "pyxis"


# ---------------------------------------------------------------- mounts that are there


def given_mounts(container: ContainerConfig) -> list[Mount]:
    """Returns the mounts of ``cluster.container.mounts``, or of an OCI bundle."""
    return bundle_mounts(container) if runtime(container) == "oci" else [parse_mount(text) for text in container.mounts]


def bundle_mounts(container: ContainerConfig) -> list[Mount]:
    """Returns bind mounts and root file system of an OCI bundle's config.json; empty without the file (which ``check`` refuses)."""
    bundle = Path(container.image or "")
    try:
        settings = json.loads((bundle / "config.json").read_text())
        root = Mount(os.path.normpath(bundle / settings["root"]["path"]), "/", read_only=settings["root"]["path"] != "/")
        binds = [entry for entry in settings.get("mounts", ()) if {"bind", "rbind"} & {entry.get("type"), *entry.get("options", ())}]
        return [root, *(Mount(entry["source"], entry["destination"], "ro" in entry.get("options", ())) for entry in binds)]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(
            f"cluster.container.image={bundle}: its config.json cannot be read as that of an OCI bundle; correct it"
        ) from None


# ---------------------------------------------------------------- paths that have to be there


def host_paths(config: Mapping[str, Any] | None, directory: Path, code: Path | None, mounts: Sequence[Mount] = ()) -> list[HostPath]:
    """Lists host paths that a run's ranks read or write; corpus and checkpoints as ``mounts`` name them, the others as the launcher
    does."""
    paths = [HostPath("sweep.dir", str(directory), str(directory), written=True)]
    if code is not None:
        paths.append(HostPath("sweep.dir", str(code), str(code)))
    if config is None:
        return paths
    if config["data"]["kind"] != "synthetic":
        paths.append(_named("data.path", config["data"]["path"], mounts))
    stage = config.get(SECTION) or {"sources": {}}
    paths += [HostPath(f"input {name}", folder, folder) for name, folder in stage["sources"].items()]
    reads = stage.get("gives") == ArtifactKind.CORPUS.value or config["data"]["kind"] == "instructions"
    if reads and config["data"]["source"] != STDLIB:
        paths.append(HostPath("data.source", config["data"]["source"], config["data"]["source"]))
    if stage.get("folder"):
        made = os.path.dirname(stage["folder"])
        paths.append(HostPath("sweep.dir", made, made, written=True))
    if config["run"]["checkpoint"]["dir"] is not None:
        paths.append(_named("run.checkpoint.dir", config["run"]["checkpoint"]["dir"], mounts, written=True))
    return paths


def _named(key: str, path: str, mounts: Sequence[Mount], written: bool = False) -> HostPath:
    if not path.startswith("/"):
        raise ConfigError(f"{key}={path} is a relative path, which means another folder inside the container; give an absolute path")
    path = os.path.normpath(path)
    there = seen(path, mounts)
    return HostPath(key, path, there[0] if there else path, written)


def missing_mounts(paths: Sequence[HostPath], mounts: Sequence[Mount]) -> list[tuple[HostPath, Mount]]:
    """Returns the mounts missing from ``mounts`` so that every path is seen as itself; read-only paths cannot be written."""
    added: list[tuple[HostPath, Mount]] = []
    for path in sorted(paths, key=lambda p: len(p.path)):
        there = seen(path.path, [*mounts, *(mount for _, mount in added)])
        if there is None or there[0] != path.source or (path.written and not there[1]):
            added.append((path, Mount(path.source, path.path, read_only=not path.written)))
    return added


def all_mounts(given: Sequence[Mount], paths: Sequence[HostPath]) -> list[Mount]:
    """Orders mounts: a mount into a folder comes after the folder."""
    return sorted([*given, *(mount for _, mount in missing_mounts(paths, given))], key=lambda mount: mount.target.count("/"))


# ---------------------------------------------------------------- said before anything is submitted


def check_paths(container: ContainerConfig, given: Sequence[Mount], paths: Sequence[HostPath]) -> None:
    """``ConfigError`` for the first path that the container cannot be given, or that cannot be written."""
    for path, _ in missing_mounts(paths, given):
        _check_mountable(path, container, given)
    for path in paths:
        if path.written:
            _check_writable(path)


def _check_mountable(path: HostPath, container: ContainerConfig, given: Sequence[Mount]) -> None:
    name = f"{path.key}={path.path}"
    same = next((mount for mount in given if mount.target == path.path and runtime(container) != "oci"), None)
    if same is not None and same.source != path.source:
        raise ConfigError(f"{name} would be hidden by {str(same)!r} of cluster.container.mounts; give that another target, or take it away")
    if same is not None:
        raise ConfigError(f"{name} is written to, and cluster.container.mounts brings it in read-only; take away that mount's ':ro'")
    if runtime(container) == "oci":
        entry = json.dumps({"destination": path.path, "type": "none", "source": path.source, "options": ["rbind"]})
        raise ConfigError(
            f"{name} is not mounted by the OCI bundle cluster.container.image={container.image}; add {entry} to the mounts "
            f"of its config.json"
        )
    if path.path in PARENTS or any(within(path.path, folder) for folder in SYSTEM):
        raise ConfigError(f"{name} cannot be mounted over the image's own {path.path}; choose a folder that images do not have")
    if set(path.path) & {",", ":"}:
        raise ConfigError(f"{name} cannot be mounted, for ',' and ':' separate mounts; choose a path without them")


def _check_writable(path: HostPath) -> None:
    """Nothing is created here: the job does that."""
    nearest = next(folder for folder in (Path(path.source), *Path(path.source).parents) if os.path.lexists(folder))
    if not nearest.is_dir():
        raise ConfigError(f"{path.key}={path.path} cannot be created: {nearest} is not a folder; choose another path")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{path.key}={path.path} cannot be written by this user ({nearest}); choose another path, or change its permissions"
        )
