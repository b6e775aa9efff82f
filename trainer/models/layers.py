"""The layers that every family is built from, for one process. ``trainer.tensor`` has their parallel forms.

Shapes: s sequence, b micro-batch, h hidden. Activations are [s, b, h]. Each layer declares how its parameters are initialised, which of
them decay and where they live; nothing is marked on the tensors themselves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.shared.families.registry import FAMILIES
from trainer.shared.parallel.placement import Placement, Shard
from trainer.shared.run.schema import ResolvedModelConfig

VOCABULARY = Shard(0, tiles=True)
"""How tensor ranks share the rows of embedding and head."""


@dataclass(frozen=True)
class Init:
    """Initial values of a parameter: normal with ``std`` around 0, or the constant ``value`` when ``std`` is 0."""

    std: float = 0.0
    value: float = 0.0


@dataclass(frozen=True)
class ParameterSpec:
    """What a layer declares of a parameter: initial values, whether weight decay applies, and where it lives. ``tied``: the global name of
    the parameter that it is the same as, wherever that is."""

    init: Init
    decays: bool = False
    placement: Placement = field(default_factory=dict)
    tied: str | None = None


class ParameterModule(nn.Module):
    """A module that owns parameters: ``specs`` has an entry for each of them."""

    weight: nn.Parameter

    def __init__(self) -> None:
        super().__init__()
        self.specs: dict[str, ParameterSpec] = {}

    def own(self, name: str, shape: tuple[int, ...], spec: ParameterSpec) -> None:
        """Registers the parameter ``name``; its values are set later, from its record."""
        self.specs[name] = spec
        self.register_parameter(name, nn.Parameter(torch.empty(shape)))


class Linear(ParameterModule):
    """``y = x W^T + b``, where the last dimension of x becomes the dimensions ``outputs`` of y.

    Weight [*outputs, inputs], bias [*outputs]. ``cut``: how tensor ranks share the weight, along a dimension of the outputs or the inputs.
    """

    bias: nn.Parameter | None

    def __init__(
        self, inputs: int, outputs: tuple[int, ...], std: float, bias: bool = True, cut: Shard | None = None, tied: str | None = None
    ):
        super().__init__()
        self.inputs, self.outputs, self.cut = inputs, outputs, cut
        placement = {} if cut is None else {"tensor": cut}
        self.own("weight", (*outputs, inputs), ParameterSpec(Init(std), True, placement, tied))
        if bias:
            self.own("bias", outputs, ParameterSpec(Init(), placement={} if self.cuts_inputs else placement))
        else:
            self.bias = None

    @property
    def cuts_inputs(self) -> bool:
        return self.cut is not None and self.cut.dim == len(self.outputs)

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.flatten()
        return F.linear(x, self.weight.flatten(0, -2), bias).unflatten(-1, self.weight.shape[:-1])


class TokenEmbedding(ParameterModule):
    """Tokens [s, b] to vectors [s, b, h]."""

    def __init__(self, vocab: int, hidden: int, std: float, tied: str | None = None):
        super().__init__()
        self.own("weight", (vocab, hidden), ParameterSpec(Init(std), True, {"tensor": VOCABULARY}, tied))

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight)


class PositionEmbedding(ParameterModule):
    """Adds a learned vector to each position of x [s, b, h]."""

    def __init__(self, seq: int, hidden: int, std: float):
        super().__init__()
        self.own("weight", (seq, hidden), ParameterSpec(Init(std), True))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight[: x.shape[0]].unsqueeze(1)


class LayerNorm(ParameterModule):
    """Normalisation to mean 0 and variance 1 over the hidden dimension, then scale and shift."""

    bias: nn.Parameter

    def __init__(self, hidden: int, eps: float):
        super().__init__()
        self.eps = eps
        self.own("weight", (hidden,), ParameterSpec(Init(value=1.0)))
        self.own("bias", (hidden,), ParameterSpec(Init()))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class RMSNorm(ParameterModule):
    """Normalisation to mean square 1 over the hidden dimension, then scale (Zhang and Sennrich 2019)."""

    def __init__(self, hidden: int, eps: float):
        super().__init__()
        self.eps = eps
        self.own("weight", (hidden,), ParameterSpec(Init(value=1.0)))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


NORMS = {"layer": LayerNorm, "rms": RMSNorm}
"""By ``Family.norm``."""


def norm(c: ResolvedModelConfig) -> ParameterModule:
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
        outputs = (2, c.ffn) if c.activation == "swiglu" else (c.ffn,)
        self.up = Linear(c.hidden, outputs, c.init_std, "up" in biases, cut=Shard(len(outputs) - 1))
        self.down = Linear(c.ffn, (c.hidden,), down_std, "down" in biases, cut=Shard(1))

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
