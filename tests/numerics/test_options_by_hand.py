"""Every option of a model against the same network written by hand: losses and gradients in one process."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.numerics.draws import OPTIONS, ROPES
from tests.numerics.test_plain_oracle import plain_model, run_of
from trainer.models.rope import angles
from trainer.shared.families.registry import FAMILIES
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.resolved import ResolvedModelConfig
from trainer.shared.run.schema import ACTIVATIONS, TrainConfig

pytestmark = pytest.mark.slow


class ByHand:
    """Logits [s, b, V] of tokens [s, b], from weights by name: head after head, query after query, no module of ours but the angles."""

    def __init__(self, weights: dict[str, Tensor], model: ResolvedModelConfig):
        self.weights, self.c, self.family = weights, model, FAMILIES[model.family]

    def logits(self, tokens: Tensor) -> Tensor:
        c = self.c
        x = self.weights["embedding.tokens.weight"][tokens] * c.embedding_scale
        if c.positions == "learned":
            x = x + self.weights["embedding.positions.weight"][: len(tokens), None]
        if self.family.embedding_norm:
            x = self.norm(x, "embedding.norm")
        for index in range(c.layers):
            x = self.block(x, index)
        y = self.norm(x, "head.norm") * c.logit_scale
        name = "embedding.tokens" if c.tied else "head.output"
        y = y @ self.weights[f"{name}.weight"].t() + self.weights.get("head.output.bias", 0)
        return y if c.logit_cap is None else c.logit_cap * torch.tanh(y / c.logit_cap)

    def norm(self, x: Tensor, name: str, kind: str | None = None) -> Tensor:
        """Over the last dimension."""
        kind, scale = kind or self.c.norm, self.weights[f"{name}.weight"].flatten() + self.family.norm_offset
        if kind != "rms":
            x = x - x.mean(-1, keepdim=True)
        return x / (x.pow(2).mean(-1, keepdim=True) + self.c.norm_eps).sqrt() * scale + self.weights.get(f"{name}.bias", 0)

    def block(self, x: Tensor, index: int) -> Tensor:
        c, name = self.c, f"blocks.{index}"
        before, after = c.norm_at in ("before", "both"), c.norm_at in ("after", "both")
        normed = self.norm(x, f"{name}.attention_norm") if before else x
        added = self.attention(normed, index)
        added = self.norm(added, f"{name}.attention_post_norm") if after else added
        between = x + c.residual_scale * added
        if c.residual == "sequential":
            into = self.norm(between, f"{name}.mlp_norm") if before else between
        elif c.residual == "parallel":
            into = self.norm(x, f"{name}.mlp_norm") if before else x
        else:
            into = normed
        out = self.linear(self.activated(self.linear(into, f"{name}.mlp.up")), f"{name}.mlp.down")
        return between + c.residual_scale * (self.norm(out, f"{name}.mlp_post_norm") if after else out)

    def linear(self, x: Tensor, name: str) -> Tensor:
        weight = self.weights[f"{name}.weight"]
        return torch.tensordot(x, weight, dims=([-1], [weight.dim() - 1])) + self.weights.get(f"{name}.bias", 0)

    def activated(self, x: Tensor) -> Tensor:
        def smooth(z: Tensor) -> Tensor:
            return z / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))

        match self.c.activation:
            case "gelu":
                return smooth(x)
            case "gelu_exact":
                return x / 2 * (1 + torch.erf(x / math.sqrt(2)))
            case "relu":
                return x.clamp(min=0)
            case "squared_relu":
                return x.clamp(min=0) ** 2
            case "swiglu":
                return x[..., 0, :] * torch.sigmoid(x[..., 0, :]) * x[..., 1, :]
            case _:
                return smooth(x[..., 0, :]) * x[..., 1, :]

    def attention(self, x: Tensor, index: int) -> Tensor:
        c, name = self.c, f"blocks.{index}.attention"
        made = self.linear(x, f"{name}.qkv")  # [s, b, groups, queries + 2, d]
        query, key, value = made[..., :-2, :].flatten(2, 3), made[..., -2, :], made[..., -1, :]
        query, key = (
            self.rotated(self.of_heads(query, f"{name}.query_norm"), index),
            self.rotated(self.of_heads(key, f"{name}.key_norm"), index),
        )
        heads = [
            self.head(query[:, :, h], key[:, :, g], value[:, :, g], h, index) for h in range(c.heads) for g in [h * c.kv_heads // c.heads]
        ]
        return self.linear(torch.cat(heads, -1), f"{name}.output")

    def of_heads(self, x: Tensor, name: str) -> Tensor:
        """x [s, b, heads, d] behind its norm, if it has one."""
        if self.c.qk_norm == "width":
            return self.norm(x.flatten(2), name, "rms").view(x.shape)
        return self.norm(x, name) if self.c.qk_norm == "head" else x

    def rotated(self, x: Tensor, index: int) -> Tensor:
        """As products of complex numbers: dimension i is real, i + r/2 imaginary."""
        rope = self.c.rope
        if self.c.positions != "rotary" or (rope.skip_every and index % rope.skip_every == rope.skip_every - 1):
            return x
        frequencies, magnitude = angles(self.c, index)
        half = len(frequencies)
        angle = torch.arange(len(x))[:, None, None, None] * torch.tensor(frequencies, dtype=torch.float64)
        turned = torch.complex(x[..., :half], x[..., half : 2 * half]) * torch.polar(torch.full_like(angle, magnitude), angle)
        return torch.cat((turned.real, turned.imag, x[..., 2 * half :]), -1)

    def head(self, query: Tensor, key: Tensor, value: Tensor, head: int, index: int) -> Tensor:
        """One head, [s, b, d] each."""
        c, rows = self.c, []
        window = None if c.full_every and index % c.full_every == c.full_every - 1 else c.window
        slope = slope_of(head, c.heads) if c.positions == "alibi" else 0.0
        for at in range(len(query)):
            first = 0 if window is None else max(0, at - window + 1)
            scores = (query[at] * key[first : at + 1]).sum(-1) * c.attention_scale  # [keys, b]
            if c.score_cap is not None:
                scores = c.score_cap * torch.tanh(scores / c.score_cap)
            scores = scores - slope * (at - torch.arange(first, at + 1))[:, None]
            rows.append((torch.softmax(scores, 0)[..., None] * value[first : at + 1]).sum(0))
        return torch.stack(rows)


def slope_of(head: int, heads: int) -> float:
    """ALiBi's, for a number of heads that is a power of two."""
    return float(2 ** (-8 * (head + 1) / heads))


