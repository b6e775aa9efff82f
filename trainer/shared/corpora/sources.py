"""Sources of text: Python's standard library, a text file or one of JSON lines, or a folder of them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from trainer.shared.run.errors import ConfigError
from trainer.shared.run.read import SURROGATE
from trainer.shared.run.schema import DataConfig

STDLIB = "stdlib"
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
"""Folders of the standard library that are left out: tests (a third of it, much generated data) and installed packages."""

LONGEST_LINE = 1 << 24
"""Bytes of a line that are read to tell lines of JSON from one document."""


@dataclass
class Source:
    """The files of one source, in a fixed order, and those that turned out not to be text."""

    data: DataConfig
    root: Path
    files: list[Path]
    skipped: list[Path] = field(default_factory=list)

    @property
    def total_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.files)

    def fingerprint(self) -> str:
        """Returns a hash of every file's name, size and time of change: equal means that nothing was touched."""
        digest = hashlib.sha256()
        for path in self.files:
            stat = path.stat()
            digest.update(f"{self._name(path)}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode("utf-8", "surrogateescape"))
        return digest.hexdigest()

    def documents(self) -> Iterator[tuple[int, list[str]]]:
        """Yields, for each file, its size in bytes and its documents (a text file is one, a file of JSON lines one per line)."""
        self.skipped.clear()
        for path in self.files:
            size = path.stat().st_size
            if holds_json_lines(path):
                for line_bytes, document in self._json_lines(path):
                    yield line_bytes, [document]
            else:
                text = self._text(path)
                yield size, [] if text is None else [text]

    def _text(self, path: Path) -> str | None:
        try:
            return path.read_text(encoding="utf-8-sig")  # a byte order mark is not text
        except UnicodeDecodeError:
            if len(self.files) == 1:
                raise ConfigError(f"data.source={self.data.source} is not UTF-8 text; convert it, or give another file") from None
            self.skipped.append(path)
            return None
        except OSError as error:
            raise ConfigError(f"data.source: cannot read {path}: {error.strerror}; check its permissions or narrow data.pattern") from None

    def _json_lines(self, path: Path) -> Iterator[tuple[int, str]]:
        try:
            with path.open("rb") as lines:
                for number, line in enumerate(lines, start=1):
                    if line.strip():
                        yield len(line), self._document(line, f"{path} line {number}")
        except OSError as error:
            raise ConfigError(f"data.source: cannot read {path}: {error.strerror}; check its permissions or narrow data.pattern") from None

    def _document(self, line: bytes, where: str) -> str:
        key = self.data.text_key
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            raise ConfigError(f"{where} is not valid JSON; fix or remove that line") from None
        if not isinstance(record, dict):
            raise ConfigError(f'{where} is not a JSON object with a field \'{key}\'; each line must be one, as in {{"{key}": "..."}}')
        if not isinstance(record.get(key), str):
            fields = ", ".join(name for name, value in record.items() if isinstance(value, str)) or "none"
            raise ConfigError(f"{where} has no text in field '{key}' (fields with text: {fields}); set data.text_key, or fix that line")
        if SURROGATE.search(record[key]):
            raise ConfigError(f"{where} has half a character in field '{key}' (a surrogate alone); fix or remove that line")
        return str(record[key])

    def _name(self, path: Path) -> str:
        return path.name if path == self.root else path.relative_to(self.root).as_posix()


def holds_json_lines(path: Path) -> bool:
    """Returns True for a file of JSON objects, one a line: by its name, or for other names of JSON by its first two lines."""
    name = path.suffix.lower()
    if name in (".jsonl", ".ndjson") or name != ".json":
        return name in (".jsonl", ".ndjson")
    try:
        with path.open("rb") as file:
            lines = [line for line in (file.readline(LONGEST_LINE) for _ in range(2)) if line.strip()]
        return bool(lines) and all(isinstance(json.loads(line), dict) for line in lines)
    except (OSError, ValueError, RecursionError):
        return False  # one document over several lines, or something that reading it will name


def open_source(data: DataConfig) -> Source:
    """Finds the files of ``data.source``. Raises ``ConfigError`` if there are none."""
    if data.source == STDLIB:
        root = Path(os.__file__).parent
        return _source(data, root, _library(root))
    root = Path(data.source)
    if root.is_file():
        return Source(data, root, [root])
    if not root.is_dir():
        raise ConfigError(f"data.source={data.source} is neither '{STDLIB}' nor a file or folder; give the path of your text")
    try:
        found = [p for p in root.glob(data.pattern) if not any(part.startswith(".") for part in p.relative_to(root).parts)]
    except (ValueError, NotImplementedError, OSError) as error:
        raise ConfigError(
            f"data.pattern={data.pattern!r} cannot be searched in data.source={data.source}: {error}; use one like **/*.txt"
        ) from None
    return _source(data, root, [path for path in found if not _made_here(path, root, data)])


def _made_here(path: Path, root: Path, data: DataConfig) -> bool:
    """Returns whether a file of the source lies in the prepared folder: the output of an earlier preparation is not the user's text."""
    target = Path(os.path.abspath(data.path))
    return Path(os.path.abspath(root)) in target.parents and target in Path(os.path.abspath(path)).parents


def _library(root: Path) -> list[Path]:
    """Lists Python's own modules; site-packages, often ten times as large, is skipped."""
    found = []
    for place, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS]
        found += [Path(place, name) for name in names if name.endswith(".py")]
    return found


def _source(data: DataConfig, root: Path, found: list[Path]) -> Source:
    files = sorted(p for p in found if p.is_file())
    if not files:
        raise ConfigError(f"data.source={data.source} has no file that matches data.pattern={data.pattern}; change one of them")
    return Source(data, root, files)
