"""What tests ask of processes that are not their own children."""

from __future__ import annotations

from pathlib import Path


def alive(pid: int) -> bool:
    """Whether a process runs; one that is dead and not yet collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter: it was collected while the file was read
        return False
