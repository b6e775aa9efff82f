"""The folder of a run's checkpoints: one sub-folder per saved step, whole or not there.

    step-00000010-attempt-0/   manifest.json, rank-00000.bin, rank-00001.bin, ...
    .writing-<token>-...       being written; without a manifest under its final name nobody reads it
    .attempt-1                 the newest attempt that started here: older ones no longer commit or remove anything

Every rank writes its own file and says so in a small index beside it. When all indexes are there, rank 0 joins them to the
manifest and renames the folder to its final name: that is the commit. The final name carries the attempt, so an old process
that comes back to life can never write over what a newer attempt saved. ``token`` is drawn anew by every start, so that two
starts never mix their files.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config import ConfigError
from trainer.files import read_json, write_json

FORMAT = 1
MANIFEST = "manifest.json"
NAME = re.compile(r"step-(\d+)-attempt-(\d+)")
FENCE = re.compile(r"\.attempt-(\d+)")
POLL_S = 0.02


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or one that was written can no longer be read. The message names the file."""


@dataclass(frozen=True, order=True)
class Found:
    """A committed checkpoint. The newest is the largest."""

    step: int
    attempt: int
    path: Path


class Folder:
    """One run's checkpoints on disk, as seen by one attempt."""

    def __init__(self, root: Path, attempt: int, token: str) -> None:
        self.root, self.attempt, self.token = root, attempt, token

    def enter(self) -> None:
        """Claim the folder for this attempt (rank 0, once, before anything is read); removes what killed attempts left.

        ``ConfigError`` if a newer attempt was here already, or the folder cannot be written.
        """
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            (self.root / f".attempt-{self.attempt}").touch()
        except OSError as error:
            raise ConfigError(f"run.checkpoint.dir={self.root} cannot be written: {error.strerror}; choose another folder") from None
        newest = self.newest_attempt()
        if newest > self.attempt:
            raise ConfigError(
                f"run.checkpoint.dir={self.root}: attempt {newest} has started there already, so attempt {self.attempt} may not; "
                f"start with --attempt {newest} or more"
            )
        for path in self.root.glob(".writing-*"):
            shutil.rmtree(path, ignore_errors=True)
        for path in self.root.glob(".removed-*"):
            shutil.rmtree(path, ignore_errors=True)

    def newest_attempt(self) -> int:
        """The newest attempt that entered the folder."""
        return max((int(m[1]) for path in self.root.iterdir() if (m := FENCE.fullmatch(path.name))), default=-1)

    def found(self) -> list[Found]:
        """The committed checkpoints, newest first."""
        if not self.root.is_dir():
            return []
        names = [(m, path) for path in self.root.iterdir() if (m := NAME.fullmatch(path.name))]
        return sorted((Found(int(m[1]), int(m[2]), path) for m, path in names), reverse=True)

    def workspace(self, step: int) -> Path:
        """Where all ranks of this start write a step, before it is committed."""
        path = self.root / f".writing-{self.token}-step-{step:08d}"
        path.mkdir(parents=True, exist_ok=True)
        return path

    def give_up(self, step: int, rank: int, error: Exception) -> None:
        """Tell rank 0 that this rank could not write its part, so that it does not wait; best effort, the disk may be full."""
        with suppress(OSError):
            write_json(self.workspace(step) / f"{rank_file(rank)}.json", {"error": str(error)})

    def commit(self, step: int, world_size: int, facts: dict[str, Any], timeout_s: float) -> None:
        """Wait until every rank has written its part of ``step``, then make the checkpoint visible (rank 0).

        ``CheckpointError`` if a rank does not finish in time, or a newer attempt has taken over.
        """
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
        target = self.root / f"step-{step:08d}-attempt-{self.attempt}"
        self._check_fence(step)
        if target.exists():  # the same attempt was started twice and came to the same step again
            self._remove(target)
        work.rename(target)
        sync(self.root)

    def keep(self, count: int) -> None:
        """Remove all but the newest ``count`` checkpoints."""
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
                    f"{work}: rank {missing[0]} did not write its part within {timeout_s:g} s; the checkpoint is given up"
                )
            time.sleep(POLL_S)

    def _check_fence(self, step: int | None) -> None:
        newest = self.newest_attempt()
        if newest > self.attempt:
            what = "nothing more is removed" if step is None else f"step {step} is not saved"
            raise CheckpointError(f"{self.root}: attempt {newest} has taken over from attempt {self.attempt}; {what}")

    def _remove(self, path: Path) -> None:
        """Take a checkpoint out of sight in one move, then delete it: one that is half deleted is never found."""
        removed = self.root / f".removed-{self.token}-{path.name}"
        path.rename(removed)
        shutil.rmtree(removed)


def rank_file(rank: int) -> str:
    """The name of a rank's file and, without the suffix, of its index."""
    return f"rank-{rank:05d}"


def sync(path: Path) -> None:
    """Have the disk hold what was written to a file or folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_manifest(found: Found) -> dict[str, Any]:
    """The manifest of a committed checkpoint whose files are all there in full; ``CheckpointError`` otherwise."""
    try:
        manifest = json.loads((found.path / MANIFEST).read_text())
    except FileNotFoundError:
        raise CheckpointError(f"checkpoint {found.path} has no {MANIFEST}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"checkpoint {found.path}: {MANIFEST} cannot be read: {error}") from None
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"checkpoint {found.path} has format {manifest.get('format')}; this version reads format {FORMAT}")
    for name, size in manifest["files"].items():
        path = found.path / name
        if not path.is_file():
            raise CheckpointError(f"checkpoint {found.path}: {name} is missing")
        if path.stat().st_size != size:
            raise CheckpointError(f"checkpoint {found.path}: {name} has {path.stat().st_size} bytes, but {size} were written")
    return manifest
