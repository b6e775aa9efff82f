"""Dropout whose masks do not depend on the layout: each element's mask is a hash of its position in the global tensor.

The key is (seed, optimizer step, site in the network). The counter is the element's index in the tensor that a single process
with a single micro-batch would have. Replicas therefore drop the same elements, shards drop their own, and a recomputed forward
repeats the first one, without any generator state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainer.state.parameters import hash_of
from trainer.tensor.placed import PackedTextStarts
from trainer.tensor.region import Region, places
from trainer.tensor.traced import kept, numbered

GOLDEN, FIRST, SECOND = 0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
"""Constants of splitmix64 (Steele et al. 2014), as signed 64-bit numbers."""


@dataclass(frozen=True)
class DropoutKey:
    """The step and the rows that are being computed."""

    step: int = 0
    first_row: int = 0  # of the micro-batch, in the global batch
    texts: PackedTextStarts | None = None  # in packed rows


def stamp_of(key: DropoutKey) -> Tensor:
    """Encodes a key for compiled code: a tensor on the CPU."""
    return torch.tensor([key.step, key.first_row], device="cpu")


class Noise:
    """The source of dropout for all sites of a rank. The pipeline sets its ``key`` for each micro-batch."""

    def __init__(self, seed: int):
        self.seed, self.key = seed, DropoutKey()
        self.stamp = stamp_of(self.key)

    def texts(self) -> PackedTextStarts:
        """Returns the texts of the micro-batch, whose rows are packed."""
        assert self.key.texts is not None
        return self.key.texts

    @contextlib.contextmanager
    def at(self, key: DropoutKey) -> Iterator[None]:
        """Makes masks those of ``key`` inside the ``with`` block."""
        before = self.key, self.stamp
        self.key, self.stamp = key, stamp_of(key)
        try:
            yield
        finally:
            self.key, self.stamp = before

    def at_stamp(self, stamp: Tensor) -> contextlib.AbstractContextManager[None]:
        """Makes masks those of the stamp's key inside the ``with`` block."""
        return self.at(DropoutKey(*stamp.tolist()))

    def kept(self, site: str, p: float, axes: Sequence[tuple[Tensor, int]]) -> Tensor:
        """Returns the elements to keep, each with probability ``1 - p``.

        ``axes`` has the global positions and the global size of each dimension, the fastest-changing one last.
        """
        index: Tensor | int = 0
        for i, (positions, size) in enumerate(axes):
            shape = [1] * len(axes)
            shape[i] = -1
            index = index * size + positions.view(shape)
        assert isinstance(index, Tensor)
        key = hash_of(self.seed, self.key.step, site)
        return scramble((index * GOLDEN).add_(key)).bitwise_and_(2**31 - 1) >= int(p * 2**31)


def scramble(x: Tensor) -> Tensor:
    """Applies the finaliser of splitmix64 to int64, whose products wrap around, in place."""
    _mix(x, 30).mul_(FIRST)
    _mix(x, 27).mul_(SECOND)
    return _mix(x, 31)


def _mix(x: Tensor, bits: int) -> Tensor:
    """Replaces x by x xor its right shift, which fills with zeros, in place."""
    return x.bitwise_xor_((x >> bits).bitwise_and_((1 << (64 - bits)) - 1))


class HiddenDropout(nn.Module):
    """Dropout of x [s, b, h] between the matrices, of which this rank has its part of the sequence."""

    def __init__(self, p: float, site: str, noise: Noise, region: Region):
        super().__init__()
        self.p, self.site, self.noise, self.region = p, site, noise, region
        self.number = numbered(self)

    def forward(self, x: Tensor) -> Tensor:
        return dropped(self, x) if self.training else x

    def kept(self, x: Tensor) -> Tensor:
        sequence, length = places(self.region.runs(x.shape[0]), x.device), self.region.length(x.shape[0] * self.region.parts)
        batch, hidden = rows(self.noise, x.shape[1], x.device), torch.arange(x.shape[2], device=x.device)
        kept = self.noise.kept(self.site, self.p, ((batch, 1), (sequence, length), (hidden, x.shape[2])))
        return kept.transpose(0, 1)


