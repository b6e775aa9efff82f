"""Small files that are whole or absent: written beside their place, then renamed over it, or linked to it where nobody may be overwritten."""

from __future__ import annotations

import json
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str, *, durable: bool = False) -> None:
    """Replace ``path`` in one step. ``durable`` also outlives a power cut; a killed process needs no such care."""
    with _beside(path, text, durable) as temporary:
        os.replace(temporary, path)


def write_json_first(path: Path, data: Any) -> bool:
    """Write ``path`` unless it exists, in one step; False when it does, even where this machine could not see it yet."""
    with _beside(path, _text(data)) as temporary:
        return _put_first(temporary, path)


def remove_if(path: Path, condition: Callable[[dict[str, Any] | None], bool]) -> None:
    """Remove ``path`` if what it holds meets ``condition``. Moved away first: what somebody puts there meanwhile stays, or comes back."""
    with _beside(path, "") as moved, suppress(FileNotFoundError):
        os.replace(path, moved)
        if not condition(read_json(Path(moved))):
            _put_first(moved, path)


def look_again(folder: Path) -> None:
    """Forget what this machine remembers of a folder that others write into: network file systems ask their server only now and then,
    also about files that were not there. A file made and removed changes the folder, and listing it asks the server."""
    with suppress(OSError):  # absent, full or read-only: then what is remembered must do
        descriptor, temporary = tempfile.mkstemp(prefix=".look.", dir=folder)
        os.close(descriptor)
        os.unlink(temporary)
        os.listdir(folder)


@contextmanager
def _beside(path: Path, text: str, durable: bool = False) -> Iterator[str]:
    """A file with ``text`` in the folder of ``path``, under a name of its own; removed at the end if it is still there."""
    descriptor, temporary = _temporary(path)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
            if durable:
                stream.flush()
                os.fsync(stream.fileno())
        os.chmod(temporary, _mode(path))
        yield temporary
    finally:
        Path(temporary).unlink(missing_ok=True)


def _temporary(path: Path) -> tuple[int, str]:
    """An open file with a name of its own in the folder of ``path``, which is made when it is missing."""
    try:
        return tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        return tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)


def _put_first(source: str, path: Path) -> bool:
    """Give the file ``source`` the name ``path`` as well, unless there is one: its file system decides, whatever is remembered here."""
    try:
        os.link(source, path)
    except FileExistsError:
        return False
    except OSError:  # a file system without links
        try:
            with path.open("x", encoding="utf-8") as stream:
                stream.write(Path(source).read_text(encoding="utf-8"))
        except FileExistsError:
            return False
    return True


def _text(data: Any) -> str:
    """JSON; an object has each of its entries on a line, which costs a tenth of what indenting all of it does."""
    if not isinstance(data, dict) or not data:
        return json.dumps(data) + "\n"
    return "{\n" + ",\n".join(f" {json.dumps(str(name))}: {json.dumps(value)}" for name, value in data.items()) + "\n}\n"


def _mode(path: Path) -> int:
    """Permissions of the file that is replaced."""
    try:
        return stat.S_IMODE(path.stat().st_mode)
    except FileNotFoundError:
        return 0o644


def write_json(path: Path, data: Any, *, durable: bool = False) -> None:
    write_text(path, _text(data), durable=durable)


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
