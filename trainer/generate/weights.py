"""Where the weights of an inference come from: a checkpoint of any layout, or a folder in the Hugging Face layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.checkpoint.manifest import CheckpointError, FoundCheckpoint, read_manifest
from trainer.checkpoint.pieces import inside
from trainer.checkpoint.shards import piece_of
from trainer.checkpoint.tuned import fill, open_reader
from trainer.convert.huggingface import read_weights
from trainer.spec import ConfigError, ResolvedModelConfig
from trainer.spec.artifacts import newest_checkpoint
from trainer.spec.model_files import model_of
from trainer.state.parameters import Owned


@dataclass(frozen=True)
class Weights:
    """A model's shape, and ``load``, which fills a rank's share of the weights. It raises ``ConfigError`` if they cannot be read."""

    model: ResolvedModelConfig
    load: Callable[[Sequence[Owned]], None]


def open_weights(folder: Path) -> Weights:
    """The weights in ``folder``. ``ConfigError`` if there are none that can be read."""
    model, path = model_of(folder), newest_checkpoint(folder)
    return Weights(model, lambda owned: _from_huggingface(folder, owned) if path is None else _from_checkpoint(path, owned))


def _from_checkpoint(path: Path, owned: Sequence[Owned]) -> None:
    try:
        found = FoundCheckpoint(0, 0, path)
        fill(open_reader(found, read_manifest(found)), owned)
    except CheckpointError as error:
        raise ConfigError(f"{error}; give another checkpoint") from None


def _from_huggingface(folder: Path, owned: Sequence[Owned]) -> None:
    for name, weight in read_weights(folder)[1]:
        for part in owned:
            if part.record.name == name:
                piece = piece_of(part)
                local = weight[inside(piece.region, tuple((0, n) for n in weight.shape))].flatten()
                part.weight[: piece.numel] = local[piece.offset : piece.offset + piece.numel]
