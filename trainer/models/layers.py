"""The layers that every family is built from, for one process. ``trainer.tensor`` has their parallel forms.

Shapes: s sequence, b micro-batch, h hidden. Activations are [s, b, h]. Each layer states how its parameters are
initialised and which of them decay; nothing is marked on the tensors themselves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.shared.families.registry import FAMILIES
from trainer.shared.run.schema import ResolvedModelConfig


@dataclass(frozen=True)
class Init:
    """Initial values of a parameter: normal with ``std`` around 0, or the constant ``value`` when ``std`` is 0."""

    std: float = 0.0
    value: float = 0.0


class Part(nn.Module):
    """A module that owns parameters: ``inits`` has an entry for each of them, ``decayed`` names those that decay."""

    decayed: ClassVar[frozenset[str]] = frozenset()
    weight: nn.Parameter

    def __init__(self) -> None:
        super().__init__()
        self.inits: dict[str, Init] = {}

    def own(self, name: str, shape: tuple[int, ...], init: Init) -> None:
        """Register the parameter ``name``; its values are set later, from its record."""
        self.inits[name] = init
        self.register_parameter(name, nn.Parameter(torch.empty(shape)))


class Linear(Part):
    """``y = x W^T + b``, where the last dimension of x becomes the dimensions ``outputs`` of y.

    Weight [*outputs, inputs], bias [*outputs].
    """

    decayed = frozenset({"weight"})
    bias: nn.Parameter | None

    def __init__(self, inputs: int, outputs: tuple[int, ...], std: float, bias: bool = True):
        super().__init__()
        self.inputs, self.outputs = inputs, outputs
        self.own("weight", (*outputs, inputs), Init(std))
        if bias:
            self.own("bias", outputs, Init())
        else:
            self.bias = None

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.flatten()
        return F.linear(x, self.weight.flatten(0, -2), bias).unflatten(-1, self.weight.shape[:-1])


class TokenEmbedding(Part):
    """Tokens [s, b] to vectors [s, b, h]."""

    decayed = frozenset({"weight"})

    def __init__(self, vocab: int, hidden: int, std: float):
        super().__init__()
        self.own("weight", (vocab, hidden), Init(std))

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight)


class PositionEmbedding(Part):
    """Adds a learned vector to each position of x [s, b, h]."""

    decayed = frozenset({"weight"})

    def __init__(self, seq: int, hidden: int, std: float):
        super().__init__()
        self.own("weight", (seq, hidden), Init(std))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight[: x.shape[0]].unsqueeze(1)


class LayerNorm(Part):
    """Normalisation to mean 0 and variance 1 over the hidden dimension, then scale and shift."""

    bias: nn.Parameter

    def __init__(self, hidden: int, eps: float):
        super().__init__()
        self.eps = eps
        self.own("weight", (hidden,), Init(value=1.0))
        self.own("bias", (hidden,), Init())

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class RMSNorm(Part):
    """Normalisation to mean square 1 over the hidden dimension, then scale (Zhang and Sennrich 2019)."""

    def __init__(self, hidden: int, eps: float):
        super().__init__()
        self.eps = eps
        self.own("weight", (hidden,), Init(value=1.0))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


NORMS = {"layer": LayerNorm, "rms": RMSNorm}
"""By ``Family.norm``."""


def norm(c: ResolvedModelConfig) -> Part:
    """A norm of the residual stream, as the model's family has them."""
    return NORMS[FAMILIES[c.family].norm](c.hidden, c.norm_eps)


class Dropout(nn.Module):
    """Zeroes elements with probability ``p`` and scales the others by 1 / (1 - p)."""

    def __init__(self, p: float):
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.p, self.training) if self.p else x


class MLP(nn.Module):
    """h -> ffn, a non-linearity, ffn -> h. SwiGLU has two matrices up: ``silu(gate) * value`` (Shazeer 2020)."""

    def __init__(self, c: ResolvedModelConfig, down_std: float):
        super().__init__()
        biases = FAMILIES[c.family].biases
        self.activation = ACTIVATIONS[c.activation]
        self.up = Linear(c.hidden, (2, c.ffn) if c.activation == "swiglu" else (c.ffn,), c.init_std, "up" in biases)
        self.down = Linear(c.ffn, (c.hidden,), down_std, "down" in biases)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))


def gelu(x: Tensor) -> Tensor:
    """GELU in its tanh approximation, as in GPT-2 and BLOOM."""
    return F.gelu(x, approximate="tanh")


def squared_relu(x: Tensor) -> Tensor:
    """max(x, 0)^2 (Primer, So et al. 2021)."""
    return F.relu(x).square()


def swiglu(x: Tensor) -> Tensor:
    """[..., 2, f] -> [..., f]."""
    gate, value = x.unbind(-2)
    return F.silu(gate) * value


ACTIVATIONS = {"gelu": gelu, "squared_relu": squared_relu, "swiglu": swiglu}


def residual_std(std: float, layers: int) -> float:
    """Initial std of matrices that write to the residual stream: the sum of 2 L of them keeps its scale (GPT-2)."""
    return std / math.sqrt(2 * layers)
