"""The layers that every family is built from, for one process. ``trainer.tensor`` has their parallel forms.

Shapes: s sequence, b micro-batch, h hidden. Activations are [s, b, h]. Each layer declares how its parameters are initialised, which of
them decay and where they live; the tensors themselves carry no marks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.shared.families.registry import FAMILIES
from trainer.shared.parallel.placement import Partial, Placement, Shard
from trainer.shared.run.resolved import ResolvedModelConfig

VOCABULARY = Shard(0, tiles=True)
"""How tensor ranks share the rows of embedding and head."""


@dataclass(frozen=True)
class Init:
    """Initial values of a parameter: normal with ``std`` around 0, or the constant ``value`` when ``std`` is 0. ``factors`` multiply the
    values along dimension 1."""

    std: float = 0.0
    value: float = 0.0
    factors: tuple[float, ...] = ()


@dataclass(frozen=True)
class ParameterSpec:
    """The declaration of a parameter: initial values, its group of the optimizer (a field of ``GroupsConfig``), and where it lives.
    ``tied``: the global name of the parameter that it equals, wherever that lives. One that is not ``learned`` has no gradient: a rule of
    its own moves it. ``uses``: how often its layer computes with it in a micro-batch, each time with a gradient."""

    init: Init
    group: str = "vectors"
    placement: Placement = field(default_factory=dict)
    tied: str | None = None
    learned: bool = True
    uses: int = 1


class ParameterModule(nn.Module):
    """A module that owns parameters: ``specs`` has an entry for each of them."""

    weight: nn.Parameter

    def __init__(self) -> None:
        super().__init__()
        self.specs: dict[str, ParameterSpec] = {}

    def own(self, name: str, shape: tuple[int, ...], spec: ParameterSpec) -> None:
        """Registers the parameter ``name``; its values are set later, from its record."""
        self.specs[name] = spec
        self.register_parameter(name, nn.Parameter(torch.empty(shape), requires_grad=spec.learned))


class Linear(ParameterModule):
    """``y = x W^T + b``, where the last dimension of x becomes the dimensions ``outputs`` of y.

    Weight [*outputs, inputs], bias [*outputs]. ``cut``: how tensor ranks share the weight, along a dimension of the outputs or the inputs.
    An ``entered`` x is whole on every tensor rank, and only this rank's part of its gradient is wanted: others add those up.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        inputs: int,
        outputs: tuple[int, ...],
        std: float,
        bias: bool = True,
        cut: Shard | None = None,
        tied: str | None = None,
        entered: bool = False,
        group: str = "matrices",
    ):
        super().__init__()
        self.inputs, self.outputs, self.cut, self.entered = inputs, outputs, cut, entered
        placement = {} if cut is None else {"tensor": cut}
        self.own("weight", (*outputs, inputs), ParameterSpec(Init(std), group, placement, tied))
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

    def __init__(self, vocab: int, hidden: int, std: float, tied: str | None = None, uses: int = 1):
        super().__init__()
        self.own("weight", (vocab, hidden), ParameterSpec(Init(std), "embedding", {"tensor": VOCABULARY}, tied, uses=uses))

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight)


class PositionEmbedding(ParameterModule):
    """Adds a learned vector to each position of x [s, b, h]."""

    def __init__(self, seq: int, hidden: int, std: float):
        super().__init__()
        self.own("weight", (seq, hidden), ParameterSpec(Init(std), "embedding"))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight[: x.shape[0]].unsqueeze(1)


class Norm(ParameterModule):
    """A normalisation over the last dimensions of x, ``shape``. With an ``offset`` the scale is 1 + weight."""

    bias: nn.Parameter | None

    def __init__(self, shape: tuple[int, ...], eps: float, offset: bool = False, bias: bool = False, placement: Placement | None = None):
        super().__init__()
        self.eps, self.offset = eps, offset
        self.own("weight", shape, ParameterSpec(Init(value=0.0 if offset else 1.0), placement=placement or {}))
        if bias:
            self.own("bias", shape, ParameterSpec(Init(), placement=placement or {}))
        else:
            self.bias = None

    def scale(self) -> Tensor:
        """Returns the factor of the normalised x."""
        return 1 + self.weight if self.offset else self.weight


