"""Time of orthogonalised momentum (``optimizer.kind=muon``): the products of its iterations, and the messages that bring matrices together.

The ranks that share a matrix' optimizer states, tensor ranks among them, share the matrices out; each matrix is computed by one of the
ranks that have a part of it (``trainer/state/matrices.py``).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from launcher.cost.inputs.case import Case
from launcher.cost.inputs.groups import PlacedGroup
from launcher.cost.inputs.shape import Array
from launcher.cost.inputs.stages import StageShare
from launcher.cost.time import collectives, matmul


class Matrices(NamedTuple):
    """Equal matrices of a pipeline rank's blocks, of all ranks that share them."""

    rows: Array
    columns: Array
    number: Array
    together: Array  # on a rank, in one parameter
    parts: Array  # tensor ranks that have a part of each
    shards: Array  # of the states that each of those has
    sharers: Array  # ranks that have parts of any

    @property
    def short(self) -> Array:
        return np.minimum(self.rows, self.columns)

    @property
    def long(self) -> Array:
        return np.maximum(self.rows, self.columns)


def matrices(case: Case, held: StageShare) -> list[Matrices]:
    """Returns the matrices that are orthogonalised one by one: each head, gates and values apart, each expert."""
    s, t, blocks, shards = case.shape, case.tensor, held.blocks.most(), case.field("optimizer")
    sparse, own, dense = s.expert_layers / s.layers, case.expert_shards("optimizer"), (shards, t * shards)
    heads, gates = s.heads + 2 * s.kv_heads, s.mlp_matrices - 1
    found = [
        Matrices(s.head_width, s.hidden, blocks * heads, heads / t, 1.0, *dense),
        Matrices(s.hidden, s.value_width, blocks, 1.0, t, *dense),
        *_mlp(s.ffn, s.hidden, blocks * (1 - sparse), gates, t, dense),
    ]
    if s.experts is not None:
        e, mixtures, here = s.experts, blocks * sparse, s.experts.count / case.expert
        cut, shares = case.expert_tensor, (own, case.expert_tensor * own)
        found += [
            Matrices(e.count, s.hidden, mixtures, 1.0, 1.0, *dense),
            *_mlp(np.maximum(e.shared_ffn, 1), s.hidden, mixtures * (np.asarray(e.shared_ffn) > 0), gates, t, dense),
            Matrices(e.ffn, s.hidden, mixtures * here * gates, here * gates, cut, *shares),
            Matrices(s.hidden, e.ffn, mixtures * here, here, cut, *shares),
        ]
    return found


def _mlp(ffn: Array, hidden: Array, count: Array, gates: int, t: Array, shards: tuple[Array, Array]) -> list[Matrices]:
    return [Matrices(ffn, hidden, count * gates, gates, t, *shards), Matrices(hidden, ffn, count, 1.0, t, *shards)]


def width(case: Case) -> float:
    """Bytes of an element in products and messages: bf16, or the precision of a run that has no narrower one."""
    return case.width if case.wide else 2


def products(case: Case, every: list[Matrices]) -> Array:
    """Seconds of the iterations of one rank: n x m by m x n, n x n by n x n, n x n by n x m. A rank that owns any computes a whole one."""
    precision = case.precision if case.wide else "bf16"

    def seconds(one: Matrices, count: Array) -> Array:
        sizes = ((one.short, one.short, one.long), (one.short, one.short, one.short), (one.short, one.long, one.short))
        each = [matmul.seconds(case.device, precision, case.constants, m, n, k, np.maximum(count, 1.0)) for m, n, k in sizes]
        return case.orthogonal * sum(each) * np.minimum(count, 1.0)

    shares = [seconds(one, one.number / one.sharers) for one in every]
    largest = [seconds(one, np.minimum(one.number, 1.0)) for one in every]
    return np.maximum(sum(shares), np.max(np.broadcast_arrays(*largest, case.tokens)[:-1], axis=0))


def row_moments(case: Case, every: list[Matrices]) -> Array:
    """Bytes of the second moments of rows that a rank has, of the matrices that it owns."""
    size = case.trainer.numbers.orthogonal_rows * (case.width if case.wide else 4)
    return size * sum(one.number * one.rows / one.sharers for one in every)


def by_rows(case: Case, every: list[Matrices]) -> Array:
    """Seconds in which a rank divides rows by their moments: matrices are read twice and written once (``trainer/state/muon.py``)."""
    elements = sum(one.number * one.rows * one.columns / one.sharers for one in every)
    return case.trainer.numbers.orthogonal_rows * 3 * width(case) * elements / (case.device.bandwidth * case.constants.bandwidth)


def pieces(case: Case, one: Matrices) -> Array:
    """Ranks that have a part of a matrix: tensor ranks, and shards of the states wherever they cut a bucket."""
    elements = one.rows * one.columns / one.parts
    bucket = np.maximum(case.trainer.memory.bucket_bytes / (8 if case.precision == "fp64" else 4), elements * one.together)
    return one.parts * (1 + (one.shards - 1) * elements / bucket)


def sent(case: Case, every: list[Matrices]) -> Array:
    """Bytes that a rank sends in a step: its parts of matrices of other owners, and the same back."""
    leaving = [one.number * one.rows * one.columns / one.sharers * (1 - 1 / pieces(case, one)) for one in every]
    return 2 * width(case) * sum(leaving)


def update(case: Case, held: StageShare) -> Array:
    """Seconds that the matrices of a step take beyond reading and writing states."""
    if not case.orthogonal or case.shape.frozen:
        return np.zeros_like(case.tokens)
    every = matrices(case, held)
    size = case.tensor * case.field("optimizer")
    group = PlacedGroup.of(case.device, size, case.data_stride / (case.tensor * case.context))
    payload = sent(case, every) / 2 * size / np.maximum(size - 1, 1)  # an all-to-all's counts what stays, too
    return products(case, every) + by_rows(case, every) + 2 * collectives.all_to_all(case.device, case.constants, group, payload)
