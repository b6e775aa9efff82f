"""The choice of the next token. It depends only on the logits, the sampling, the number of the request and the position in its text: not
on the batch of a prompt, earlier draws, or the layout.

A sum in another order (another layout, another batch) gives logits that differ in their last digits. Tokens whose logits are that close
are treated as equal: greedy takes the lowest id, filters keep all of them. One case remains: if a drawn number, or a filter's limit, falls
within the rounding of a border between two tokens, another layout may choose the other one. The probability of that per drawn token is
about the relative rounding of a token's share: negligible in fp64, small in fp32, but not in bf16.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.data.permutation import key_of
from trainer.shared.run.stages import Sampling

__all__ = ["Sampling", "choose", "tolerance", "uniform"]

ULPS = 64
"""The difference below which two logits are equal, in units of the last place of the largest one."""

LEAST = 1e-30
"""A lower temperature is greedy, and a lower penalty is raised to this: division by smaller numbers would overflow, and a row in which
several logits are infinite has no likeliest token."""


def tolerance(logits: Tensor) -> float:
    """Returns the largest difference of two equal logits, given all logits of a row in the type in which they were computed."""
    return ULPS * torch.finfo(logits.dtype).eps * float(logits.abs().max())


def choose(logits: Tensor, text: Sequence[int], sampling: Sampling, request: int) -> int:
    """Chooses the token after ``text``, from logits [V] of any float type."""
    near = tolerance(logits)
    logits = _penalised(logits.double(), text, sampling.repetition_penalty)
    if sampling.temperature < LEAST:
        return int((logits >= logits.max() - near).nonzero()[0])
    kept = _filtered(logits / sampling.temperature, sampling, near / sampling.temperature)
    cumulative = torch.softmax(kept, -1).cumsum(-1)
    target = uniform(sampling.seed, request, len(text)) * cumulative[-1:]
    return min(int(torch.searchsorted(cumulative, target, right=True)), len(logits) - 1)


def uniform(seed: int, request: int, position: int) -> float:
    """Returns a number in [0, 1) that depends on these three alone (counter-based, Salmon et al. 2011)."""
    return int(key_of(seed, request, position)[0] >> 11) / 2**53


def _penalised(logits: Tensor, text: Sequence[int], penalty: float) -> Tensor:
    """Makes tokens that already occur less likely (Keskar et al. 2019, section 4.1)."""
    if penalty == 1:
        return logits
    penalty = min(max(penalty, LEAST), 1 / LEAST)
    tokens = torch.tensor(sorted(set(text)), device=logits.device)
    values = logits[tokens]
    return logits.index_copy(0, tokens, torch.where(values > 0, values / penalty, values * penalty))


def _filtered(logits: Tensor, sampling: Sampling, near: float) -> Tensor:
    """Sets tokens excluded by top_k and top_p to -inf."""
    if 0 < sampling.top_k < len(logits):
        logits = _cut(logits, float(logits.topk(sampling.top_k).values[-1]) - near)
    if sampling.top_p < 1:
        ordered = logits.sort(descending=True).values
        shares = torch.softmax(ordered, -1)
        inside = ordered[shares.cumsum(-1) - shares < sampling.top_p]  # likelier tokens do not reach top_p yet
        logits = _cut(logits, float(inside[-1]) - near)
    return logits


def _cut(logits: Tensor, least: float) -> Tensor:
    return logits.masked_fill(logits < least, float("-inf"))
