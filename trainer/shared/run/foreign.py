"""The schema of another trainer's command, which trains in place of ours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from trainer.shared.run.keys import key

AT_RUN_TIME = ("python", "folder", "rank", "local_rank", "node_rank", "master_addr", "master_port")
"""Placeholders of a command that only the rank can fill in; ``folder`` holds the files of ``CommandConfig.files``, ``python`` is the rank's."""
STARTS, REPORTS = ("rank", "node"), ("first", "last")


@dataclass
class CommandConfig:
    """One command on every rank (or node), with everything filled in but ``AT_RUN_TIME``."""

    trainer: str = key("", "name of the trainer's profile")
    starts: str = key("rank", "the command runs once per rank, with torchrun's variables, or once per node and starts its ranks", choices=STARTS)
    words: list[str] = key(list, "the command; {folder}, {rank}, ... are filled in on the rank")
    files: dict[str, str] = key(dict, "files that the command reads, by name in {folder}")
    environment: dict[str, str] = key(dict, "further environment variables of the command")
    workdir: Optional[str] = key(None, "folder in which the command runs; null = that of the rank")
    code: Optional[str] = key(None, "digest of the script, so that a changed script is another trial")
    log: list[str] = key(list, "patterns that read the log of the reporting rank; named groups carry their unit")
    reports: str = key("first", "which rank's log tells of steps", choices=REPORTS)
    failures: dict[str, list[str]] = key(dict, "patterns of the log by the reason that they stand for")
    success: Optional[str] = key(None, "pattern without which a run that ended with code 0 has failed; null = none is needed")
