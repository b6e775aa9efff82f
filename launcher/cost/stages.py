"""What each kind of pipeline rank holds: blocks and parameters of the first, the middle and the last stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from launcher.cost.case import Case
from launcher.cost.shape import Number


@dataclass(frozen=True)
class PerStage:
    """One number for each kind of stage. With a single stage all three are the same stage."""

    first: Number
    middle: Number
    last: Number

    def most(self) -> Number:
        return np.maximum(self.first, np.maximum(self.middle, self.last))


@dataclass(frozen=True)
class Held:
    """What ranks hold, by kind of stage."""

    blocks: PerStage
    dense: PerStage  # parameters of one rank that are replicated over data-parallel ranks
    expert: PerStage  # parameters of one rank's routed experts, replicated over data / expert ranks


def blocks(case: Case, split: Sequence[int] | None = None) -> PerStage:
    """Blocks of each kind of rank: an explicit ``split`` over the chunks in model order, or even, or balanced by cost."""
    p, layers = case.pipeline, case.shape.layers
    if split is not None:
        return _explicit(split, int(p[0]))
    upper = np.ceil(layers / p)
    even = PerStage(np.minimum(upper, layers), upper, np.maximum(layers - (p - 1) * upper, 0))
    balanced = _balanced(case)
    choose = (case.table["balance"] == 1) & (p > 1)
    return PerStage(
        *(np.where(choose, b, e) for b, e in zip((balanced.first, balanced.middle, balanced.last), (even.first, even.middle, even.last)))
    )


def _explicit(split: Sequence[int], p: int) -> PerStage:
    held = [sum(split[rank::p]) for rank in range(p)]
    return PerStage(float(held[0]), float(max(held[1:-1], default=0)), float(held[-1]))


def _balanced(case: Case) -> PerStage:
    """The last stage gives up as many blocks as the head is worth (trainer.layout.balance: V / 12 h)."""
    p, layers = case.pipeline, case.shape.layers
    head = case.shape.vocab / (12 * case.shape.hidden)
    last = np.clip(np.floor((layers + head) / p - head + 0.5), 0, layers)
    rest = (layers - last) / np.maximum(p - 1, 1)
    return PerStage(np.floor(rest), np.ceil(rest), last)


def held(case: Case, split: Sequence[int] | None = None) -> Held:
    """Blocks and parameters of the ranks of each kind of stage."""
    s, t, p = case.shape, case.tensor, case.pipeline
    counts = blocks(case, split)
    sparse = s.expert_layers / s.layers
    routed = sparse * s.expert_parameters / (t * case.expert)
    matrices = (s.block_parameters - s.small_parameters - sparse * s.expert_parameters) / t
    dense = matrices + s.small_parameters  # norms and row biases are whole on every tensor rank
    embedding = s.vocab * s.hidden / t + s.positions * s.hidden
    head = s.vocab * s.hidden / t + s.norm_parameters
    single = counts.first * dense + embedding + np.where(s.tied, s.norm_parameters, head)
    alone = p == 1
    return Held(
        counts,
        PerStage(
            np.where(alone, single, counts.first * dense + embedding),
            np.where(alone, single, counts.middle * dense),
            np.where(alone, single, counts.last * dense + head),
        ),
        PerStage(counts.first * routed, counts.middle * routed, counts.last * routed),
    )
