"""Saving and resuming, as the train loop sees it.

``save`` copies this rank's part of the state and returns; a thread writes it while training continues. Ranks exchange
nothing but files, so saving cannot disturb the collectives of a step. ``resume`` is collective: all ranks load the same
checkpoint, the newest complete one.
"""

from __future__ import annotations

import sys
import threading
import uuid
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint.folder import Folder
from trainer.checkpoint.shards import PieceSnapshot, Reader, piece_of, snapshot, write_rank
from trainer.comm.collectives import Group
from trainer.shared.records.manifest import CheckpointError, FoundCheckpoint, read_manifest
from trainer.shared.records.outcome import Reason
from trainer.shared.records.resume import DataOrder, check_continues, check_folder, continued_from, first_whole
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.resolved import ResolvedModelConfig
from trainer.shared.run.schema import CheckpointConfig
from trainer.state.parameters import OptimizerShard

PLAIN = (ConfigError, CheckpointError)
"""Errors that are raised on every rank if they occur on one."""


@dataclass(frozen=True)
class Resumed:
    """The state from which a run continues: completed steps, and the rest of ``save``'s arguments."""

    step: int
    extra: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run, on one rank. Making one is collective over ``world``.

    ``run`` tells this run from others in the same folder, ``attempt`` counts its own starts. With ``new_data`` a checkpoint of another seed
    or corpus continues with the first sample of this run's; without, it is refused. ``tune`` is the manifest's section of tuning, where
    only a part is trained and saved; ``optimizer`` the kind whose moments are saved.
    """

    def __init__(
        self,
        settings: CheckpointConfig,
        root: Path,
        world: Group,
        model: ResolvedModelConfig,
        data: DataOrder,
        run: str,
        attempt: int,
        timeout_s: float,
        tune: dict[str, Any] | None = None,
        optimizer: str = "adamw",
    ) -> None:
        self.optimizer = optimizer
        self.settings, self.world, self.model, self.data, self.timeout_s, self.tune = settings, world, model, data, timeout_s, tune
        self.folder = Folder(root, run, attempt, token=world.gather_objects(uuid.uuid4().hex[:12])[0])
        world.together(self._enter, PLAIN)
        self.writer: threading.Thread | None = None
        self.error: Exception | None = None

    def _enter(self) -> None:
        """A run that saves nothing does not claim the folder."""
        check_folder(self.folder.root)
        if self.world.index == 0 and self.settings.every > 0:
            self.folder.enter()

    def save(self, step: int, state: Iterable[OptimizerShard], extra: dict[str, Any]) -> None:
        """Begins to save ``step`` completed steps, after the previous save. ``extra`` is plain data of rank 0. Raises ``CheckpointError``
        if the previous one failed."""
        self.finish()
        copies = snapshot(state)
        copied = torch.cuda.Event() if any(t.is_pinned() for s in copies for t in s.states.values()) else None
        if copied is not None:
            copied.record()
        self.writer = threading.Thread(target=self._write, args=(step, copies, copied, extra), name=f"checkpoint {step}", daemon=True)
        self.writer.start()

    def finish(self) -> None:
        """Waits until the last save is on disk, on rank 0 until it is committed. ``CheckpointError`` if it failed."""
        if self.writer is not None:
            self.writer.join()
            self.writer = None
        if self.error is not None:
            error, self.error = self.error, None
            raise error

    def resume(self, state: Iterable[OptimizerShard]) -> Resumed | None:
        """Loads the newest complete checkpoint into ``state``, whatever layout wrote it; None if there is none. Falls back from damaged
        ones. Raises ``ConfigError`` if all are damaged, or one is of another model or other data."""
        owned = list(state)
        found: list[FoundCheckpoint] = self.world.gather_objects(self.folder.found())[0]
        candidates = continued_from(found, self.folder.root, self.settings.at)

        def skip(damage: CheckpointError) -> None:
            if self.world.index == 0:
                print(f"warning: {damage}; trying the previous checkpoint", file=sys.stderr)

        return first_whole(candidates, lambda found: self.world.together(lambda: self._load(found, owned), PLAIN), skip)

    def _load(self, found: FoundCheckpoint, state: list[OptimizerShard]) -> Resumed:
        manifest = read_manifest(found)
        check_continues(found, manifest, self.model, self.tune, self.data, self.settings.new_data, self.optimizer)
        extra = self._positioned(manifest["data"], manifest["extra"])
        reader = Reader(found.path, manifest)
        for owned in state:
            piece = piece_of(owned)
            if owned.record.optional and piece.name not in reader.stored:
                owned.weight.zero_()
                continue
            reader.read(piece, {name: state[: piece.numel] for name, state in owned.states.items()})
        return Resumed(manifest["step"], extra)

    def _positioned(self, saved: dict[str, Any] | None, extra: dict[str, Any]) -> dict[str, Any]:
        """``extra`` with the next sample. An imported model has no data (None) and starts with the first."""
        position = extra | ({"samples": 0} if self.data.differs(saved) else {})
        if saved is not None and saved["global_batch"] != self.data.global_batch and self.world.index == 0:
            batches = f"run.global_batch was {saved['global_batch']} and is {self.data.global_batch} now"
            print(f"note: {batches}; the data continues with sample {position['samples']}", flush=True)
        return position

    def _write(self, step: int, copies: list[PieceSnapshot], copied: torch.cuda.Event | None, extra: dict[str, Any]) -> None:
        """The thread's work. Its errors are raised by the next ``save`` or ``finish``."""
        try:
            if copied is not None:
                copied.synchronize()
            write_rank(self.folder.workspace(step), self.world.index, copies)
            if self.world.index == 0:
                facts = {"model": asdict(self.model), "optimizer": self.optimizer, "data": asdict(self.data), "extra": extra}
                tuned = {} if self.tune is None else {"tune": self.tune}
                self.folder.commit(step, self.world.size, facts | tuned, self.timeout_s)
                self.folder.keep(self.settings.keep)
        except Exception as error:
            plain = f"cannot write the checkpoint of step {step} to {self.folder.root}: {getattr(error, 'strerror', None) or error}"
            reason = Reason.CONFIGURATION if isinstance(error, OSError) else Reason.ERROR
            self.error = error if isinstance(error, CheckpointError) else CheckpointError(plain, reason)
            if self.world.index:
                self.folder.give_up(step, self.world.index, self.error)
