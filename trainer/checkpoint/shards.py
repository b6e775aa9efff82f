"""Writes each rank's file of a checkpoint, and reads a rank's part from all files.

A piece of a parameter is stored with its master weight and its moments, one after the other, each in the order of its elements, with a
checksum each. An imported model has weights only; its moments are read as zero.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from trainer.checkpoint.folder import rank_file, sync
from trainer.checkpoint.pieces import ParameterPiece, inside, numel_of, overlap
from trainer.shared.records.manifest import ITEM_BYTES, CheckpointError
from trainer.shared.run.files import write_json
from trainer.state.parameters import OptimizerShard

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES}


@dataclass(frozen=True)
class PieceSnapshot:
    """A copy of one piece of the training state. Tensors are flat, on the CPU."""

    piece: ParameterPiece
    states: Mapping[str, Tensor]


def piece_of(owned: OptimizerShard) -> ParameterPiece:
    """The part of the global parameter that ``owned`` holds; padding at the end of a local tensor belongs to no piece."""
    region = owned.record.region
    real = numel_of(region)
    start, stop = min(owned.offset, real), min(owned.offset + owned.numel, real)
    return ParameterPiece(owned.record.name, owned.record.shape, region, start, stop - start)


def snapshot(state: Iterable[OptimizerShard]) -> list[PieceSnapshot]:
    """Copies this rank's pieces to the CPU. From CUDA the copies are queued, into pinned memory: wait before reading."""
    return [_snapshot(owned) for owned in state if owned.saves and piece_of(owned).numel]


def _snapshot(owned: OptimizerShard) -> PieceSnapshot:
    piece = piece_of(owned)
    return PieceSnapshot(piece, {name: _copy(state[: piece.numel], owned.weight.dtype) for name, state in owned.states.items()})


def _copy(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    on_cuda = tensor.is_cuda
    copy = torch.empty(tensor.shape, dtype=dtype, pin_memory=on_cuda)
    return copy.copy_(tensor, non_blocking=on_cuda)


def write_rank(folder: Path, rank: int, snapshots: Iterable[PieceSnapshot]) -> None:
    """Writes one rank's file, then the index that marks it complete."""
    path = folder / f"{rank_file(rank)}.bin"
    with path.open("wb") as file:
        pieces = [_write_piece(file, s) for s in snapshots]
        size = file.tell()
    sync(path)
    write_json(path.with_suffix(".json"), {"file": path.name, "bytes": size, "pieces": pieces})


def _write_piece(file: BinaryIO, s: PieceSnapshot) -> dict[str, Any]:
    piece, at, checksums = s.piece, file.tell(), {}
    for name, tensor in s.states.items():
        content = tensor.numpy().data.cast("B")
        checksums[name] = zlib.crc32(content)
        file.write(content)
    dtype = str(s.states["weight"].dtype).removeprefix("torch.")
    place = {"name": piece.name, "shape": piece.shape, "region": piece.region, "offset": piece.offset, "numel": piece.numel}
    return place | {"dtype": dtype, "at": at, "crc32": checksums}


class Reader:
    """The content of one checkpoint by parameter name."""

    def __init__(self, folder: Path, manifest: Mapping[str, Any]) -> None:
        self.folder = folder
        self.stored: dict[str, list[Mapping[str, Any]]] = {}
        for entry in manifest["pieces"]:
            self.stored.setdefault(entry["name"], []).append(entry)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Global shape of every parameter."""
        return {name: tuple(entries[0]["shape"]) for name, entries in self.stored.items()}

    def read(self, piece: ParameterPiece, states: Mapping[str, Tensor]) -> None:
        """Fills ``states``, flat tensors of ``piece.numel`` elements (any type, any device). Raises ``CheckpointError`` for a damaged file,
        and for a parameter that is missing, incomplete, or of another shape."""
        entries = self.stored.get(piece.name, [])
        if not entries or self.shapes[piece.name] != piece.shape:
            have = f"has shape {list(self.shapes[piece.name])}" if entries else "is not there"
            raise CheckpointError(
                f"checkpoint {self.folder}: parameter {piece.name} {have}; this model needs it with shape {list(piece.shape)}"
            )
        for name, target in states.items():
            found = sum(self._copy_overlap(entry, name, piece, target) for entry in entries)
            if found != piece.numel:
                raise CheckpointError(f"checkpoint {self.folder}: {name} of {piece.name} is incomplete ({found} of {piece.numel} elements)")

    def _copy_overlap(self, entry: Mapping[str, Any], state: str, requested: ParameterPiece, target: Tensor) -> int:
        """Copies the overlap of a stored piece with the requested one; returns the number of elements."""
        stored = ParameterPiece(entry["name"], tuple(entry["shape"]), tuple(map(tuple, entry["region"])), entry["offset"], entry["numel"])
        common = [
            (to, own, at, box, shared)
            for to, own in requested.runs()
            for at, box in stored.runs()
            if (shared := overlap(own, box)) is not None
        ]
        if not common:
            return 0
        source = self._load(entry, state)
        for to, own, at, box, shared in common:
            _view(target, to, own)[inside(shared, own)] = _view(source, at, box)[inside(shared, box)].to(target)
        return sum(numel_of(shared) for *_, shared in common)

    def _load(self, entry: Mapping[str, Any], state: str) -> Tensor:
        """One state of a stored piece, flat, with its checksum verified."""
        dtype, numel, checksums = DTYPES[entry["dtype"]], entry["numel"], entry["crc32"]
        if state not in checksums:
            return torch.zeros(numel, dtype=dtype)
        path, size = self.folder / entry["file"], numel * dtype.itemsize
        try:
            with path.open("rb") as file:
                file.seek(entry["at"] + size * list(checksums).index(state))
                content = bytearray(file.read(size))
        except OSError as error:
            raise CheckpointError(f"checkpoint {self.folder}: {entry['file']} cannot be read: {error.strerror}") from None
        if len(content) != size or zlib.crc32(content) != checksums[state]:
            raise CheckpointError(f"checkpoint {self.folder}: {entry['file']} is damaged ({state} of {entry['name']} fails its checksum)")
        return torch.frombuffer(content, dtype=dtype)


def _view(flat: Tensor, position: int, box: tuple[tuple[int, int], ...]) -> Tensor:
    """The box that starts at ``position`` of a flat tensor, in its own shape."""
    return flat[position : position + numel_of(box)].view([stop - start for start, stop in box])
