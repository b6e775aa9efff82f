"""Which token comes next. The choice depends on the logits, the seed, the number of the prompt and the position in its text, and on
nothing else: not on the batch that a prompt is in, nor on what was drawn before."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.data.permutation import key_of
from trainer.spec.stages import Sampling

__all__ = ["Sampling", "choose", "uniform"]


def choose(logits: Tensor, seen: list[list[int]], sampling: Sampling, requests: list[int]) -> Tensor:
    """The next token of each row, [b], from logits [b, V] of any float type. ``seen``: the texts, ``requests``: the rows' numbers."""
    logits = _penalised(logits.double(), seen, sampling.repetition_penalty)
    if sampling.temperature == 0:
        return logits.argmax(-1)
    kept = _filtered(logits / sampling.temperature, sampling)
    positions = [len(text) for text in seen]
    draws = [uniform(sampling.seed, request, position) for request, position in zip(requests, positions)]
    cumulative = torch.softmax(kept, -1).cumsum(-1)
    targets = torch.tensor(draws, dtype=torch.float64, device=logits.device)[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, targets, right=True).squeeze(1).clamp(max=logits.shape[-1] - 1)


def uniform(seed: int, request: int, position: int) -> float:
    """A number in [0, 1) that only these three decide (counter-based, Salmon et al. 2011)."""
    return int(key_of(seed, request, position)[0] >> 11) / 2**53


def _penalised(logits: Tensor, seen: list[list[int]], penalty: float) -> Tensor:
    """Tokens that occur already made less likely (Keskar et al. 2019, section 4.1)."""
    if penalty == 1:
        return logits
    logits = logits.clone()
    for row, text in enumerate(seen):
        tokens = torch.tensor(sorted(set(text)), device=logits.device)
        values = logits[row, tokens]
        logits[row, tokens] = torch.where(values > 0, values / penalty, values * penalty)
    return logits


def _filtered(logits: Tensor, sampling: Sampling) -> Tensor:
    """-inf for what top_k and top_p leave out."""
    if 0 < sampling.top_k < logits.shape[-1]:
        least = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    if sampling.top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True, stable=True)
        shares = torch.softmax(ordered, -1)
        outside = shares.cumsum(-1) - shares >= sampling.top_p  # what is likelier already has the share
        logits = logits.masked_fill(torch.zeros_like(outside).scatter(-1, order, outside), float("-inf"))
    return logits
