"""Whole matrices out of shards: who orthogonalises which matrix, and the messages that bring its parts there and back.

The last two dimensions of a parameter are those of a matrix, the others number matrices of their own: the heads of ``qkv`` [groups, heads
of a group, width, inputs], a gate and its values, the experts of a block. Ranks have parts of it: tensor ranks rows or columns, sharded
states a range of elements of those, wherever a bucket is cut.

A matrix is owned by one of the ranks that have a part of it, so one that a rank has whole, such as a head, does not travel:

    parts to owners    one all-to-all
    owners             put their matrices together, compute
    results to parts   the same all-to-all backwards; ranks that hold a copy get one as well

Matrices go in rounds, so that buffers stay small.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.comm.collectives import Group
from trainer.state.parameters import OptimizerShard

ROUND = 1 << 26
"""Elements of the matrices that a rank owns in a round, unless a single one has more."""

MatrixKey = tuple[str, tuple[int, ...]]
"""The name of a parameter, and which of its matrices."""


Transform = Callable[[Tensor, Sequence[MatrixKey]], Tensor]
"""Makes a stack of the same shape from a stack [n, rows, columns] of equal matrices and their keys."""

Box = tuple[tuple[int, int], tuple[int, int]]
"""Start and stop of rows, and of columns."""


@dataclass(frozen=True, slots=True)
class Fragment:
    """Elements ``start`` to ``stop`` of a flattened box of a matrix, which one rank has at ``position`` of its piece number ``piece``."""

    rank: int  # its position in the group
    piece: int
    position: int
    box: Box
    start: int
    stop: int
    primary: bool  # of ranks that have copies, the one that sends

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class MatrixParts:
    """All parts of a matrix, those of a box one after the other, and the rank that owns it."""

    key: MatrixKey
    shape: tuple[int, int]
    fragments: tuple[Fragment, ...]
    owner: int

    @property
    def sources(self) -> list[Fragment]:
        return [fragment for fragment in self.fragments if fragment.primary]


@dataclass(frozen=True, slots=True)
class HeldPiece:
    """A piece as other ranks know it: elements ``offset`` to ``offset + numel`` of the flattened ``region`` of a parameter."""

    name: str
    shape: tuple[int, ...]
    region: tuple[tuple[int, int], ...]
    offset: int
    numel: int
    primary: bool

    @classmethod
    def of(cls, shard: OptimizerShard) -> HeldPiece:
        record = shard.record
        return cls(record.name, record.shape, record.region, shard.offset, shard.numel, record.primary)

    def fragments(self, rank: int, piece: int) -> list[tuple[MatrixKey, Fragment]]:
        """Cuts the piece at the borders of matrices."""
        *outer, rows, columns = self.region
        size = (rows[1] - rows[0]) * (columns[1] - columns[0])
        found: list[tuple[MatrixKey, Fragment]] = []
        indices = list(itertools.product(*(range(*side) for side in outer)))
        for number in range(self.offset // size, -(-(self.offset + self.numel) // size)):
            first = number * size
            start, stop = max(first, self.offset), min(first + size, self.offset + self.numel)
            part = Fragment(rank, piece, start - self.offset, (rows, columns), start - first, stop - first, self.primary)
            found.append(((self.name, indices[number]), part))
        return found


def work(shape: tuple[int, int]) -> int:
    """Returns a number in proportion to the operations that a matrix takes."""
    return min(shape) ** 2 * max(shape)


def share_out(held: Sequence[Sequence[HeldPiece]]) -> list[list[MatrixParts]]:
    """Returns the matrices in the pieces that the ranks of a group have, by owner: of the ranks that have a part, the one with least to do.
    Every rank comes to the same result."""
    parts: dict[MatrixKey, list[Fragment]] = defaultdict(list)
    shapes: dict[str, tuple[int, int]] = {}
    for rank, pieces in enumerate(held):
        for number, piece in enumerate(pieces):
            shapes[piece.name] = (piece.shape[-2], piece.shape[-1])
            for key, fragment in piece.fragments(rank, number):
                parts[key].append(fragment)
    candidates = {key: sorted({part.rank for part in found if part.primary}) for key, found in parts.items()}
    owned: list[list[MatrixParts]] = [[] for _ in held]
    load = [0] * len(held)
    for key in sorted(parts, key=lambda key: (len(candidates[key]), -work(shapes[key[0]]))):  # who alone has one has no choice
        owner = min(candidates[key], key=lambda rank: load[rank])
        load[owner] += work(shapes[key[0]])
        fragments = tuple(sorted(parts[key], key=lambda part: (part.box, part.start, part.rank)))
        owned[owner].append(MatrixParts(key, shapes[key[0]], fragments, owner))
    return owned


def rounds(owned: Sequence[Sequence[MatrixParts]], most: int) -> list[list[MatrixParts]]:
    """Returns the matrices of each round, of which every owner has about ``most`` elements."""
    found: dict[int, list[MatrixParts]] = defaultdict(list)
    for mine in owned:
        number, elements = 0, 0
        for matrix in mine:
            if elements and elements + math.prod(matrix.shape) > most:
                number, elements = number + 1, 0
            elements += math.prod(matrix.shape)
            found[number].append(matrix)
    return [found[number] for number in sorted(found)]


class MatrixExchange:
    """The matrices in the pieces of the ranks of ``group``. Making one is collective."""

    def __init__(self, pieces: Sequence[OptimizerShard], group: Group, empty: Tensor, most: int = ROUND):
        """``empty``: a tensor without elements, of the type in which matrices travel."""
        held = group.gather_objects([HeldPiece.of(piece) for piece in pieces])
        self.rounds = [_Round(matrices, group, empty) for matrices in rounds(share_out(held), most)]

    @property
    def mine(self) -> list[tuple[MatrixParts, int]]:
        """Returns the matrices that this rank owns, each with the number of a piece that has a part of it."""
        return [(m, next(f.piece for f in m.sources if f.rank == m.owner)) for one in self.rounds for m in one.mine]

    def run(self, pieces: Sequence[Tensor], transform: Transform) -> Iterator[list[tuple[int, int, Tensor]]]:
        """Applies ``transform`` to the matrices of which this rank has the flat ``pieces``. Yields the results of each round for this rank:
        number of the piece, first element, elements. Collective."""
        for one in self.rounds:
            yield one.run(pieces, transform)


class _Round:
    """The matrices that one round exchanges, as this rank sees them."""

    def __init__(self, matrices: Sequence[MatrixParts], group: Group, empty: Tensor):
        self.group, self.empty, me, ranks = group, empty, group.index, range(group.size)
        self.mine = [matrix for matrix in matrices if matrix.owner == me]
        sent = [[f for m in matrices if m.owner == owner for f in m.sources if f.rank == me] for owner in ranks]
        back = [[f for m in matrices if m.owner == owner for f in m.fragments if f.rank == me] for owner in ranks]
        self.sent, self.back = ([f for some in by_owner for f in some] for by_owner in (sent, back))
        self.to, self.again = ([sum(f.numel for f in some) for some in by_owner] for by_owner in (sent, back))
        self.come = [sum(f.numel for m in self.mine for f in m.sources if f.rank == rank) for rank in ranks]
        self.give = [sum(f.numel for m in self.mine for f in m.fragments if f.rank == rank) for rank in ranks]

    def run(self, pieces: Sequence[Tensor], transform: Transform) -> list[tuple[int, int, Tensor]]:
        parts = [pieces[f.piece][f.position : f.position + f.numel] for f in self.sent]
        wholes = self._assembled(self._exchanged(parts, self.to, self.come))
        for numbers in _alike(self.mine):
            stack = torch.stack([wholes[n] for n in numbers])
            for number, result in zip(numbers, transform(stack, [self.mine[n].key for n in numbers])):
                wholes[number] = result
        results = self._exchanged(self._dissected(wholes), self.give, self.again)
        return [(f.piece, f.position, flat) for f, flat in zip(self.back, results.split([f.numel for f in self.back]))]

    def _exchanged(self, parts: list[Tensor], to: list[int], come: list[int]) -> Tensor:
        buffer = torch.cat([self.empty, *parts])
        if self.group.size == 1:
            return buffer
        found = buffer.new_empty(sum(come))
        self.group.all_to_all(found, buffer, come, to).wait()
        return found

    def _assembled(self, buffer: Tensor) -> list[Tensor]:
        """Puts the parts that have come, from one rank after the other, together to the matrices that this rank owns."""
        order = [(m, f) for rank in range(self.group.size) for m, matrix in enumerate(self.mine) for f in matrix.sources if f.rank == rank]
        boxes: dict[tuple[int, Box], list[tuple[int, Tensor]]] = defaultdict(list)
        for (number, fragment), flat in zip(order, buffer.split([f.numel for _, f in order])):
            boxes[number, fragment.box].append((fragment.start, flat))
        wholes = [buffer.new_empty(matrix.shape) for matrix in self.mine]
        for (number, box), flats in boxes.items():
            view = _inside(wholes[number], box)
            view.copy_(torch.cat([flat for _, flat in sorted(flats, key=lambda pair: pair[0])]).view(view.shape))
        return wholes

    def _dissected(self, wholes: list[Tensor]) -> list[Tensor]:
        """Takes the parts of each rank, one after the other."""
        return [
            _inside(wholes[number], f.box).reshape(-1)[f.start : f.stop]
            for rank in range(self.group.size)
            for number, matrix in enumerate(self.mine)
            for f in matrix.fragments
            if f.rank == rank
        ]


def _inside(whole: Tensor, box: Box) -> Tensor:
    rows, columns = box
    return whole[slice(*rows), slice(*columns)]


def _alike(matrices: Sequence[MatrixParts]) -> list[list[int]]:
    """Returns the numbers of matrices of each shape."""
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, matrix in enumerate(matrices):
        found[matrix.shape].append(number)
    return list(found.values())
