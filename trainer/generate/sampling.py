"""Which token comes next. The choice depends on the logits, the sampling, the number of the request and the position in its text, and on
nothing else: not on the batch that a prompt is in, nor on what was drawn before, nor on the layout.

The same sum in another order (another layout, another batch) gives logits that differ in their last digits. Tokens whose logits are that
near are treated as equal: greedy takes the lowest id, filters keep all of them. What remains: where a drawn number, or a filter's limit,
falls within the rounding of a border between two tokens, another layout may choose the other one. The probability of that is about the
relative rounding of a token's share, for each drawn token: negligible in fp64, rare in fp32, not in bf16.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.data.permutation import key_of
from trainer.shared.run.stages import Sampling

__all__ = ["Sampling", "choose", "tolerance", "uniform"]

ULPS = 64
"""Rounding errors of a logit, in units of the last place of the largest one, within which two are equal."""

LEAST = 1e-30
"""What is below is as good as nothing: a temperature is greedy, and a penalty stays at it. Quotients of it would overflow, and a row in
which several logits are infinite has no likeliest one."""


def tolerance(logits: Tensor) -> float:
    """How far two equal logits may be apart, given all logits of a row in the type in which they were computed."""
    return ULPS * torch.finfo(logits.dtype).eps * float(logits.abs().max())


def choose(logits: Tensor, text: Sequence[int], sampling: Sampling, request: int) -> int:
    """The token after ``text``, from logits [V] of any float type."""
    near = tolerance(logits)
    logits = _penalised(logits.double(), text, sampling.repetition_penalty)
    if sampling.temperature < LEAST:
        return int((logits >= logits.max() - near).nonzero()[0])
    kept = _filtered(logits / sampling.temperature, sampling, near / sampling.temperature)
    cumulative = torch.softmax(kept, -1).cumsum(-1)
    target = uniform(sampling.seed, request, len(text)) * cumulative[-1:]
    return min(int(torch.searchsorted(cumulative, target, right=True)), len(logits) - 1)


def uniform(seed: int, request: int, position: int) -> float:
    """A number in [0, 1) that only these three decide (counter-based, Salmon et al. 2011)."""
    return int(key_of(seed, request, position)[0] >> 11) / 2**53


def _penalised(logits: Tensor, text: Sequence[int], penalty: float) -> Tensor:
    """Tokens that occur already made less likely (Keskar et al. 2019, section 4.1)."""
    if penalty == 1:
        return logits
    penalty = min(max(penalty, LEAST), 1 / LEAST)
    tokens = torch.tensor(sorted(set(text)), device=logits.device)
    values = logits[tokens]
    return logits.index_copy(0, tokens, torch.where(values > 0, values / penalty, values * penalty))


def _filtered(logits: Tensor, sampling: Sampling, near: float) -> Tensor:
    """-inf for what top_k and top_p leave out."""
    if 0 < sampling.top_k < len(logits):
        logits = _cut(logits, float(logits.topk(sampling.top_k).values[-1]) - near)
    if sampling.top_p < 1:
        ordered = logits.sort(descending=True).values
        shares = torch.softmax(ordered, -1)
        inside = ordered[shares.cumsum(-1) - shares < sampling.top_p]  # what is likelier has not the share yet
        logits = _cut(logits, float(inside[-1]) - near)
    return logits


def _cut(logits: Tensor, least: float) -> Tensor:
    return logits.masked_fill(logits < least, float("-inf"))
