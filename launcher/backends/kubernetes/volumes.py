"""Makes the volumes and mounts of pods, and maps paths to them. Pure."""

from __future__ import annotations

import ipaddress
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Optional

from launcher.backends.kubernetes.values import NAME, said
from launcher.config.mounts import parse_mount, within
from trainer.shared.run.errors import ConfigError, listed
from trainer.shared.run.keys import key

SOURCES = ("claim", "host_path", "nfs", "config_map", "secret")
CONFIG_DIR, OUT_DIR, CODE_DIR = "/trireme", "/trials", "/trireme-code"
"""Pod folders of the run and its programs, of output, and of the ranks' code."""
DATA_DIR = "/trireme-data"
"""Pod folder for preparing a corpus that is on no volume."""


@dataclass
class VolumeConfig:
    """Something mounted into every pod. Exactly one source is given."""

    mount: str = key("", "absolute path inside the container")
    claim: Optional[str] = key(None, "source: name of a PersistentVolumeClaim in the namespace")
    host_path: Optional[str] = key(None, "source: path on the node")
    nfs: Optional[str] = key(None, "source: SERVER:/PATH")
    config_map: Optional[str] = key(None, "source: name of a ConfigMap")
    secret: Optional[str] = key(None, "source: name of a Secret, mounted as files")
    sub_path: Optional[str] = key(None, "folder inside the source that is mounted")
    read_only: bool = key(False, "mount read-only")

    @property
    def writable(self) -> bool:
        """Pods never write into a ConfigMap or a Secret."""
        return not self.read_only and self.config_map is None and self.secret is None


def nfs_of(text: str) -> tuple[str, str]:
    """Returns server and path of ``SERVER:/PATH``; strips the brackets of an IPv6 address. Raises ``ConfigError`` unless it has both."""
    server, found, path = text.partition(":/")
    if server.startswith("[") and server.endswith("]") and _is_ipv6(server[1:-1]):
        server = server[1:-1]
    if not found or not server or set(server) & set("[]/ \t\n"):
        raise ConfigError(f"cluster.volumes: {said('nfs', text)} is not SERVER:/PATH; give both, as in filer:/data or [fe80::1]:/data")
    return server, f"/{path}"


def _is_ipv6(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).version == 6
    except ValueError:
        return False


def host_mount(text: str) -> VolumeConfig:
    """An entry of ``container.mounts``: a path of the node."""
    mount = parse_mount(text)
    return VolumeConfig(mount=mount.target, host_path=mount.source, read_only=mount.read_only)


def volume_on(path: str, volumes: Sequence[VolumeConfig]) -> VolumeConfig | None:
    """The volume that pods see at ``path``: the innermost; None if there is none."""
    there = posixpath.normpath(path)
    covering = [volume for volume in volumes if within(there, posixpath.normpath(volume.mount))]
    return max(covering, key=lambda volume: len(posixpath.normpath(volume.mount)), default=None)


def check_volumes(volumes: Sequence[VolumeConfig], own: Mapping[str, str]) -> None:
    """Raises ``ConfigError`` for the first invalid mount. ``own`` are the launcher's mounts and their content."""
    taken = {posixpath.normpath(path): what for path, what in own.items()}
    for volume in volumes:
        _check_source(volume)
        _check_place(volume)
        place = posixpath.normpath(volume.mount)
        if place in taken:
            raise ConfigError(
                f"cluster.volumes: {said('mount', volume.mount)} is taken by {taken[place]}; mount the volume somewhere else "
                "(cluster.volumes, cluster.container.mounts)"
            )
        taken[place] = "another volume"


def _check_source(volume: VolumeConfig) -> None:
    given = [name for name in SOURCES if getattr(volume, name) is not None]
    if len(given) != 1:
        raise ConfigError(
            f"cluster.volumes: the volume at {volume.mount!r} has {len(given)} sources; give exactly one of {listed(SOURCES)}"
        )
    for name in ("claim", "config_map", "secret"):
        if (value := getattr(volume, name)) is not None:
            NAME.check(value, f"cluster.volumes: {said(name, value)}")
    if volume.nfs is not None:
        nfs_of(volume.nfs)
    if volume.host_path is not None and (not volume.host_path.startswith("/") or _climbs(volume.host_path)):
        raise ConfigError(f"cluster.volumes: {said('host_path', volume.host_path)} is not an absolute path without '..'; give one")


def _check_place(volume: VolumeConfig) -> None:
    if not volume.mount.startswith("/"):
        raise ConfigError(f"cluster.volumes: mount={volume.mount!r} is not an absolute path; give one")
    if ":" in volume.mount:
        raise ConfigError(f"cluster.volumes: {said('mount', volume.mount)} has a ':', which no mount may have; choose another path")
    if posixpath.normpath(volume.mount) in ("/", "//"):
        raise ConfigError(f"cluster.volumes: {said('mount', volume.mount)} would hide the image; choose a folder")
    if volume.sub_path is not None and (volume.sub_path.startswith("/") or _climbs(volume.sub_path)):
        raise ConfigError(
            f"cluster.volumes: {said('sub_path', volume.sub_path)} is not a path below the volume; give a relative one without '..'"
        )


def _climbs(path: str) -> bool:
    return ".." in path.split("/")
