"""The manifest of a checkpoint. It is checked when it is read, so damage is found before anything is loaded.

format, step, attempt     of this file; completed steps; the attempt that saved them
model                     its shape
optimizer                 the kind whose moments it holds; older ones have none: adamw
data                      seed and name of the training data, the global batch, the length of a row; null for an imported model
tune                      method, base and its identity, where it holds only the tuned parameters (``trainer.checkpoint.tuned``)
extra                     samples (consumed), updates (of the optimizer), loss scale, steps that an average of weights is of (averaged)
files                     name -> bytes
pieces                    the location of each part of each parameter (``trainer.checkpoint.shards``); second moments of rows of matrices
                          are a parameter of their own, NAME.rows
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.shared.records.outcome import Reason
from trainer.shared.run.derived import FIRST_KEYS
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.optimizer import OPTIMIZERS
from trainer.shared.run.read import from_dict, from_record
from trainer.shared.run.schema import ModelConfig, TuneConfig

FORMAT = 2
MANIFEST = "manifest.json"
STATES = ("weight", "exp_avg", "exp_avg_sq", "average")
ITEM_BYTES = {"float32": 4, "float64": 8}


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or one that was written can no longer be read. The message names the file.

    ``reason``: why a run that meets it ends; by default the folder, which is the user's to fix.
    """

    def __init__(self, message: str, reason: Reason = Reason.CONFIGURATION):
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, order=True)
class FoundCheckpoint:
    """A committed checkpoint. The newest is the largest."""

    start: int
    step: int
    path: Path


def read_manifest(found: FoundCheckpoint) -> dict[str, Any]:
    """Reads the manifest of a committed checkpoint, consistent, with all files present in full. Raises ``CheckpointError`` otherwise."""
    try:
        manifest = json.loads((found.path / MANIFEST).read_text())
    except FileNotFoundError:
        raise CheckpointError(f"checkpoint {found.path} has no {MANIFEST}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"checkpoint {found.path}: {MANIFEST} cannot be read: {error}") from None
    try:
        form = _value(manifest, "format", int)
        if form != FORMAT:
            raise CheckpointError(f"checkpoint {found.path} has format {form}; this version reads format {FORMAT}")
        _check(manifest)
    except _Flaw as flaw:
        raise CheckpointError(f"checkpoint {found.path}: {MANIFEST} is damaged: {flaw}") from None
    for name, size in manifest["files"].items():
        path = found.path / name
        if not path.is_file():
            raise CheckpointError(f"checkpoint {found.path}: {name} is missing")
        if path.stat().st_size != size:
            raise CheckpointError(f"checkpoint {found.path}: {name} has {path.stat().st_size} bytes, but {size} were written")
    return manifest


class _Flaw(Exception):
    """A fault in a manifest."""


def _value(record: Any, name: str, *kinds: type) -> Any:
    """Returns ``record[name]``, if that is of one of the ``kinds`` (a bool is not a number)."""
    if type(record) is not dict or name not in record:
        raise _Flaw(f"{name} is missing")
    if type(record[name]) not in kinds:
        raise _Flaw(f"{name} is {record[name]!r:.40}")
    return record[name]


def _check(manifest: dict[str, Any]) -> None:
    for name in ("step", "attempt"):
        _value(manifest, name, int)
    _check_model(_value(manifest, "model", dict))
    kind = _value({"optimizer": OPTIMIZERS[0]} | manifest, "optimizer", str)
    if kind not in OPTIMIZERS:
        raise _Flaw(f"optimizer is {kind!r:.40}")
    if manifest.get("tune") is not None:
        _check_tune(_value(manifest, "tune", dict))
    data = _value(manifest, "data", dict, type(None))
    if data is not None:
        for name, kind in (("seed", int), ("corpus", str), ("global_batch", int)):
            _value(data, name, kind)
        _value({"seq": 1} | data, "seq", int)  # earlier ones have none: rows were as long as the model
    extra = _value(manifest, "extra", dict)
    for name in {"samples", "updates", *extra}:
        _value(extra, name, int, float)
    files = _value(manifest, "files", dict)
    for name in files:
        _value(files, name, int)
    for piece in _value(manifest, "pieces", list):
        _check_piece(piece, files)


def _check_model(model: dict[str, Any]) -> None:
    missing = [name for name in FIRST_KEYS if name not in model]
    if missing:
        raise _Flaw(f"model.{missing[0]} is missing")
    try:
        from_dict(ModelConfig, model, "model.")
    except ConfigError as error:
        raise _Flaw(str(error)) from None


def _check_tune(tune: dict[str, Any]) -> None:
    _value(tune, "identity", str)
    try:
        from_record(TuneConfig, tune)
    except ConfigError as error:
        raise _Flaw(str(error)) from None


def _check_piece(piece: Any, files: Mapping[str, int]) -> None:
    """Checks one stored piece: a range of a box of a parameter, in full inside its file."""
    name, file, dtype = (_value(piece, key, str) for key in ("name", "file", "dtype"))
    offset, numel, at = (_value(piece, key, int) for key in ("offset", "numel", "at"))
    shape, region, checksums = _value(piece, "shape", list), _value(piece, "region", list), _value(piece, "crc32", dict)
    for state in checksums:
        _value(checksums, state, int)
    boxed = len(shape) == len(region) and all(_within(side, n) for side, n in zip(region, shape))
    if not boxed or not 0 <= offset <= offset + numel <= math.prod(stop - start for start, stop in region):
        raise _Flaw(f"a piece of {name} lies outside of it")
    if file not in files or dtype not in ITEM_BYTES or not {"weight"} <= checksums.keys() <= set(STATES):
        raise _Flaw(f"a piece of {name} names an unknown file, dtype or state")
    if not 0 <= at <= at + numel * ITEM_BYTES[dtype] * len(checksums) <= files[file]:
        raise _Flaw(f"a piece of {name} lies outside of {file}")


def _within(side: Any, n: Any) -> bool:
    """Returns whether ``side`` is [start, stop] of a dimension of ``n``."""
    return type(n) is int and type(side) is list and [type(i) for i in side] == [int, int] and 0 <= side[0] <= side[1] <= n
