"""Files of environment variables, which keep secrets out of everything that is stored: lines ``NAME=value``, values as they stand."""

from __future__ import annotations

import re
from pathlib import Path

from trainer.shared.run.errors import ConfigError

_LINE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=.*")


def names_in(file: str) -> list[str]:
    """Names of the variables in ``file``; empty lines and those that begin with ``#`` are no variables. ``ConfigError`` when it cannot be
    read, others may read it, or a line is no variable; no value is ever repeated."""
    path = Path(file).expanduser()
    try:
        shared, lines = path.stat().st_mode & 0o077, path.read_bytes().decode().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cluster.env_from={file} cannot be read ({_words(error)}); give a text file of lines NAME=value") from None
    if shared:
        raise ConfigError(f"cluster.env_from={file} may be read or changed by others; run: chmod 600 {file}")
    return [_name(file, number, line) for number, line in enumerate(lines, 1) if line and not line.startswith("#")]


def _name(file: str, number: int, line: str) -> str:
    match = _LINE.fullmatch(line)
    if match is None or "\r" in line or "\0" in line:
        raise ConfigError(f"cluster.env_from={file}: line {number} is not NAME=value; correct it")
    return match[1]


def _words(error: Exception) -> str:
    return error.strerror or type(error).__name__ if isinstance(error, OSError) else "it is no text"
