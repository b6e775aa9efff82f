"""The layers as operations that torch.compile knows by their shapes alone, so that a block is one graph for any number of tensor ranks.

Eagerly a layer is an autograd function (``trainer.tensor.layers``). In a traced block it is an operation that runs the same code: its
collectives and its gradient buffers are nothing that a compiler has to follow. An operation finds its layer by a number, which is a tensor on
the CPU, and the micro-batch by another one: so all blocks are one graph. Its backward is due for the sake of an empty tensor, ``due``:
otherwise a layer whose input needs no gradient would be taken for one without effect.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

LAYERS: WeakValueDictionary[int, Any] = WeakValueDictionary()
"""All layers of this process, by number."""
DUE = {trains: torch.empty(0, requires_grad=trains) for trains in (False, True)}
"""Inputs that ask for a layer's backward, or do not."""


def numbered(layer: object) -> Tensor:
    """The number of a new layer, on the CPU whatever the default device is."""
    number = torch.tensor(_next(), device="cpu")
    LAYERS[int(number)] = layer
    return number


def _next() -> int:
    numbered.count = getattr(numbered, "count", -1) + 1  # type: ignore[attr-defined]
    return numbered.count  # type: ignore[attr-defined, no-any-return]


def due(layer: nn.Module) -> Tensor:
    """For a layer of which something is trained, what makes its backward run."""
    return DUE[any(parameter.requires_grad for parameter in layer.parameters())]


@torch.library.custom_op("trireme::multiply", mutates_args=())
def multiply(x: Tensor, due: Tensor, number: Tensor, key: Tensor, shape: list[int]) -> tuple[Tensor, Tensor]:
    """Output of the linear layer ``number``, of ``shape``, and the inner activation of its low-rank product (empty without one)."""
    y, inner = LAYERS[int(number)].compute(x, key)
    return y, x.new_empty(0) if inner is None else inner


@multiply.register_fake
def _(x: Tensor, due: Tensor, number: Tensor, key: Tensor, shape: list[int]) -> tuple[Tensor, Tensor]:
    return x.new_empty(shape), x.new_empty(0)


@torch.library.custom_op("trireme::multiply_backward", mutates_args=())
def multiply_backward(dy: Tensor, x: Tensor, inner: Tensor, number: Tensor, key: Tensor, shape: list[int]) -> tuple[Tensor, Tensor]:
    """Gradient of the input, of ``shape`` (empty if that is), and nothing for ``due``. Weight gradients go where they belong."""
    layer = LAYERS[int(number)]
    if layer.gradients.defers:  # a compiler writes new values into what it gave to an operation that has returned
        dy, x, inner = dy.clone(), x.clone(), inner.clone()
    dx = layer.differentiate(dy, x if x.numel() else None, inner if inner.numel() else None, key, tuple(shape) if shape else None)
    return dy.new_empty(0) if dx is None else dx, torch.empty(0)


@multiply_backward.register_fake
def _(dy: Tensor, x: Tensor, inner: Tensor, number: Tensor, key: Tensor, shape: list[int]) -> tuple[Tensor, Tensor]:
    return dy.new_empty(shape or 0), torch.empty(0)
