"""The folder of a run's checkpoints: one sub-folder per saved step, complete or absent.

    step-00000010-start-0/   manifest.json, rank-00000.bin, rank-00001.bin, ...
    .writing-<token>-...     being written; readers ignore it
    .start-1                 claim of start number 1: lower numbers no longer commit or remove anything

Every rank writes its own file, then a small index. When all indexes are there, rank 0 merges them into the manifest and renames
the folder to its final name: that is the commit. The folder itself counts the starts of runs that save, so a run may continue
what another one saved, under its own layout, and fences it off. The final name contains the number, so a stale process can never
overwrite what a later one saved. Each start draws a new ``token``, so two starts never mix their files. Within one run, attempts
only increase: a late job of an old attempt is refused.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.shared.records.manifest import FORMAT, MANIFEST, CheckpointError, FoundCheckpoint
from trainer.shared.records.outcome import Reason
from trainer.shared.records.resume import found_in
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.files import read_json, write_json

STARTED = re.compile(r"(?:\.|step-\d+-)start-(\d+)")
"""Names that hold a start's number: its claim, and its saved steps, which may have been copied here without the claim."""
POLL_S = 0.02


class Folder:
    """One run's checkpoints on disk, as seen by one attempt. ``number`` is that of its start, on the rank that entered."""

    def __init__(self, root: Path, run: str, attempt: int, token: str) -> None:
        self.root, self.run, self.attempt, self.token = root, run, attempt, token
        self.number = -1

    def enter(self) -> None:
        """Claims the folder (rank 0, once, before reading); removes leftovers of killed starts. Raises ``ConfigError`` if a newer attempt
        of the same run was here already, or the folder cannot be written."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self._refuse_if_older()
            self.number = self._claim()
        except OSError as error:
            raise ConfigError(f"run.checkpoint.dir={self.root} cannot be written: {error.strerror}; choose another folder") from None
        for path in self.root.glob(".writing-*"):
            shutil.rmtree(path, ignore_errors=True)
        for path in self.root.glob(".removed-*"):
            shutil.rmtree(path, ignore_errors=True)

    def _refuse_if_older(self) -> None:
        starts = [read_json(self.root / f".start-{number}") or {} for number in self._numbers()]
        newest = max((start["attempt"] for start in starts if start.get("run") == self.run), default=-1)
        if newest > self.attempt:
            raise ConfigError(
                f"run.checkpoint.dir={self.root}: attempt {newest} of this run has started there already, "
                f"so attempt {self.attempt} may not; "
                "repeat the command that launched the run, which begins the next attempt if none is running, "
                f"or by hand start every rank with `python -m trainer CONFIG --attempt {newest + 1}`"
            )

    def _claim(self) -> int:
        while True:
            number = self.newest_start() + 1
            with (
                suppress(FileExistsError),
                (self.root / f".start-{number}").open("x") as file,
            ):  # of two concurrent starts one fails and takes the next number
                json.dump({"run": self.run, "attempt": self.attempt}, file)
                return number

    def _numbers(self) -> list[int]:
        return [int(m[1]) for path in self.root.iterdir() if (m := STARTED.fullmatch(path.name))]

    def newest_start(self) -> int:
        return max(self._numbers(), default=-1)

    def found(self) -> list[FoundCheckpoint]:
        return found_in(self.root)

    def workspace(self, step: int) -> Path:
        """Returns where all ranks of this start write a step before its commit."""
        path = self.root / f".writing-{self.token}-step-{step:08d}"
        path.mkdir(parents=True, exist_ok=True)
        return path

    def give_up(self, step: int, rank: int, error: Exception) -> None:
        """Tells rank 0 that this rank could not write its part, so that it does not wait. Best effort: the disk may be full."""
        with suppress(OSError):
            write_json(self.workspace(step) / f"{rank_file(rank)}.json", {"error": str(error)})

    def commit(self, step: int, world_size: int, facts: dict[str, Any], timeout_s: float) -> None:
        """Waits until every rank has written its part of ``step``, then makes the checkpoint visible (rank 0). Raises ``CheckpointError``
        if a rank does not finish in time, or a later start has taken over."""
        work = self.workspace(step)
        indexes = self._gather(work, world_size, timeout_s)
        manifest = {
            "format": FORMAT,
            "step": step,
            "attempt": self.attempt,
            **facts,
            "files": {index["file"]: index["bytes"] for index in indexes},
            "pieces": [piece | {"file": index["file"]} for index in indexes for piece in index["pieces"]],
        }
        write_json(work / MANIFEST, manifest)
        sync(work / MANIFEST)
        for index in indexes:
            (work / index["file"]).with_suffix(".json").unlink()
        target = self.root / f"step-{step:08d}-start-{self.number}"
        self._check_fence(step)
        work.rename(target)
        sync(self.root)

    def keep(self, count: int) -> None:
        """Removes all but the newest ``count`` checkpoints."""
        self._check_fence(None)
        for old in self.found()[count:]:
            self._remove(old.path)

    def _gather(self, work: Path, world_size: int, timeout_s: float) -> list[dict[str, Any]]:
        """The index that each rank wrote when its file was complete."""
        deadline = time.monotonic() + timeout_s
        indexes: dict[int, dict[str, Any]] = {}
        while True:
            for rank in range(world_size):
                if rank not in indexes and (index := read_json(work / f"{rank_file(rank)}.json")):
                    if "error" in index:
                        raise CheckpointError(f"rank {rank}: {index['error']}")
                    indexes[rank] = index
            if len(indexes) == world_size:
                return [indexes[rank] for rank in range(world_size)]
            if time.monotonic() > deadline:
                missing = sorted(set(range(world_size)) - set(indexes))
                raise CheckpointError(
                    f"{work}: rank {missing[0]} did not write its part within {timeout_s:g} s; the checkpoint is given up",
                    Reason.COMMUNICATION,
                )
            time.sleep(POLL_S)

    def _check_fence(self, step: int | None) -> None:
        newest = self.newest_start()
        if newest > self.number:
            what = "nothing more is removed" if step is None else f"step {step} is not saved"
            other = read_json(self.root / f".start-{newest}") or {}
            who = f"attempt {other.get('attempt')}" if other.get("run") == self.run else "another run"
            raise CheckpointError(f"{self.root}: {who} has taken over from attempt {self.attempt}; {what}")

    def _remove(self, path: Path) -> None:
        """Renames a checkpoint, then deletes it: readers never find a partly deleted one."""
        removed = self.root / f".removed-{self.token}-{path.name}"
        path.rename(removed)
        shutil.rmtree(removed)


def rank_file(rank: int) -> str:
    """The name of a rank's file and, without the suffix, of its index."""
    return f"rank-{rank:05d}"


def sync(path: Path) -> None:
    """Flushes a file or folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
