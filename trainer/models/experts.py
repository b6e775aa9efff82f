"""A mixture of experts in the place of a block's MLP: each token visits the few experts that a router chooses for it.

No token is dropped, and none is padded. Shapes: T tokens, h hidden, E experts, K experts of a token, R = T K rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.models.layers import ACTIVATIONS, MLP, Init, Linear, ParameterModule, ParameterSpec
from trainer.shared.parallel.placement import FOLDED, Partial, Placement, Replicate, Shard
from trainer.shared.run.resolved import ResolvedModelConfig
from trainer.shared.run.schema import ExpertsConfig

SMALLEST = 1e-20
"""Added to a sum of scores, all of which may underflow (DeepSeek-V3)."""


@dataclass(frozen=True)
class Choice:
    """A router's choice for some tokens, computed in fp32 or wider."""

    experts: Tensor  # [T, K], each token's in the order of their scores
    weights: Tensor  # [T, K], of their outputs
    scores: Tensor  # [T, E]
    logits: Tensor  # [T, E]


def choose(logits: Tensor, correction: Tensor | None, c: ExpertsConfig) -> Choice:
    """Chooses for each token the experts of the highest corrected scores, of equal ones the first."""
    scores = logits.softmax(-1) if c.router == "softmax" else logits.sigmoid()
    ranked = scores.detach() if correction is None else scores.detach() + correction
    if c.groups > 1:
        ranked = _in_best_groups(ranked, c)
    chosen = _taking_turns(ranked, c.active) if c.forced else _first(ranked, c.active)
    weights = scores.gather(-1, chosen)
    if c.normalized:
        weights = weights / (weights.sum(-1, keepdim=True) + SMALLEST)
    return Choice(chosen, weights * c.scale, scores, logits)


def _first(ranked: Tensor, count: int) -> Tensor:
    """Returns the columns of each row's highest values. torch.topk takes equal ones in any order, so layouts would differ."""
    return ranked.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def _taking_turns(ranked: Tensor, count: int) -> Tensor:
    tokens, experts = ranked.shape
    return torch.arange(tokens * count, device=ranked.device).view(tokens, count) % experts


def _in_best_groups(ranked: Tensor, c: ExpertsConfig) -> Tensor:
    """Leaves the experts of each token's best groups. A group is as good as its best expert (DeepSeek-V2), or as its best two, where scores
    are corrected (DeepSeek-V3)."""
    members = ranked.unflatten(-1, (c.groups, -1))
    worth = members.topk(1 if c.correction is None else 2).values.sum(-1)
    best = torch.zeros_like(worth, dtype=torch.bool).scatter(-1, _first(worth, c.active_groups), True)
    return members.masked_fill(~best[..., None], -math.inf).flatten(-2)


def balance_losses(scores: Tensor, load: Tensor) -> Tensor:
    """Returns, of each token, its part of the loss E sum_e f_e P_e of its sequence, times the sequence's length (Fedus et al. 2021;
    DeepSeek-V3, section 2.1.2).

    ``load`` [T, E]: f, the share of an expert among all choices of the token's sequence, a constant. P is the mean of the scores, each
    token's divided by their sum.
    """
    shares = scores / (scores.sum(-1, keepdim=True) + SMALLEST)
    return scores.shape[-1] * (load * shares).sum(-1)


class Router(ParameterModule):
    """Scores the experts of tokens [T, h]. Weight [E, h]; each rank of a tensor group has tokens of its own."""

    bias: nn.Parameter | None
    correction: Tensor | None

    def __init__(self, c: ResolvedModelConfig):
        super().__init__()
        self.experts = c.experts
        own = {"tensor": Partial()}
        self.own("weight", (c.experts.count, c.hidden), ParameterSpec(Init(c.few_std), "matrices", own))
        if c.experts.router_bias:
            self.own("bias", (c.experts.count,), ParameterSpec(Init(), placement=own))
        else:
            self.bias = None
        if c.experts.correction is None:
            self.correction = None
        else:
            self.own("correction", (c.experts.count,), ParameterSpec(Init(), placement={"tensor": Replicate()}, learned=False))

    def forward(self, tokens: Tensor) -> Choice:
        wide = torch.promote_types(tokens.dtype, torch.float32)
        bias = None if self.bias is None else self.bias.to(wide)
        return choose(F.linear(tokens.to(wide), self.weight.to(wide), bias), self.correction, self.experts)


