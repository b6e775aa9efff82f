"""Contents of each kind of pipeline rank: blocks and parameters of the first, the middle and the last stage."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from launcher.cost.inputs.case import Case
from launcher.cost.inputs.layouts import BALANCES
from launcher.cost.inputs.shape import Array
from trainer.shared.parallel.balance import by_weights
from trainer.shared.run import flops


@dataclass(frozen=True)
class PerStage:
    """A number, or (layouts,), for each kind of pipeline rank. With a single stage all three are the same rank."""

    first: Array
    middle: Array
    last: Array

    def most(self) -> Array:
        return np.maximum(self.first, np.maximum(self.middle, self.last))


@dataclass(frozen=True)
class Blocks(PerStage):
    """Blocks of each kind of rank; ``middle`` of the largest middle one, ``typical`` of the mean."""

    typical: Array


@dataclass(frozen=True)
class StageShare:
    """Blocks and parameters of one rank of each kind of stage."""

    blocks: Blocks
    stacks: tuple[Blocks, ...]  # the same of each stack
    borders: Blocks | None  # 1 where the decoder begins; None: there is one stack
    dense: PerStage  # parameters of one rank that are replicated over data-parallel ranks
    expert: PerStage  # parameters of one rank's routed experts, replicated over data / expert ranks
    matrices: Array  # of ``dense``, what one block's matrices have

    def at(self, rows: np.ndarray | slice) -> StageShare:
        """The same of some layouts."""
        return _at(self, rows)


def _at(part: Any, rows: np.ndarray | slice) -> Any:
    if isinstance(part, tuple):
        return tuple(_at(one, rows) for one in part)
    if is_dataclass(part) and not isinstance(part, type):
        return type(part)(**{field.name: _at(getattr(part, field.name), rows) for field in fields(part)})
    return part[rows] if np.ndim(part) else part


def by_stack(case: Case, split: Sequence[int] | None = None) -> tuple[tuple[Blocks, ...], Blocks | None]:
    """Blocks of each stack on each kind of rank, and where the decoder begins. The middle rank of two stacks is the first of those that
    compute most."""
    if len(case.stacks) == 1:
        return (_with_predictors(case, blocks(case, split)),), None
    shape, given = case.shape, None if split is None else tuple(split)
    read, written = (stack.forward_flops() for stack in shape.stacks)
    head = flops.matrix_flops(shape.decoder_seq, shape.vocab * shape.hidden)
    read, written = (read - flops.matrix_flops(shape.seq, shape.vocab * shape.hidden)) / shape.encoder_layers, written - head
    written = written / (shape.layers - shape.encoder_layers)
    cost = (case.table["balance"] == BALANCES.index("cost")) & (case.pipeline > 1)
    columns = np.broadcast_arrays(case.pipeline, case.chunks, cost, shape.layers, shape.encoder_layers, read, written, head)
    kinds, of = np.unique(np.stack([np.asarray(column, float) for column in columns], axis=1), axis=0, return_inverse=True)
    found = np.array([_cut(*kind, split=given) for kind in kinds])  # (kinds, encoder, decoder and border, kinds of rank)
    read_by, written_by, border = (Blocks(*found[of.ravel(), row].T) for row in range(3))
    return (read_by, written_by), border


@lru_cache(maxsize=4096)
def _cut(
    p: float, v: float, cost: float, layers: float, encoder: float, read: float, written: float, head: float, split: tuple[int, ...] | None
) -> tuple[tuple[float, ...], ...]:
    """Returns the blocks of encoder and decoder on the first, the largest middle, the last and the mean middle rank, and 1 for the one on
    which the decoder begins."""
    ranks, chunks, weights = int(p), int(p * v), (read,) * int(encoder) + (written,) * int(layers - encoder)
    if split is None:
        split = (
            by_weights(weights, chunks, head)
            if cost
            else tuple(int(layers * (i + 1) // chunks - layers * i // chunks) for i in range(chunks))
        )
    starts = [0, *itertools.accumulate(split)]
    first = [min(max(encoder - start, 0), count) for start, count in zip(starts, split)]  # of the encoder, in each chunk
    begins = [float(start <= encoder < start + count) for start, count in zip(starts, split)]
    columns: list[list[float]] = [first, [count - own for count, own in zip(split, first)], begins]
    held = [tuple(float(sum(column[rank::ranks])) for column in columns) for rank in range(ranks)]
    middle = held[1:-1] or [tuple(sum(column) / p for column in zip(*held))]
    loads = [own * read + other * written for own, other, _ in middle]
    largest = next(each for each, load in zip(middle, loads) if load >= 0.99 * max(loads))
    mean = tuple(sum(column) / len(middle) for column in zip(*middle))
    return tuple(zip(held[0], largest, held[-1], mean))


def blocks(case: Case, split: Sequence[int] | None = None) -> Blocks:
    """Blocks of each kind of rank: an explicit ``split`` over the chunks in model order, or even, or balanced by cost."""
    p, layers = case.pipeline, case.shape.layers
    if split is not None:
        return _explicit(split, int(p[0]))
    even = _with_ends(p, layers) if case.trainer.pipeline.counts_ends else _even(p, layers)
    by_cost = _by_cost(p, case.chunks, layers, case.shape.vocab / (12 * case.shape.hidden))
    choose = (case.table["balance"] == BALANCES.index("cost")) & (p > 1)
    first, middle, last = (np.where(choose, b, e) for b, e in zip(by_cost, even))
    return Blocks(first, middle, last, (layers - first - last) / np.maximum(p - 2, 1))


def _explicit(split: Sequence[int], p: int) -> Blocks:
    held = [float(sum(split[rank::p])) for rank in range(p)]
    middle = held[1:-1] or [sum(held) / p]  # of two ranks neither is one: the mean, as for other splits
    return Blocks(held[0], max(middle), held[-1], sum(middle) / len(middle))


def _even(p: Array, layers: Array) -> tuple[Array, Array, Array]:
    """First, middle, last. What does not divide is made to with embedding and head as one more block each, where that works, else the
    earlier ranks get one more."""
    upper, lower = np.ceil(layers / p), np.floor(layers / p)
    ends = (layers % p != 0) & ((layers + 2) % p == 0)
    return np.where(ends, upper - 1, upper), upper, np.where(ends, upper - 1, lower)


def _with_ends(p: Array, layers: Array) -> tuple[Array, Array, Array]:
    """First, middle, last: embedding, blocks, norm and head are dealt out as equal items, earlier ranks get the ones too many."""
    items = layers + 3
    low = np.floor(items / p)
    more = items - low * p
    ends = [low + (more > 0) - 1, low + (more > 1), low - 2]
    first, middle, last = (np.where(p > 1, np.maximum(end, 0), layers) for end in ends)
    return first, middle, last


def _by_cost(p: Array, v: Array, layers: Array, head: Array) -> tuple[Array, Array, Array]:
    """First, middle, last: the last chunk has the count whose heaviest chunk is lightest, the others are even, as
    ``trainer.shared.parallel.balance.by_cost`` deals them out: larger chunks later. A rank holds every ``p``-th of the ``p v`` chunks."""
    chunks = p * v
    others = np.maximum(chunks - 1, 1)
    guess = np.floor((layers + head) / chunks - head)
    best: tuple[Any, Any, Any] = (np.inf, np.inf, 0.0)
    for step in (-2, -1, 0, 1, 2):
        last = np.clip(guess + step, 0, np.maximum(layers - chunks + 1, 0))
        low = np.floor((layers - last) / others)
        more = layers - last - low * others
        heaviest = np.maximum(low + (more > 0), last + head).round(9)
        squares = ((others - more) * low**2 + more * (low + 1) ** 2 + (last + head) ** 2).round(9)
        better = (heaviest < best[0]) | ((heaviest == best[0]) & (squares < best[1]))
        best = (np.where(better, heaviest, best[0]), np.where(better, squares, best[1]), np.where(better, last, best[2]))
    last = best[2]
    low = np.floor((layers - last) / others)
    larger = others - (layers - last - low * others)  # the first chunk that has one more

    def of_rank(rank: Array, count: Array) -> Array:
        """Blocks of its first ``count`` chunks."""
        return count * low + count - np.clip(np.ceil((larger - rank) / p), 0, count)

    return of_rank(0, v), of_rank(np.maximum(p - 2, 0), v), of_rank(p - 1, v - 1) + last


def _with_predictors(case: Case, counts: Blocks) -> Blocks:
    """``counts``, and behind the last stage the blocks that predict further tokens, one for each (DeepSeek-V3, arXiv 2412.19437, section
    2.2)."""
    more = case.shape.predicted_tokens
    if not np.any(more):
        return counts
    single = np.where(case.pipeline == 1, more, 0)
    return Blocks(counts.first + single, counts.middle + single, counts.last + more, counts.typical)


def held(case: Case, split: Sequence[int] | None = None) -> StageShare:
    """Blocks and parameters of the ranks of each kind of stage."""
    s, t, p = case.shape, case.tensor, case.pipeline
    stacks, borders = by_stack(case, split)
    counts = Blocks(*(sum(getattr(each, name) for each in stacks) for name in ("first", "middle", "last", "typical")))
    sparse = s.expert_layers / s.layers
    routed = sparse * s.expert_parameters / (case.expert_tensor * case.expert)
    matrices = (s.block_parameters - s.small_parameters - sparse * s.expert_parameters - s.latent_parameters) / t + s.latent_parameters
    # norms and row biases, and matrices of latents, are whole on every tensor rank
    whole = [own.small_parameters + own.latent_parameters for own in s.stacks]
    each = [(own.block_parameters - same - sparse * s.expert_parameters) / t + same for own, same in zip(s.stacks, whole)]
    first, middle, last = (sum(getattr(n, kind) * own for n, own in zip(stacks, each)) for kind in ("first", "middle", "last"))
    embedding = case.vocabulary * s.hidden + s.positions * s.hidden + 2 * s.buckets * s.heads / t
    head = case.vocabulary * s.hidden + s.norm_parameters
    predictors = s.predicted_tokens * (2 * s.hidden**2 / t + 3 * s.norm_parameters)  # a projection, norms of its inputs and of its end
    single = first + embedding + np.where(s.tied, s.norm_parameters, head) + predictors
    alone = p == 1
    shared = (embedding + head) / p
    ends = (shared, shared, shared) if case.trainer.pipeline.spreads_vocabulary else (embedding, 0.0, head)
    return StageShare(
        counts,
        stacks,
        borders,
        PerStage(
            np.where(alone, single, first + ends[0]),
            np.where(alone, single, middle + ends[1]),
            np.where(alone, single, last + ends[2] + predictors),
        ),
        PerStage(counts.first * routed, counts.middle * routed, counts.last * routed),
        matrices,
    )
