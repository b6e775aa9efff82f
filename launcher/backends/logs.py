"""The log files of a job's ranks as one stream of lines, at rest or while they grow."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from launcher.trials.job import Job

_FOLLOW_SECONDS = 0.2


def read_logs(job: Job, ended: Callable[[], bool] | None = None) -> Iterator[str]:
    """Lines of all ranks of ``job``, each prefixed ``[rank] `` when it has several; until ``ended()`` says so, if it is given.

    At rest the ranks follow one another; while following, lines come in the order in which they are found.
    """
    readers = {rank: _Reader(job.log_path(rank), f"[{rank}] " if job.world_size > 1 else "") for rank in range(job.world_size)}
    while True:
        last = ended is None or ended()  # asked before reading, so that nothing written before the end is missed
        for reader in readers.values():
            yield from reader.lines(last)
        if last:
            return
        time.sleep(_FOLLOW_SECONDS)


def log_attempts(directory: Path) -> list[int]:
    """The attempts that left a log in a trial's directory, ascending."""
    found = (re.fullmatch(r"attempt(\d+)\.rank\d+\.log", path.name) for path in (directory / "logs").glob("attempt*.log"))
    return sorted({int(match[1]) for match in found if match})


class _Reader:
    """New whole lines of one growing file."""

    def __init__(self, path: Path, prefix: str):
        self._path, self._prefix = path, prefix
        self._offset = 0

    def lines(self, rest: bool) -> Iterator[str]:
        """Lines completed since the last call; with ``rest`` also one that has no end yet."""
        try:
            with self._path.open("rb") as stream:
                stream.seek(self._offset)
                data = stream.read()
        except FileNotFoundError:
            return
        if not rest:
            data = data[: data.rfind(b"\n") + 1]
        self._offset += len(data)
        for line in data.decode("utf-8", "replace").splitlines():
            yield self._prefix + line