class LayerNorm(Norm):
    """Normalisation to mean 0 and variance 1, then scale and, if there is a bias, shift."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.scale(), self.bias, self.eps)


class RMSNorm(Norm):
    """Normalisation to mean square 1, then scale (Zhang and Sennrich 2019)."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.scale(), self.eps)


class WidthNorm(Norm):
    """RMSNorm of x [s, b, heads, d] over all heads together. Where ranks have some of the heads each, ``total`` sums over them."""

    def __init__(self, shape: tuple[int, ...], eps: float, offset: bool = False, bias: bool = False, placement: Placement | None = None):
        super().__init__(shape, eps, offset, bias, placement)
        self.heads = shape[0]  # of all ranks
        self.total: Callable[[Tensor], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        squares = wide.square().sum((-2, -1), keepdim=True)
        squares = squares if self.total is None else self.total(squares)
        return (wide * torch.rsqrt(squares / (self.heads * x.shape[-1]) + self.eps)).to(x.dtype) * self.scale()


NORMS = {"layer": LayerNorm, "layer_no_bias": LayerNorm, "rms": RMSNorm}
"""By ``model.norm``."""


def norm(c: ResolvedModelConfig) -> Norm:
    """Returns a norm of the residual stream."""
    return NORMS[c.norm]((c.hidden,), c.norm_eps, FAMILIES[c.family].norm_offset, bias=c.norm == "layer")


def head_norm(c: ResolvedModelConfig, heads: int) -> Norm | None:
    """Returns the norm of queries or keys [s, b, heads, d]: of each head, which every tensor rank applies to its own, or of all heads
    together."""
    offset, bias = FAMILIES[c.family].norm_offset, c.norm == "layer"
    if c.qk_norm == "head":
        return NORMS[c.norm]((c.head_width,), c.norm_eps, offset, bias, {"tensor": Partial()})
    return WidthNorm((heads, c.head_width), c.norm_eps, offset, placement={"tensor": Shard(0)}) if c.qk_norm == "width" else None


class Dropout(nn.Module):
    """Zeroes elements with probability ``p`` and scales the others by 1 / (1 - p)."""

    def __init__(self, p: float):
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.p, self.training) if self.p else x


class MLP(nn.Module):
    """h -> ffn, a non-linearity, ffn -> h. With a gate there are two matrices up: ``f(gate) * value`` (Shazeer 2020)."""

    def __init__(self, c: ResolvedModelConfig, down_std: float):
        super().__init__()
        self.activation = ACTIVATIONS[c.activation]
        outputs = (2, c.ffn) if c.gated else (c.ffn,)
        self.up = Linear(c.hidden, outputs, c.matrix_std, "up" in c.biases, cut=Shard(len(outputs) - 1))
        self.down = Linear(c.ffn, (c.hidden,), down_std, "down" in c.biases, cut=Shard(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))


def gelu(x: Tensor) -> Tensor:
    """Computes GELU in its tanh approximation, as in GPT-2 and BLOOM."""
    return F.gelu(x, approximate="tanh")


def squared_relu(x: Tensor) -> Tensor:
    """Computes max(x, 0)^2 (Primer, So et al. 2021)."""
    return F.relu(x).square()


def swiglu(x: Tensor) -> Tensor:
    """Computes SiLU(gate) * value: [..., 2, f] -> [..., f]."""
    gate, value = x.unbind(-2)
    return F.silu(gate) * value


def geglu(x: Tensor) -> Tensor:
    """Computes GELU(gate) * value with GELU's tanh form: [..., 2, f] -> [..., f]."""
    gate, value = x.unbind(-2)
    return gelu(gate) * value


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": gelu,
    "gelu_exact": F.gelu,
    "relu": F.relu,
    "squared_relu": squared_relu,
    "swiglu": swiglu,
    "geglu": geglu,
}


def residual_std(c: ResolvedModelConfig, name: str) -> float:
    """Returns the initial std of the matrices ``name`` that write to the residual stream: the sum of 2 L of them keeps its scale (GPT-2),
    or begins as zero. Where a base's values are carried over, its layers count."""
    return 0.0 if name in c.zero_init else c.matrix_std / math.sqrt(2 * (c.transfer.layers or c.layers))