class ExpertLinear(ParameterModule):
    """A matrix for each expert, [E, *outputs, inputs]. Expert ranks have some of them each; ``width`` is the dimension that is an expert's,
    of which expert-tensor ranks have parts."""

    def __init__(self, count: int, inputs: int, outputs: tuple[int, ...], std: float, width: int):
        super().__init__()
        placement: Placement = {"expert": Shard(0), "expert_tensor": Shard(width), FOLDED: Replicate()}
        self.own("weight", (count, *outputs, inputs), ParameterSpec(Init(std), "matrices", placement))

    def forward(self, rows: Tensor, sizes: Sequence[int]) -> Tensor:
        """Multiplies rows [R, inputs], expert after expert, ``sizes`` of each: [R, *outputs]."""
        matrices = self.weight.flatten(1, -2)
        products = [F.linear(part, matrix) for part, matrix in zip(rows.split(list(sizes)), matrices)]
        return torch.cat(products).unflatten(-1, self.weight.shape[1:-1])


@dataclass(frozen=True)
class Dispatched:
    """Copies of tokens in the order of their experts."""

    rows: Tensor  # [R, h]
    sizes: list[int]  # of each expert here
    order: Tensor  # [T K]: the copy of each row, where they were sent from
    inverse: Tensor  # [T K]: the row of each token's copies, there


def by_expert(experts: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the order of copies [T K] by expert, then by token, and its inverse, for the experts [T, K] of tokens."""
    order = experts.flatten().argsort(stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return order, inverse


class Dispatcher(nn.Module):
    """Takes tokens to their experts and back, where a process has all of both."""

    def own(self, x: Tensor) -> Tensor:
        """Returns this rank's tokens [T, h] of x [s, b, h]."""
        return x.flatten(0, 1)

    def whole(self, y: Tensor, x: Tensor) -> Tensor:
        """Returns what ``own`` took apart, of the shape of x."""
        return y.view(x.shape)

    def gathered(self, tokens: Tensor, choice: Choice, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the tokens [T, h] of x whose experts' parts this rank has, their experts and weights [T, K]."""
        return tokens, choice.experts, choice.weights

    def summed(self, y: Tensor, x: Tensor) -> Tensor:
        """Returns the sum over all parts of experts for this rank's own tokens, for y [T, h] of all ``gathered`` ones."""
        return y

    def dispatch(self, tokens: Tensor, experts: Tensor, count: int) -> Dispatched:
        """Copies each token once for each of its ``experts`` [T, K]."""
        order, inverse = by_expert(experts)
        return Dispatched(tokens[order // experts.shape[1]], experts.flatten().bincount(minlength=count).tolist(), order, inverse)

    def combine(self, rows: Tensor, sent: Dispatched) -> Tensor:
        """Returns the experts' outputs in the order of tokens, [T K, h]."""
        return rows[sent.inverse]


class MixtureOfExperts(nn.Module):
    """[s, b, h] -> [s, b, h]: of each token the weighed sum of its experts' outputs, plus that of the shared ones."""

    def __init__(self, c: ResolvedModelConfig, down_std: float):
        super().__init__()
        e, outputs = c.experts, (2, c.expert_ffn) if c.gated else (c.expert_ffn,)
        self.activation = ACTIVATIONS[c.activation]
        self.router, self.dispatcher = Router(c), Dispatcher()
        self.up = ExpertLinear(e.count, c.hidden, outputs, c.matrix_std, width=len(outputs))
        self.down = ExpertLinear(e.count, c.expert_ffn, (c.hidden,), down_std, width=2)
        self.shared = MLP(replace(c, ffn=e.shared_ffn), down_std) if e.shared_ffn else None
        self.shared_gate = Linear(c.hidden, (1,), c.few_std, bias=False) if e.shared_ffn and e.shared_gate else None

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.dispatcher.own(x)
        choice = self.balanced(self.router(tokens), x)
        visitors, experts, weights = self.dispatcher.gathered(tokens, choice, x)
        routed = self._routed(visitors, experts, weights, choice.scores.shape[1])
        y: Tensor = self.dispatcher.whole(self.dispatcher.summed(routed, x), x)
        if self.shared is None:
            return y
        together = self.shared(x)
        return y + (together if self.shared_gate is None else together * self.shared_gate(x).sigmoid())

    def balanced(self, choice: Choice, x: Tensor) -> Choice:
        """Returns the choice for this rank's tokens of x. Training adds the losses that balance it."""
        return choice

    def _routed(self, tokens: Tensor, experts: Tensor, weights: Tensor, count: int) -> Tensor:
        sent = self.dispatcher.dispatch(tokens, experts, count)
        rows = self.down(self.activation(self.up(sent.rows, sent.sizes)), sent.sizes)
        outputs = self.dispatcher.combine(rows, sent).unflatten(0, experts.shape)  # [T, K, h]
        return torch.bmm(weights.to(outputs.dtype)[:, None], outputs)[:, 0]
