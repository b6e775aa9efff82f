"""Small files that one program writes while others read them: whole or absent, never a part; and logs that are read while they grow."""

from __future__ import annotations

import json
import math
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


def write_json(path: Path, data: Any, *, durable: bool = False) -> None:
    """``write_text`` of ``data`` as JSON, with null for the numbers that JSON does not have."""
    write_text(path, _text(data), durable=durable)


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
        return json.dumps(finite(data)) + "\n"
    return "{\n" + ",\n".join(f" {json.dumps(str(name))}: {json.dumps(finite(value))}" for name, value in data.items()) + "\n}\n"


def _mode(path: Path) -> int:
    """Permissions of the file that is replaced."""
    try:
        return stat.S_IMODE(path.stat().st_mode)
    except FileNotFoundError:
        return 0o644


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in ``path``; None when there is no such file, or it is torn, or it holds something else."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def finite(data: Any) -> Any:
    """``data`` with null in place of numbers that JSON does not have: infinities and NaN."""
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, dict):
        return {key: finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [finite(value) for value in data]
    return data


class Tail:
    """The lines of a file that grows, from byte ``offset`` on. A file that is missing or shorter than that was started again."""

    def __init__(self, path: Path, offset: int = 0):
        self.path, self.offset = path, offset

    def lines(self, rest: bool = False) -> list[bytes]:
        """The lines completed since the last call, without their ends; with ``rest`` also one that has no end yet."""
        try:
            with self.path.open("rb") as file:
                start = file.seek(self.offset if self.offset <= os.fstat(file.fileno()).st_size else 0)
                data = file.read()
        except OSError:
            self.offset = 0
            return []
        whole = data if rest else data[: data.rfind(b"\n") + 1]
        self.offset = start + len(whole)
        return whole.splitlines()

    def objects(self) -> list[dict[str, Any]]:
        """The JSON objects among the completed lines; what is damaged is passed over."""
        return [value for line in self.lines() if (value := _object(line)) is not None]


def last_object(path: Path, tail: int = 8192) -> dict[str, Any] | None:
    """The last whole JSON object of a file of lines that is still being written, read from its last ``tail`` bytes."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - tail))
            lines = file.read().split(b"\n")[:-1]
    except OSError:
        return None
    return next((value for line in reversed(lines) if (value := _object(line)) is not None), None)


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
