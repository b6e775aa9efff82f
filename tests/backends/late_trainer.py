"""Played ranks whose last words become visible seconds after their job has ended, as on a file system with caches.

What ``LATE`` names (result.json, or failure-1.json say) is written under another name, and moved by a process that outlives the job.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

from tests.sweep import played

SECONDS = 4


def main(argv: list[str]) -> int:
    write, late = played.write_outcome, os.environ["LATE"].split()

    def write_outcome(path: Path, data: Any) -> None:
        if path.name not in late:
            return write(path, data)
        hidden = path.with_name(f".late.{path.name}")
        write(hidden, data)
        command = ["sh", "-c", f'sleep {SECONDS}; mv "$1" "$2"', "sh", str(hidden), str(path)]
        quiet: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        subprocess.Popen(command, start_new_session=True, **quiet)

    played.write_outcome = write_outcome  # type: ignore[assignment]
    return played.entry(argv)
