"""Weights of tuned models: a base, and a checkpoint of the tuned parts beside it.

The manifest's section ``tune`` has the method, the base's folder, and ``identity``, which names the base by its manifest's digest, and so
by the checksums of its weights, wherever it lies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint.pieces import ParameterPiece, inside, whole
from trainer.checkpoint.shards import Reader, piece_of
from trainer.shared.records.artifacts import OTHER_BASE, check_model_of, newest_checkpoint
from trainer.shared.records.manifest import CheckpointError, FoundCheckpoint, read_manifest
from trainer.shared.records.resume import digest_of, newest
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.read import from_record
from trainer.shared.run.schema import ModelConfig, TuneConfig
from trainer.shared.run.tuning import MERGED
from trainer.state.parameters import OptimizerShard


def tune_of(manifest: Mapping[str, Any]) -> TuneConfig:
    """Returns the manifest's section on tuning."""
    return from_record(TuneConfig, manifest.get("tune") or {})


def read_base(folder: Path, model: ModelConfig, state: Iterable[OptimizerShard]) -> None:
    """Fills weights from the newest checkpoint in ``folder``. ``ConfigError`` if it is of another model, or cannot be read."""
    found = newest(folder)
    try:
        manifest = read_manifest(found)
        if manifest.get("tune"):
            raise ConfigError(
                f"{found.path} holds {manifest['tune']['method']} weights alone, without their base; merge it: trireme convert"
            )
        check_model_of(found.path, manifest["model"], model, OTHER_BASE)
        fill(Reader(found.path, manifest), state)
    except CheckpointError as error:
        raise ConfigError(f"{error}; give another checkpoint") from None


def fill(reader: Reader | Merged, state: Iterable[OptimizerShard]) -> None:
    """Reads this rank's weights."""
    for owned in state:
        piece = piece_of(owned)
        reader.read(piece, {"weight": owned.weight[: piece.numel]})


def open_reader(found: FoundCheckpoint, manifest: Mapping[str, Any], merge: bool = True) -> Reader | Merged:
    """Opens a checkpoint's weights with its base's, merged or as they are. Raises ``ConfigError`` if the base is gone or has changed, or
    the method cannot be merged."""
    reader, saved = Reader(found.path, manifest), manifest.get("tune")
    if not saved:
        return reader
    tune = tune_of(manifest)
    if tune.base is None:
        raise ConfigError(f"{found.path} was tuned from initial weights, which no checkpoint holds; tune from a tune.base")
    path = newest_checkpoint(Path(tune.base))
    if path is None or digest_of(base := FoundCheckpoint(0, 0, path)) != saved["identity"]:
        raise ConfigError(
            f"{found.path} was tuned from {tune.base}, which is not there any more or has changed; put the checkpoint that it was tuned "
            "from back there, as the newest"
        )
    if merge and tune.method not in MERGED:
        raise ConfigError(
            f"{found.path} holds weights of {tune.method}, which cannot be merged into those of the base; use 'trireme evaluate'"
        )
    return Merged(reader, Reader(base.path, read_manifest(base)), tune, merge)


class Merged:
    """Reads a base with its tuning applied: ``W + alpha / rank B A`` for lora, scaled rows and columns for ia3; in fp64, rounded once."""

    def __init__(self, added: Reader, base: Reader, tune: TuneConfig, merge: bool):
        self.added, self.base, self.tune, self.merge = added, base, tune, merge

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self.base.shapes | ({} if self.merge else self.added.shapes)

    def read(self, piece: ParameterPiece, states: Mapping[str, Tensor]) -> None:
        """Reads like ``Reader.read``."""
        if piece.name in self.added.stored:
            self.added.read(piece, states)
            return
        self.base.read(piece, states)
        if self.merge and (change := self._change(piece.name, piece.shape)) is not None:
            target, (kind, values) = states["weight"], change
            local = values[inside(piece.region, tuple((0, n) for n in piece.shape))].flatten()[piece.offset : piece.offset + piece.numel]
            exact = torch.empty(piece.numel, dtype=torch.float64)
            self.base.read(piece, {"weight": exact})
            target.copy_(exact + local if kind == "sum" else exact * local)

    def _change(self, name: str, shape: tuple[int, ...]) -> tuple[str, Tensor] | None:
        """Returns the addend or factor of the parameter ``name``; None if it is untouched."""
        layer, _, key = name.rpartition(".")
        if f"{layer}.lora_a" in self.added.stored and key == "weight":
            a, b = self._whole(f"{layer}.lora_a"), self._whole(f"{layer}.lora_b")
            return "sum", ((b.flatten(0, -2) @ a) * (self.tune.alpha / self.tune.rank)).view(shape)
        half, _, matrix = layer.rpartition(".")
        if f"{half}.scale.weight" not in self.added.stored or matrix not in ("qkv", "down"):
            return None
        scale = self._whole(f"{half}.scale.weight")
        if matrix == "down":
            return ("product", scale.expand(shape)) if key == "weight" else None
        rows = torch.cat((scale.new_ones(shape[0], shape[1] - 2, shape[2]), scale), dim=1)  # queries stay as they are
        return "product", rows.unsqueeze(-1).expand(shape) if key == "weight" else rows

    def _whole(self, name: str) -> Tensor:
        shape = self.added.shapes[name]
        values = torch.empty(whole(name, shape).numel, dtype=torch.float64)
        self.added.read(whole(name, shape), {"weight": values})
        return values.view(shape)
