"""Sources of weights for inference: a checkpoint of any layout, or a folder in the Hugging Face layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from trainer.checkpoint.pieces import inside
from trainer.checkpoint.shards import piece_of
from trainer.checkpoint.tuned import fill, open_reader
from trainer.convert.huggingface import read_weights
from trainer.shared.records.artifacts import checkpoint_facts, newest_checkpoint
from trainer.shared.records.manifest import CheckpointError, FoundCheckpoint, read_manifest
from trainer.shared.records.model_files import model_of
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.keys import MOST
from trainer.shared.run.read import from_record
from trainer.shared.run.resolved import ResolvedModelConfig
from trainer.shared.run.schema import TuneConfig
from trainer.shared.run.tuning import MERGED, virtual_tokens
from trainer.state.parameters import OptimizerShard


@dataclass(frozen=True)
class Weights:
    """A model's shape, and ``load``, which fills a rank's share of the weights and raises ``ConfigError`` if they cannot be read. ``tune``
    describes additions that are not merged into them, ``base`` is the folder that they were tuned from."""

    model: ResolvedModelConfig
    load: Callable[[Sequence[OptimizerShard]], None]
    tune: TuneConfig = field(default_factory=TuneConfig)
    base: str | None = None

    @property
    def pairs(self) -> bool:
        """Tells whether an encoder reads texts, and its decoder answers."""
        return self.model.encoder_layers > 0

    @property
    def lengths(self) -> tuple[int, int | None]:
        """Returns ``lengths`` of the model."""
        return lengths(self.model, self.tune)


def lengths(model: ResolvedModelConfig, tune: TuneConfig) -> tuple[int, int | None]:
    """Returns the tokens of the longest text, and None; of an encoder those of the longest prompt and of the longest answer to it, which
    relative positions do not limit."""
    if not model.encoder_layers:
        return model.seq - virtual_tokens(tune), None
    return (model.seq, model.decoder_seq) if model.positions == "learned" else (MOST, MOST)


def open_weights(folder: Path) -> Weights:
    """Opens the weights in ``folder``. ``ConfigError`` if there are none that can be read."""
    model, path = model_of(folder), newest_checkpoint(folder)
    if path is None:
        return Weights(model, lambda owned: _from_huggingface(folder, owned))
    tune = from_record(TuneConfig, checkpoint_facts(path)[1].get("tune") or {})
    merged = tune.method in MERGED
    left = TuneConfig() if merged else replace(tune, dropout=0.0)
    return Weights(model, lambda owned: _from_checkpoint(path, merged, owned), left, tune.base)


def _from_checkpoint(path: Path, merge: bool, owned: Sequence[OptimizerShard]) -> None:
    try:
        found = FoundCheckpoint(0, 0, path)
        fill(open_reader(found, read_manifest(found), merge), owned)
    except CheckpointError as error:
        raise ConfigError(f"{error}; give another checkpoint") from None


def _from_huggingface(folder: Path, owned: Sequence[OptimizerShard]) -> None:
    for name, weight in read_weights(folder):
        for part in owned:
            if part.record.name == name:
                piece = piece_of(part)
                local = weight[inside(piece.region, tuple((0, n) for n in weight.shape))].flatten()
                part.weight[: piece.numel] = local[piece.offset : piece.offset + piece.numel]
