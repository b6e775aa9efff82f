"""Who owns which slice of the training state: flat buckets and nested sharding factors. Pure numbers.

Parameters, gradients and optimizer states each have a sharding factor over the data-parallel ranks (ZeRO, AMSP):
``params <= grads <= optimizer <= data``, each dividing the next. So the data index of a rank is read as a number in a mixed
radix whose digits are *levels*:

    level      ranks in a group       stride        effect of the collective over it
    params     params                 1             gathers parameters; reduce-scatters gradients first
    grads      grads / params         params        reduce-scatters gradients further
    optimizer  optimizer / grads      grads         reduce-scatters down to optimizer shards
    replicas   data / optimizer       optimizer     all-reduces equal shards

Level ``params`` is a run of neighbours (inside a node first). Each shard lies inside the rank's shard of the level before, so
a reduction goes down the levels, a gather goes up, and no level moves the same data as another. DDP is (1, 1, 1),
ZeRO-1 (1, 1, d), ZeRO-2 (1, d, d), ZeRO-3 (d, d, d); equal factors below d are HSDP / MiCS. With one non-trivial
level each of them is a single collective.

Tensors live in flat buckets, filled in backward order so that a bucket is complete as early as possible. A bucket is cut in
equal contiguous shards that ignore parameter borders, so every level can use reduce-scatter and all-gather.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.shared.run.schema import LayoutConfig

ALIGNMENT = 64
"""Elements to whose multiple each parameter's start and each shard's length is rounded up (256 bytes in fp32)."""
WHOLE_TILES = 128
"""Rows of a vocabulary that fill the tiles of a GPU's matrix units (Megatron-LM's --make-vocab-size-divisible-by)."""


def vocabulary_rows(vocab: Any, tensor: Any) -> Any:
    """Returns the rows of embedding and head on each of ``tensor`` ranks, numbers or arrays: padded to whole tiles, unless that adds more
    than an eighth."""
    rows = -(-vocab // tensor)
    padding = -rows % WHOLE_TILES
    return rows + padding * (8 * padding <= rows)


@dataclass(frozen=True, slots=True)
class Level:
    """One digit of the data index: ``size`` ranks, ``stride`` apart."""

    name: str
    size: int
    stride: int

    def digit(self, data_index: int) -> int:
        """Returns which of the level's pieces a rank owns, which is also its position in the level's group."""
        return data_index // self.stride % self.size


@dataclass(frozen=True, slots=True)
class Factors:
    """Sharding factors over ``data`` ranks that have the same parameters; each divides the next (``ValueError`` otherwise)."""

    params: int
    grads: int
    optimizer: int
    data: int

    def __post_init__(self) -> None:
        chain = (1, self.params, self.grads, self.optimizer, self.data)
        if any(low < 1 or high % low for low, high in itertools.pairwise(chain)):
            raise ValueError(f"each of params, grads, optimizer, data must divide the next: {chain[1:]}")

    @classmethod
    def of(cls, layout: LayoutConfig) -> Factors:
        """Returns the factors of a resolved layout, over its context and data ranks."""
        sharding = layout.sharding
        return cls(sharding.params, sharding.grads, sharding.optimizer, layout.context * (layout.data or 1))

    @classmethod
    def of_experts(cls, layout: LayoutConfig) -> Factors:
        """Returns the factors of experts in a resolved layout, over the ranks that have the same parts of the same ones: as large as the
        replicas allow that experts leave alike."""
        sharding, shared, folded = layout.sharding, layout.context * (layout.data or 1), layout.expert_tensor * layout.expert
        left = shared * math.gcd(folded, layout.tensor) // folded
        params, grads, optimizer = (math.gcd(factor, left) for factor in (sharding.params, sharding.grads, sharding.optimizer))
        return cls(params, grads, optimizer, layout.tensor * shared // folded)

    @property
    def levels(self) -> tuple[Level, Level, Level, Level]:
        """Returns params, grads, optimizer, replicas: their sizes multiply to ``data``."""
        return (
            Level("params", self.params, 1),
            Level("grads", self.grads // self.params, self.params),
            Level("optimizer", self.optimizer // self.grads, self.grads),
            Level("replicas", self.data // self.optimizer, self.optimizer),
        )

    def shard(self, state: str, data_index: int, numel: int) -> range:
        """Returns the elements of a flat buffer of ``numel`` that a rank owns of ``params``, ``grads`` or ``optimizer`` state.

        ``numel`` must be a multiple of the factor.
        """
        if numel % getattr(self, state):
            raise ValueError(f"{numel} elements cannot be cut in {getattr(self, state)} equal shards")
        start, length = 0, numel
        for level in self.levels[: ("params", "grads", "optimizer").index(state) + 1]:
            length //= level.size
            start += level.digit(data_index) * length
        return range(start, start + length)


@dataclass(frozen=True, slots=True)
class Slot:
    """A parameter's position in its bucket: elements ``start`` to ``stop``."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A contiguous part of one parameter inside a range of a bucket.

    ``offset`` counts from the start of the (flattened) parameter, ``position`` from the start of the range.
    """

    name: str
    offset: int
    position: int
    numel: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """A flat buffer: slots in backward order, each start aligned, the end padded so that every factor cuts it equally."""

    slots: tuple[Slot, ...]
    numel: int

    def pieces(self, owned: range) -> list[Piece]:
        """Returns the parts of parameters that lie in ``owned`` (of the bucket), in order, without padding."""
        found = []
        for slot in self.slots:
            start, stop = max(slot.start, owned.start), min(slot.stop, owned.stop)
            if start < stop:
                found.append(Piece(slot.name, start - slot.start, start - owned.start, stop - start))
        return found


def on_host(numel: int, share: float) -> int:
    """Returns how many of the ``numel`` elements of a shard have their optimizer states in host memory, the last ones. The border lies at a
    multiple of ``ALIGNMENT``, so that kernels compute each element as if the shard was not cut."""
    return min(numel, round(share * numel / ALIGNMENT) * ALIGNMENT)


def plan_buckets(sizes: Iterable[tuple[str, int]], capacity: int, shards: int, alone: Collection[str] = ()) -> list[Bucket]:
    """Packs parameters into buckets of about ``capacity`` elements.

    ``sizes`` are (name, elements) in backward order. A bucket is closed by the parameter that fills it, so a large parameter
    is never split over buckets. ``shards`` is the largest factor that cuts a bucket. A name in ``alone`` gets its own bucket:
    the two copies of a tied embedding on different stages must be cut alike, so that their shards can be summed (Megatron-LM
    issue 844).
    """
    buckets: list[Bucket] = []
    pending: list[tuple[str, int]] = []
    for name, numel in sizes:
        if name in alone:
            buckets += _closed(pending, shards) + _closed([(name, numel)], shards)
            pending = []
            continue
        pending.append((name, numel))
        if sum(n for _, n in pending) >= capacity:
            buckets += _closed(pending, shards)
            pending = []
    return buckets + _closed(pending, shards)


def _closed(parameters: Sequence[tuple[str, int]], shards: int) -> list[Bucket]:
    """Returns the bucket of these parameters, or no bucket for no parameters."""
    slots, end = [], 0
    for name, numel in parameters:
        start = _round_up(end, ALIGNMENT)
        end = start + numel
        slots.append(Slot(name, start, end))
    return [Bucket(tuple(slots), _round_up(end, ALIGNMENT * shards))] if slots else []


def _round_up(n: int, unit: int) -> int:
    return math.ceil(n / unit) * unit
