"""The log files of a job's ranks as one stream of lines, at rest or while they grow."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.shared.run.files import Tail

if TYPE_CHECKING:
    from launcher.trials.job import Job

_FOLLOW_SECONDS = 0.2


def read_logs(job: Job, ended: Callable[[], bool] | None = None) -> Iterator[str]:
    """Yields lines of all ranks of ``job``, prefixed ``[rank] `` if it has several; follows until ``ended()``, if given."""
    logs = [(f"[{rank}] " if job.world_size > 1 else "", Tail(job.log_path(rank))) for rank in range(job.world_size)]
    while True:
        last = ended is None or ended()  # asked before reading, so that nothing written before the end is missed
        for prefix, log in logs:
            yield from (prefix + line.decode("utf-8", "replace") for line in log.lines(rest=last))
        if last:
            return
        time.sleep(_FOLLOW_SECONDS)


def log_attempts(directory: Path) -> list[int]:
    """The attempts that left a log in a trial's directory, ascending."""
    found = (re.fullmatch(r"attempt(\d+)\.rank\d+\.log", path.name) for path in (directory / "logs").glob("attempt*.log"))
    return sorted({int(match[1]) for match in found if match})
