"""Slices of sequences that a rank holds, counted on the list of actions that it runs (``trainer.shared.parallel.schedule``)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from launcher.cost.inputs.case import Case
from launcher.cost.inputs.shape import Array, Shape
from trainer.shared.parallel.actions import Kind
from trainer.shared.parallel.schedule import compute_order
from trainer.shared.run import flops


@dataclass(frozen=True)
class HeldSlices:
    """Contents of a rank when it holds most of sliced sequences."""

    slices: np.ndarray  # in tokens of a mean slice
    micro_batches: np.ndarray  # whose keys and values it keeps
    summed: np.ndarray  # micro-batches that gradients of keys and values are summed up for: 0 or 1

    @classmethod
    def of(cls, case: Case, rank: Array) -> HeldSlices:
        """Those of pipeline rank ``rank`` of each layout; zeros where sequences are whole."""
        found = np.zeros((3, len(case.table)))
        share, ranks = quadratic_share(case.shape), np.broadcast_to(rank, case.tokens.shape)
        shares = np.broadcast_to(share, case.tokens.shape)
        for row in np.flatnonzero(case.slices > 1):
            count, stages = int(case.slices[row]), int(case.pipeline[row])
            micro_batches = min(math.ceil(case.micro_batches[row] / count), stages + 1)  # more only repeat
            own = min(int(ranks[row]), stages - 1)  # there may be no rank between the first and the last
            found[:, row] = most_held(stages, own, micro_batches, count, round(float(shares[row]), 3))
        return cls(*found)


def quadratic_share(shape: Shape) -> Array:
    """Returns the share of a sequence's work in blocks, forward and backward, that grows with the square of its length. Backward of
    attention has 5 products where forward has 2 (``trainer.shared.run.flops.work_up_to``)."""
    core = 3.5 * shape.attention_flops(causal=True)
    matrices = flops.training_flops(flops.matrix_flops(shape.seq, shape.active_matrix_parameters - shape.vocab * shape.hidden))
    return core / (core + matrices) * shape.full_attention * shape.seq / shape.attended


def lengths(count: int, share: float) -> list[float]:
    """Returns the lengths of ``count`` slices of equal work, in those of a mean slice: the work of the first x of a sequence is (1 - a) x +
    a x^2 of all, for the quadratic ``share`` a."""
    done = np.arange(count + 1) / count
    linear = 1 - share
    ends = done if share == 0 else (np.sqrt(linear**2 + 4 * share * done) - linear) / (2 * share)
    return [float(length) for length in np.diff(ends) * count]


@lru_cache(maxsize=4096)
def most_held(stages: int, rank: int, micro_batches: int, count: int, share: float) -> tuple[float, int, int]:
    """Returns the three numbers of ``HeldSlices`` at the forward behind which a rank holds most."""
    sizes, held = lengths(count, share), 0.0
    begun: set[int] = set()  # micro-batches whose backward has begun
    left: dict[int, int] = {}  # slices in flight, by micro-batch
    found = []
    for action in compute_order("sliced_1f1b", stages, 1, micro_batches, count)[rank]:
        if action.kind is Kind.FORWARD:
            left[action.micro_batch] = left.get(action.micro_batch, 0) + 1
            held += sizes[action.slice]
            found.append((round(held, 9), len(left), len(begun)))
            continue
        held -= sizes[action.slice]
        begun.add(action.micro_batch)
        left[action.micro_batch] -= 1
        if not left[action.micro_batch]:
            begun.remove(action.micro_batch)
            del left[action.micro_batch]
    return max(found)
