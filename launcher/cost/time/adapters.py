"""Time of the low-rank products that are trained beside frozen matrices (LoRA): y + scale B A x.

They are in 16 bits whatever the matrices are in, and mostly so narrow that memory sets their pace: they stream x, y and their gradients. A
library splits the long inner dimension of such a product, so that all units take part however few tiles its result has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from launcher.cost.inputs.case import Case
from launcher.cost.inputs.shape import Array
from launcher.cost.parts import ForwardBackward
from launcher.cost.time import collectives
from launcher.cost.time.products import products


@dataclass(frozen=True)
class AddedPasses:
    """Further times that an element as wide as a matrix' input or its result is read or written, beside what the products do."""

    forward: tuple[int, int]
    backward: tuple[int, int]


IN_PLACE = AddedPasses((0, 1), (1, 0))
"""The products with B and with A's transpose read what they add to (trainer/tensor/layers.py)."""
APART = AddedPasses((0, 5), (3, 2))
"""Forward scales the result (2) and adds it to the matrix' own (3); backward scales the gradient (2) and adds what flows to x to what flows
through the matrix (3). NVIDIA-NeMo/Megatron-Bridge, peft/utils.py: ``ParallelLinearAdapter.forward`` ends with
``x * (self.alpha / self.dim)``; peft/lora_layers.py: ``linear_output + adapter_output``."""
ROWS = ("output", "down")
"""Matrices whose inputs are sharded over the tensor ranks, and their results summed; those of the others are sharded."""


def seconds(case: Case) -> ForwardBackward:
    """Forward and backward seconds of a block's low-rank products and of what adds them in, on one rank."""
    s, device, constants = case.shape, case.device, case.constants
    passes = IN_PLACE if case.trainer.kernels.adapts_in_place else APART
    forward: Array = np.zeros_like(case.tokens)
    backward: Array = np.zeros_like(case.tokens)
    each = case.width / (device.bandwidth * constants.streaming)
    rate = device.rate(case.vector_precision)

    def product(m: Array, wide: Array) -> Array:
        """Seconds of ``m`` tokens: one way between an end that is ``wide`` and one as narrow as the rank."""
        return np.maximum(2 * m * wide * s.rank / rate, each * (m + s.rank) * wide) + constants.kernel

    for name, m, n, k, _, share in products(case):
        if name not in s.adapted:
            continue
        (ahead_in, ahead_out), (back_in, back_out) = passes.forward, passes.backward
        forward = forward + share * (product(m, k) + product(m, n) + each * m * (ahead_in * k + ahead_out * n))
        backward = backward + share * (2 * product(m, k) + 2 * product(m, n) + each * m * (back_in * k + back_out * n))
    return forward, backward


def tensor_seconds(case: Case) -> ForwardBackward:
    """Seconds that the low-rank products communicate over the tensor ranks, forward and backward: nothing hides it. None where they share
    the messages of their matrices.

    Apart from them (``ParallelLinearAdapter``), beside a matrix with sharded results both factors are sharded by their results: A x is
    gathered, its gradient summed, and so is that of x, which sequence parallelism scatters. Sequence-parallel inputs are gathered as well
    where the matrix overlaps its own gather (``return_layernorm_output_gathered`` otherwise). Beside a matrix with sharded inputs A x is
    summed, and what B makes of it is gathered, or exchanged so that each rank has its tokens (``a2a_experimental``).
    """
    s, c, device = case.shape, case.constants, case.device
    none = np.zeros_like(case.tokens)
    if case.trainer.kernels.adapts_in_place or not s.adapted:
        return none, none
    sequence = case.table["sequence_parallel"]

    def sent(collective: Callable[..., Array], width: Array) -> Array:
        return c.skew * collective(device, c, case.tensor_group, case.tokens * width * case.width)

    gather, scatter, reduce = collectives.all_gather, collectives.reduce_scatter, collectives.all_reduce
    forward, backward = none, none
    for product in products(case):
        if product.name not in s.adapted:
            continue
        if product.name in ROWS:
            whole = sent(gather, product.columns)
            if case.trainer.overlap.adapters_exchange:
                whole = np.where(sequence, sent(collectives.all_to_all, product.columns / case.tensor), whole)
            ahead = sent(reduce, s.rank) + whole
            back = sent(reduce, s.rank) + np.where(sequence, whole, 0.0)
        else:
            again = sequence & (case.trainer.overlap.tensor == "all")
            ahead = sent(gather, s.rank) + np.where(again, sent(gather, product.inner), 0.0)
            back = sent(reduce, s.rank) + np.where(sequence, sent(scatter, product.inner), sent(reduce, product.inner))
        forward, backward = forward + product.share * ahead, backward + product.share * back
    return forward, backward
