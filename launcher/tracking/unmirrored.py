"""Lists sweeps that MLflow may not have in full: a file for each, in a folder next to the trials.

    <root>/unmirrored/NAME    there is news of the sweep on disk
    <root>/unmirrored/.NAME   it is being copied, or was when its copier was killed; holds what went wrong last

Whoever changes a sweep adds it. The copier takes it first and forgets it once all is copied; news that comes meanwhile is a file of
its own again. So nothing is forgotten, whoever is killed when.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

FOLDER = "unmirrored"


def add(root: Path, sweep: str) -> None:
    """There is news of ``sweep``."""
    path = root / FOLDER / sweep
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


def names(root: Path) -> list[str]:
    """Sweeps with news, copied now or not, sorted. No name of a sweep begins with a dot."""
    try:
        return sorted({path.name.removeprefix(".") for path in (root / FOLDER).iterdir()})
    except (FileNotFoundError, NotADirectoryError):
        return []


def take(root: Path, sweep: str) -> None:
    """Marks ``sweep`` as being copied: at least its present state on disk."""
    with suppress(FileNotFoundError):
        (root / FOLDER / sweep).replace(_taken(root, sweep))


def forget(root: Path, sweep: str) -> None:
    """All that was on disk when ``sweep`` was taken is copied."""
    _taken(root, sweep).unlink(missing_ok=True)


def complain(root: Path, sweep: str, trouble: str) -> None:
    """Records why a sweep could not be copied."""
    _taken(root, sweep).write_text(trouble)


def trouble(root: Path, sweep: str) -> str:
    """Returns the last error; empty without one."""
    with suppress(FileNotFoundError):
        return _taken(root, sweep).read_text()
    return ""


def _taken(root: Path, sweep: str) -> Path:
    return root / FOLDER / f".{sweep}"
