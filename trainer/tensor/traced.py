"""The layers as operations that torch.compile knows by their shapes alone, so that a block is one graph for any number of tensor ranks.

Eagerly a layer is an autograd function (``trainer.tensor.layers``). In a traced block it is an operation that runs the same code: the
compiler need not follow its collectives and gradient buffers. An operation finds its layer by a number and its micro-batch by a stamp, both
tensors on the CPU: so all blocks are one graph. A tensor of one element, ``due``, makes its backward run: otherwise a layer whose input
needs no gradient would be taken for one without effect. The gradient of an empty tensor is known without running it, and inductor, which
knows that, left out the backward of a first block.

They are defined as plain operations: ``torch.library.custom_op`` would check on every call that they keep their promises, which took a
tenth of a block's time on the host.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

LAYERS: WeakValueDictionary[int, Any] = WeakValueDictionary()
"""All layers of this process, by number."""
NUMBERS = itertools.count()
DUE = {trains: torch.zeros(1, requires_grad=trains) for trains in (False, True)}
"""Inputs that request a layer's backward, or do not."""
NO_STAMP = torch.zeros(2, dtype=torch.int64)
"""The stamp for layers that treat all micro-batches alike."""


OPERATIONS = torch.library.Library("trireme", "FRAGMENT")


def defined(schema: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a function the operation of that schema, which changes none of its inputs and returns none of them."""

    def define(function: Callable[..., Any]) -> Callable[..., Any]:
        OPERATIONS.define(schema)
        name = schema.split("(")[0]
        OPERATIONS.impl(name, function, "CompositeExplicitAutograd")
        operation: Callable[..., Any] = getattr(torch.ops.trireme, name).default
        return operation

    return define


def numbered(layer: object) -> Tensor:
    """Returns a number for ``layer``, on the CPU whatever the default device is."""
    number = next(NUMBERS)
    LAYERS[number] = layer
    return torch.tensor(number, device="cpu")


def due(layer: nn.Module) -> Tensor:
    """Returns the tensor that makes a layer's backward run if any of its parameters is trained."""
    return DUE[any(parameter.requires_grad for parameter in layer.parameters())]


@defined("multiply(Tensor x, Tensor due, Tensor number, Tensor stamp, SymInt[] shape, SymInt[] inner) -> (Tensor, Tensor)")
def multiply(x: Tensor, due: Tensor, number: Tensor, stamp: Tensor, shape: list[int], inner: list[int]) -> tuple[Tensor, Tensor]:
    """Returns the output of the linear layer ``number``, and the inner activation of its low-rank product: of ``shape`` and ``inner`` ([0]:
    none)."""
    y, low = LAYERS[int(number)].compute(x)
    return y, x.new_empty(0) if low is None else low


@torch.library.register_fake("trireme::multiply", lib=OPERATIONS)
def _(x: Tensor, due: Tensor, number: Tensor, stamp: Tensor, shape: list[int], inner: list[int]) -> tuple[Tensor, Tensor]:
    return x.new_empty(shape), x.new_empty(inner)


@defined("multiply_gradients(Tensor dy, Tensor x, Tensor inner, Tensor number, Tensor stamp, SymInt[] shape) -> (Tensor, Tensor)")
def multiply_gradients(dy: Tensor, x: Tensor, inner: Tensor, number: Tensor, stamp: Tensor, shape: list[int]) -> tuple[Tensor, Tensor]:
    """Returns the gradient of the input, of ``shape`` ([0]: not wanted), and zero for ``due``. Weight gradients go to their buffers."""
    layer = LAYERS[int(number)]
    if layer.gradients.defers:  # compiled code overwrites the inputs of an operation that has returned
        dy, x, inner = dy.clone(), x.clone(), inner.clone()
    dx = layer.differentiate(dy, _or_none(x), _or_none(inner), stamp, None if shape == [0] else tuple(shape))
    return dy.new_empty(0) if dx is None else dx, torch.zeros(1)


@torch.library.register_fake("trireme::multiply_gradients", lib=OPERATIONS)
def _(dy: Tensor, x: Tensor, inner: Tensor, number: Tensor, stamp: Tensor, shape: list[int]) -> tuple[Tensor, Tensor]:
    return dy.new_empty(shape), torch.empty(1)


def _or_none(tensor: Tensor) -> Tensor | None:
    return tensor if tensor.numel() else None


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, due, number, stamp, _, _ = inputs
    ctx.shape = list(x.shape)
    ctx.save_for_backward(x if due.requires_grad else x.new_empty(0), output[1], number, stamp)


def _differentiate(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    x, inner, number, stamp = ctx.saved_tensors
    dx, nothing = multiply_gradients(dy, x, inner, number, stamp, ctx.shape if ctx.needs_input_grad[0] else [0])
    return dx if ctx.needs_input_grad[0] else None, nothing if ctx.needs_input_grad[1] else None, None, None, None, None


torch.library.register_autograd("trireme::multiply", _differentiate, setup_context=_save, lib=OPERATIONS)


@defined("kept(Tensor x, Tensor number, Tensor stamp) -> Tensor")
def kept(x: Tensor, number: Tensor, stamp: Tensor) -> Tensor:
    """Returns the elements of x that the dropout layer ``number`` keeps in the micro-batch of ``stamp``."""
    layer = LAYERS[int(number)]
    with layer.noise.at_stamp(stamp):
        return layer.kept(x).contiguous()  # type: ignore[no-any-return]


@torch.library.register_fake("trireme::kept", lib=OPERATIONS)
def _(x: Tensor, number: Tensor, stamp: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=torch.bool, device=x.device)


@defined("total(Tensor x, Tensor number) -> Tensor")
def total(x: Tensor, number: Tensor) -> Tensor:
    """Returns the sum of x over the ranks of the layer ``number``."""
    return LAYERS[int(number)].compute(x)  # type: ignore[no-any-return]


@torch.library.register_fake("trireme::total", lib=OPERATIONS)
def _(x: Tensor, number: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _total(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


torch.library.register_autograd(
    "trireme::total", lambda ctx, dy: (total(dy, *ctx.saved_tensors), None), setup_context=_total, lib=OPERATIONS
)


@defined("enter(Tensor x, Tensor number, SymInt[] shape) -> Tensor")
def enter(x: Tensor, number: Tensor, shape: list[int]) -> Tensor:
    """Returns what the layer ``number`` makes of x, of ``shape``: the sequence that all heads of a rank see."""
    return LAYERS[int(number)].compute(x)  # type: ignore[no-any-return]


@defined("enter_gradient(Tensor dy, Tensor number, SymInt[] shape) -> Tensor")
def enter_gradient(dy: Tensor, number: Tensor, shape: list[int]) -> Tensor:
    """Returns the gradient of the input of that layer, of ``shape``."""
    return LAYERS[int(number)].differentiate(dy)  # type: ignore[no-any-return]


@torch.library.register_fake("trireme::enter", lib=OPERATIONS)
@torch.library.register_fake("trireme::enter_gradient", lib=OPERATIONS)
def _(x: Tensor, number: Tensor, shape: list[int]) -> Tensor:
    return x.new_empty(shape)


def _entering(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.shape = list(inputs[0].shape)
    ctx.save_for_backward(inputs[1])


torch.library.register_autograd(
    "trireme::enter",
    lambda ctx, dy: (enter_gradient(dy, *ctx.saved_tensors, ctx.shape), None, None),
    setup_context=_entering,
    lib=OPERATIONS,
)