class MatrixInputMask:
    """Dropout of the input [s, b, in] of a matrix, which tensor ranks have whole along the sequence; a row layer has this rank's columns of
    it."""

    def __init__(self, p: float, site: str, noise: Noise, region: Region, columns_split: bool):
        self.p, self.site, self.noise, self.region, self.columns_split = p, site, noise, region, columns_split

    def of(self, x: Tensor, stamp: Tensor) -> Tensor:
        """Returns 0 or 1 / (1 - p), of the shape of x."""
        with self.noise.at_stamp(stamp):
            kept = kept_inputs(x, self.p, self.site, self.noise, self.region, self.columns_split)
        return kept.to(x.dtype) / (1 - self.p)


class ColumnDropout(HiddenDropout):
    """Dropout of the input [s, b, in] of a row layer, of which this rank has its columns, whole along the sequence."""

    def kept(self, x: Tensor) -> Tensor:
        return kept_inputs(x, self.p, self.site, self.noise, self.region, columns_split=True)


def kept_inputs(x: Tensor, p: float, site: str, noise: Noise, region: Region, columns_split: bool) -> Tensor:
    """Returns the mask of the input x [s, b, in] of a matrix, whole along the sequence; ``columns_split``: of this rank's columns of it."""
    length, batch, width = x.shape
    first, parts = (region.group.index * width, region.group.size) if columns_split else (0, 1)
    columns = torch.arange(first, first + width, device=x.device)
    sequence = places(region.whole_runs(length), x.device), region.length(length)
    return noise.kept(site, p, ((rows(noise, batch, x.device), 1), sequence, (columns, width * parts))).transpose(0, 1)


class ShardedAttentionDropout(nn.Module):
    """Dropout of attention weights [b, heads, queries, keys], of which this rank has ``heads`` (global indices, out of ``total``). The last
    query stands at the last key, unless the keys are another sequence's, which it ``crosses`` to."""

    def __init__(self, p: float, site: str, noise: Noise, heads: range, total: int, crosses: bool = False):
        super().__init__()
        self.p, self.site, self.noise, self.heads, self.total, self.crosses = p, site, noise, heads, total, crosses
        self.number = numbered(self)

    def forward(self, weights: Tensor, length: int) -> Tensor:
        """Drops weights of sequences of ``length``."""
        if not self.training or torch.compiler.is_compiling():
            return dropped(self, weights) if self.training else weights
        return drop(weights, self._kept(weights, length), self.p)

    def kept(self, weights: Tensor) -> Tensor:
        """Returns the mask of the weights of whole sequences."""
        return self._kept(weights, weights.shape[-1])

    def _kept(self, weights: Tensor, length: int) -> Tensor:
        rows, keys = weights.shape[-2:]
        queries = range(rows) if self.crosses else range(keys - rows, keys)
        return self.kept_among(weights.shape[0], queries, torch.arange(keys, device=weights.device), length)

    def kept_among(self, batch: int, queries: range, keys: Tensor, length: int) -> Tensor:
        """Returns the mask of weights [b, heads, queries, keys], of some queries of a sequence for the ``keys`` at these positions."""
        heads, places = (torch.arange(r.start, r.stop, device=keys.device) for r in (self.heads, queries))
        axes = ((rows(self.noise, batch, keys.device), 1), (heads, self.total), (places, length), (keys, length))
        return self.noise.kept(self.site, self.p, axes)


def rows(noise: Noise, count: int, device: torch.device) -> Tensor:
    """Returns the global rows of the micro-batch."""
    return torch.arange(noise.key.first_row, noise.key.first_row + count, device=device)


def dropped(layer: HiddenDropout | ShardedAttentionDropout, x: Tensor) -> Tensor:
    """Applies the layer's dropout to x. Compiled code requests the mask and does the rest itself."""
    if torch.compiler.is_compiling():
        return torch.where(kept(x, layer.number, layer.noise.stamp), x * (1 / (1 - layer.p)), 0)
    return drop(x, layer.kept(x), layer.p)


def drop(x: Tensor, kept: Tensor, p: float) -> Tensor:
    """Returns x / (1 - p) where ``kept``, 0 elsewhere; one byte per element is saved for backward."""
    result: Tensor = _Drop.apply(x, kept, 1 / (1 - p))
    return result


class _Drop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(kept)
        ctx.scale = scale
        return (x * scale).masked_fill_(~kept, 0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (kept,) = ctx.saved_tensors
        return (gradients[0] * ctx.scale).masked_fill_(~kept, 0), None, None
