"""Small files that other programs read at any time, so they are written atomically; and logs that are read while they grow."""

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
    """Replaces ``path`` in one step. ``durable`` also survives a power failure; a killed process does no harm either way."""
    with _temporary_file(path, text, durable) as temporary:
        os.replace(temporary, path)


def write_json(path: Path, data: Any, *, durable: bool = False) -> None:
    """Writes ``data`` by ``write_text`` as JSON, with null for NaN and infinities."""
    write_text(path, _text(data), durable=durable)


def write_json_first(path: Path, data: Any) -> bool:
    """Writes ``path`` atomically unless it exists; returns False if it does, even if this machine's cache has not seen it yet."""
    with _temporary_file(path, _text(data)) as temporary:
        return _put_first(temporary, path)


def remove_if(path: Path, condition: Callable[[dict[str, Any] | None], bool]) -> None:
    """Removes ``path`` if its content meets ``condition``. It is moved away first, so a file that is written meanwhile stays."""
    with _temporary_file(path, "") as moved, suppress(FileNotFoundError):
        os.replace(path, moved)
        if not condition(read_json(Path(moved))):
            _put_first(moved, path)


def look_again(folder: Path) -> None:
    """Drops this machine's cache of a folder that others write to: network file systems cache listings, also of absent files.

    Creating and removing a file changes the folder, so the next listing asks the server.
    """
    with suppress(OSError):  # absent, full or read-only: the cache has to do
        descriptor, temporary = tempfile.mkstemp(prefix=".look.", dir=folder)
        os.close(descriptor)
        os.unlink(temporary)
        os.listdir(folder)


@contextmanager
def _temporary_file(path: Path, text: str, durable: bool = False) -> Iterator[str]:
    """Yields a uniquely named file with ``text`` in the folder of ``path``; removes it at the end if it still exists."""
    descriptor, temporary = _temporary(path)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
            if durable:
                stream.flush()
                os.fsync(stream.fileno())
        os.chmod(temporary, _mode(path))
        yield temporary
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)  # a full disk does not say of which file
        raise
    finally:
        Path(temporary).unlink(missing_ok=True)


def _temporary(path: Path) -> tuple[int, str]:
    """Opens a uniquely named file in the folder of ``path``, which is created if it is missing."""
    try:
        return tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        return tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)


def _put_first(source: str, path: Path) -> bool:
    """Links ``source`` as ``path`` unless that exists: the file system's server decides, not this machine's cache."""
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
    """Returns JSON with one line per entry of an object, which costs a tenth of full indentation."""
    if not isinstance(data, dict) or not data:
        return json.dumps(finite(data)) + "\n"
    return "{\n" + ",\n".join(f" {json.dumps(str(name))}: {json.dumps(finite(value))}" for name, value in data.items()) + "\n}\n"


def _mode(path: Path) -> int:
    """Returns the permissions of the file that is replaced."""
    try:
        return stat.S_IMODE(path.stat().st_mode)
    except FileNotFoundError:
        return 0o644


def read_json(path: Path) -> dict[str, Any] | None:
    """Reads the object in ``path``; returns None if there is no such file, or it is incomplete, or something else."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def finite(data: Any) -> Any:
    """Returns ``data`` with null in place of infinities and NaN, which JSON does not have."""
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, dict):
        return {key: finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [finite(value) for value in data]
    return data


class Tail:
    """The lines of a growing file from byte ``offset``. A file that is missing or shorter than that is read from its start."""

    def __init__(self, path: Path, offset: int = 0):
        self.path, self.offset = path, offset

    def lines(self, rest: bool = False) -> list[bytes]:
        """Returns the lines completed since the last call, without line ends; with ``rest`` also an unfinished last line."""
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
        """Returns the JSON objects among the completed lines; damaged lines are skipped."""
        return [value for line in self.lines() if (value := _object(line)) is not None]


def last_object(path: Path, tail: int = 8192) -> dict[str, Any] | None:
    """Returns the last whole JSON object of a file of lines that is still being written, read from its last ``tail`` bytes."""
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
