"""A container image made here, without a registry: a skeleton into which the machine's own /usr and virtual environment are mounted."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from pathlib import Path

IMAGE, PAUSE = "trireme.test/host:1", "trireme.test/pause:1"
_FOLDERS = ("usr", "etc", "proc", "sys", "dev", "tmp")
_LINKS = {"bin": "usr/bin", "sbin": "usr/sbin", "lib": "usr/lib", "lib64": "usr/lib64"}
_FILES = {
    "etc/passwd": "root:x:0:0:root:/:/bin/sh\ntrainer:x:1000:1000::/tmp:/bin/sh\n",
    "etc/group": "root:x:0:\ntrainer:x:1000:\n",
    "etc/nsswitch.conf": "hosts: files dns\n",
}


def save(path: Path, name: str, entrypoint: list[str], program: Path | None = None) -> None:
    """Write an image archive as ``ctr images import`` reads it. ``busybox``: a static one, which becomes /busybox."""
    layer = _layer(program)
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Env": ["PATH=/usr/bin:/bin"], "Entrypoint": entrypoint},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
        "history": [{"created": "1970-01-01T00:00:00Z"}],
    }
    manifest = [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]
    with tarfile.open(path, "w") as archive:
        for file, content in (("manifest.json", manifest), ("config.json", config), ("layer.tar", layer)):
            _add(archive, file, content if isinstance(content, bytes) else json.dumps(content).encode())


def _layer(program: Path | None) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as layer:
        for name in _FOLDERS:
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
            layer.addfile(folder)
        for name, target in _LINKS.items():
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, target
            layer.addfile(link)
        for name, text in _FILES.items():
            _add(layer, name, text.encode())
        if program is not None:
            _add(layer, "busybox", program.read_bytes(), 0o755)
    return stream.getvalue()


def _add(archive: tarfile.TarFile, name: str, content: bytes, mode: int = 0o644) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), mode
    archive.addfile(entry, io.BytesIO(content))
