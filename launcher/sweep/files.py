"""Small files that are whole or absent: written beside their place, then renamed over it."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str, *, durable: bool = False) -> None:
    """Replace ``path`` in one step. ``durable`` also outlives a power cut; a killed process needs no such care."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
            if durable:
                stream.flush()
                os.fsync(stream.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_json(path: Path, data: Any, *, durable: bool = False) -> None:
    write_text(path, json.dumps(data, indent=1) + "\n", durable=durable)


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in ``path``; None when there is no such file, or it is torn, or it holds something else."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def last_json_line(path: Path, tail: int = 8192) -> dict[str, Any] | None:
    """The last whole line of a JSONL file that is still being written, read from its last ``tail`` bytes."""
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - tail))
            lines = stream.read().split(b"\n")[:-1]
    except OSError:
        return None
    for line in reversed(lines):
        try:
            data = json.loads(line)
        except ValueError:
            continue
        if isinstance(data, dict):
            return data
    return None