def drawn(number: int) -> TrainConfig:
    """A model with about half of the options, that breaks no rule."""
    dice = random.Random(number)
    families = [name for name, family in FAMILIES.items() if not family.attention_sinks]
    while True:
        model: dict[str, Any] = {name: dice.choice(values) for name, values in OPTIONS.items() if dice.random() < 0.5}
        if dice.random() < 0.5:
            kind, share = dice.choice(list(ROPES)), dice.choice([0.5, 1.0])
            model["rope"] = {"kind": kind, "share": share, "skip_every": dice.choice([0, 2]), **ROPES[kind]}
            model |= {"positions": "rotary", "head_width": 12}
            if kind == "longrope":
                model["rope"] |= dict.fromkeys(("short", "long"), [1.0, 1.5, 3.0, 1.0, 2.0, 2.5][: round(6 * share)])
            if dice.random() < 0.5:
                model["rope"]["local_theta"] = 50.0
        model |= {"family": dice.choice(families), "activation": dice.choice(ACTIVATIONS), "attention": dice.choice(["fused", "unfused"])}
        model |= {"seq": 10, "heads": 4, "kv_heads": dice.choice([1, 2, 4]), "ffn": 24, "tied": dice.random() < 0.5}
        try:
            return run_of(**model)
        except ConfigError:
            continue


def check(number: int) -> None:
    config = drawn(number)
    network, *_ = plain_model(config)
    dice = torch.Generator().manual_seed(number)
    for parameter in network.parameters():  # norms and biases too
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=dice, dtype=torch.float64)
    weights = {name: parameter.detach().clone().requires_grad_() for name, parameter in network.named_parameters()}
    tokens = torch.randint(config.model.vocab, (config.model.seq, 2), generator=dice)
    losses = []
    for logits in (network(tokens), ByHand(weights, config.model).logits(tokens)):
        losses.append(F.cross_entropy(logits[:-1].flatten(0, 1), tokens[1:].flatten()))
        losses[-1].backward()
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-12), config.model
    for name, parameter in network.named_parameters():
        expected = weights[name].grad
        assert parameter.grad is not None and expected is not None
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-9, atol=1e-11, msg=lambda text: f"{name}: {text}\n{config.model}")  # noqa: B023


@pytest.mark.parametrize("number", range(12))
def test_a_drawn_model_computes_what_is_written_by_hand(number: int) -> None:
    check(number)


@pytest.mark.campaign("layouts")
@pytest.mark.parametrize("first", range(100, 400, 50))
def test_many_drawn_models_compute_what_is_written_by_hand(first: int) -> None:
    for number in range(first, first + 50):
        check(number)
