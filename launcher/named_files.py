"""Files and folders that a person names: what cannot be written is refused before anything is started, links stay links."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

from trainer.shared.run.errors import ConfigError
from trainer.shared.run.files import write_text

_PROBE = b"\0" * 4096
"""Written to see whether there is room: a full file system often still takes an empty file."""
_BEGINNING = 65536
"""Characters of a file that tell who wrote it."""


def write_named(path: str | Path, text: str, what: str) -> None:
    """Write the file that ``what``, an option or key, names as ``path``: whole or not at all, through symbolic links. ``ConfigError`` if
    that cannot be done; anything but an ordinary file is never replaced."""
    target = check_file(path, what)
    try:
        write_text(target, text)
    except OSError as error:
        raise _refused(what, path, error) from None


def check_file(path: str | Path, what: str) -> Path:
    """Where ``write_named`` would write: ``path`` with its links followed. ``ConfigError`` if it could not, with nothing changed."""
    try:
        kind = _kind(os.stat(path).st_mode)
    except FileNotFoundError:
        kind = ""
    except (OSError, ValueError) as error:
        raise _refused(what, path, error) from None
    if kind:
        raise ConfigError(f"{what}={path} is {kind}, not a file; give the name of a file")
    if not str(path):
        raise ConfigError(f"{what}= names no file; give the name of one")
    target = Path(os.path.realpath(path))
    check_folder(target.parent, what, path)
    return target


def check_own(path: str | Path, what: str, wrote: Callable[[str], bool]) -> Path:
    """The same for a command that may be repeated: ``ConfigError`` also where a file has something in it of which ``wrote``, told how it
    begins, does not say that this command wrote it. It may be somebody's only copy."""
    target = check_file(path, what)
    if target.is_file() and target.stat().st_size and not wrote(_beginning(target)):
        raise ConfigError(
            f"{what}={path} exists and stays what it is, since this command did not write it; choose another name, or remove it"
        )
    return target


def _beginning(path: Path) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace", newline="") as file:
            return file.read(_BEGINNING)
    except OSError:
        return ""


def check_folder(path: str | Path, what: str, named: str | Path | None = None) -> None:
    """``ConfigError`` unless files can be written in the folder ``path``, or it can be made. Nothing is left there.

    ``what`` is the option or key that names it as ``named`` (``path`` itself, if not given).
    """
    named = path if named is None else named
    if not str(named):
        raise ConfigError(f"{what}= names no folder; give the name of one (is a variable of a script not set?)")
    folder = Path(path).absolute()
    try:
        folder = _there(folder)
        if not folder.is_dir():
            raise ConfigError(f"{what}={named} cannot be made, since {folder} is not a folder; name another place")
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(_PROBE)
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise _refused(what, named, error) from None


def _there(folder: Path) -> Path:
    """``folder``, or the nearest above it that is there. ``OSError`` where those between could not be made, or looked for."""
    missing: list[bytes] = []
    while True:
        try:
            os.lstat(folder)
        except (FileNotFoundError, NotADirectoryError):
            missing.append(os.fsencode(folder.name))
            folder = folder.parent
            continue
        if folder.is_dir() and max(map(len, missing), default=0) > os.pathconf(folder, "PC_NAME_MAX"):
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))  # the system says so only once those above it are made
        return folder


def _kind(mode: int) -> str:
    """Names the kind of a file that is not an ordinary one."""
    tests = {
        stat.S_ISDIR: "a folder", stat.S_ISCHR: "a device", stat.S_ISBLK: "a device", stat.S_ISFIFO: "a pipe", stat.S_ISSOCK: "a socket",
    }  # fmt: skip
    return next((words for test, words in tests.items() if test(mode)), "")


def _refused(what: str, path: str | Path, error: OSError | ValueError) -> ConfigError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return ConfigError(f"{what}={path} cannot be written: {reason}; name another place")
