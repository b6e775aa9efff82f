"""One record per parameter, which drives initial weights, gradient sums, the norm, sharding and checkpoints.

A parameter has a *global* name and shape that no layout changes (``blocks.3.attention.qkv.weight``). A rank holds a box of it,
its *region*. The local tensor may be larger than its region: a vocabulary (``vocabulary_rows``) is padded at
the end of dimension 0 with rows that stay zero. Data-parallel sharding is not described here: it divides the flattened local
tensor (``OptimizerShard``).

Its *placement* says which ranks hold other regions and which the same one (``trainer.shared.parallel.placement``). A gradient is partial
over an axis if every rank of that axis has only one summand of it: a norm's weight under sequence parallelism, a tied embedding on two
pipeline ranks. Of all ranks that hold the same region, one is *primary*: it counts the parameter in the norm and saves it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from trainer.models.layers import Init
from trainer.shared.parallel.placement import Partial, Placement
from trainer.shared.records.manifest import STATES
from trainer.state.host import HostStates

BLOCK = 1 << 20
"""Elements of the global tensor that share one random generator."""


@dataclass(frozen=True)
class ParameterRecord:
    """One rank's record of a parameter that it holds."""

    name: str  # global, the same under every layout; a tied weight has one name wherever it is used
    shape: tuple[int, ...]  # global, without padding
    region: tuple[tuple[int, int], ...]  # start and stop in the global tensor, per dimension (empty where there is only padding)
    local_shape: tuple[int, ...]  # of the tensor on this rank, with padding
    init: Init
    group: str  # whose learning rate and weight decay it has: a field of ``GroupsConfig``
    placement: Placement = field(default_factory=dict)  # on each axis of the layout that concerns it
    learned: bool = True  # else it has no gradient: a rule of its own moves it
    trainable: bool = True  # else frozen: no gradient, no optimizer state, not in the norm, not saved
    optional: bool = False  # a checkpoint without it leaves it zero
    primary: bool = True  # of all ranks with this region (replicas on tensor and pipeline), the one that counts it in the norm and saves it

    def partial(self, axis: str) -> bool:
        """Returns whether gradients are summands, to be added once per step over the ranks of the axis."""
        return self.placement.get(axis) == Partial()

    @property
    def late(self) -> bool:
        """Returns whether gradients are such summands over any axis."""
        return Partial() in self.placement.values()

    @property
    def local_numel(self) -> int:
        return math.prod(self.local_shape)

    @property
    def region_shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.region)


class ModelParameter:
    """A parameter of this rank, and the ``units`` of the model (embedding, block, head) that compute with it, each with a gradient."""

    def __init__(self, record: ParameterRecord, tensor: nn.Parameter, *units: str):
        self.record, self.tensor, self.units = record, tensor, [*units]
        self.place = slice(0)  # in its bucket
        self.arrived = 0
        self.fresh = True  # the next gradient overwrites the buffer
        self.last: tuple[Tensor, Tensor] | None = None  # the buffer of its last gradient, and its view of it

    def view(self, buffer: Tensor) -> Tensor:
        return buffer[self.place].view(self.record.local_shape)


@dataclass(frozen=True)
class OptimizerShard:
    """The part of a local tensor whose optimizer state this rank keeps: flattened elements ``offset`` to ``offset + numel``.

    ``weight`` is the master copy (fp32, or fp64 in fp64 runs). All are flat views of ``numel`` elements, or of none where a group of
    parameters has no such moment; weight, moments and average are read for a checkpoint and written to when one is loaded. Of all ranks
    that keep the same elements, one ``saves``. Where all of them are in ``host`` memory, so is the gradient that the update reads.
    """

    record: ParameterRecord
    offset: int
    numel: int
    weight: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    gradient: Tensor
    saves: bool
    host: HostStates | None = None
    reduced: Tensor | None = None
    average: Tensor | None = None  # of weights, in the tail of a run

    @property
    def sums(self) -> Tensor:
        """Returns the reduced gradient on the device. Of a piece whose states are in two places, all with the first and none with the
        second, so that a norm adds up as if it was whole."""
        return self.gradient if self.reduced is None else self.reduced

    @property
    def states(self) -> dict[str, Tensor]:
        """Returns the states that a checkpoint holds, by name."""
        every = {name: getattr(self, name) for name in STATES}
        return {name: state for name, state in every.items() if state is not None and len(state)}


def initial_value(record: ParameterRecord, seed: int) -> Tensor:
    """The local tensor at step 0, fp32, on the CPU: a function of (seed, name) sliced to the region, padding zero.

    The flattened global tensor is drawn in blocks, each from its own generator, so that a rank draws only the blocks that its
    region touches and never holds more of the global tensor than the rows between its first and last element.
    """
    local = torch.zeros(record.local_shape)
    if 0 in record.region_shape:
        return local
    inside = local[tuple(slice(0, n) for n in record.region_shape)]
    if record.init.std == 0.0:
        inside.fill_(record.init.value)
        return local
    rows = record.region[0]
    row_numel = math.prod(record.shape[1:])
    flat = torch.cat(list(_normal_blocks(record.name, seed, rows[0] * row_numel, rows[1] * row_numel, math.prod(record.shape))))
    rest = tuple(slice(start, stop) for start, stop in record.region[1:])
    inside.copy_(flat.view(rows[1] - rows[0], *record.shape[1:])[(slice(None), *rest)]).mul_(record.init.std)
    if factors := record.init.factors:
        inside.mul_(torch.tensor(factors)[rest[0]].view(-1, *[1] * (inside.dim() - 2)))
    return local


def initial_part(record: ParameterRecord, seed: int, start: int, stop: int) -> Tensor:
    """Elements ``start`` to ``stop`` of the flattened ``initial_value``; no more is drawn than the rows that they are in."""
    row = math.prod(record.local_shape[1:])
    first, last = start // row, -(-stop // row)
    low, high = record.region[0]
    rows = (min(low + first, high), min(low + last, high))
    part = replace(record, region=(rows, *record.region[1:]), local_shape=(last - first, *record.local_shape[1:]))
    return initial_value(part, seed).flatten()[start - first * row : stop - first * row]


def _normal_blocks(name: str, seed: int, start: int, stop: int, total: int) -> Iterator[Tensor]:
    """Elements ``start`` to ``stop`` of the standard normal numbers that belong to (seed, name)."""
    for block in range(start // BLOCK, math.ceil(stop / BLOCK)):
        first = block * BLOCK
        numbers = torch.randn(min(BLOCK, total - first), generator=torch.Generator().manual_seed(hash_of(seed, name, block)))
        yield numbers[max(start - first, 0) : stop - first]


def hash_of(*parts: object) -> int:
    """63 bits that depend on the parts and on nothing else (Python's own hash differs between processes)."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little") >> 1
