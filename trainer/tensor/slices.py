"""Attention of slices of sequences, which a rank computes one after the other (Li et al. 2021, arXiv 2102.07988): a slice sees the keys and
values of those before it, and its backward leaves them their gradient.

    forward    a slice writes its keys and values behind those of the slices before it, for each block and micro-batch in flight
    backward   the last slice comes first. What a slice finds for the keys and values before it is summed up until their own backward
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainer.models.attention import AttentionCore
from trainer.tensor.layers import Gradients
from trainer.tensor.region import SequenceSlices


class EarlierKeys:
    """Lets the queries of a slice see the keys and values of their sequence up to their own."""

    def __init__(self, slices: SequenceSlices, gradients: Gradients):
        self.slices, self.gradients = slices, gradients

    def __call__(self, core: AttentionCore, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.slices.now is None:  # sequences are whole where nothing is trained
            return core.attend(query, key, value)
        left = self.slices.left
        if core not in left:
            left[core] = KeptKeys(key, value, self.slices.length, self.gradients)
        keys, values = _Seen.apply(key, value, left[core], self.slices.now)
        return core.attend(query, keys, values, length=self.slices.length)


class KeptKeys:
    """Keys and values of one block and micro-batch [s, b, kv_heads, d], slice after slice, and the gradients of those whose backward is
    still to come. Slices are written first to last, and seen again by recomputation; gradients come last to first."""

    def __init__(self, key: Tensor, value: Tensor, length: int, gradients: Gradients):
        self.tensors = [own.new_empty(length, *own.shape[1:]) for own in (key, value)]
        self.written, self.waited = 0, length  # positions
        self.sums: list[Tensor] = []
        self.counts = gradients.counts
        self.counted = [self.counts(tensor) for tensor in self.tensors]

    def add(self, run: range, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Writes the keys and values at the positions ``run``; returns all up to them. Autograd does not see the writing: it may keep the
        result, no row of which is written again."""
        assert run.start <= self.written, f"slice {run} is computed before the one that ends at {self.written}"
        if run.start == self.written:
            for whole, own in zip(self.tensors, (key, value)):
                whole.data[run.start : run.stop] = own
            self.written = run.stop
        keys, values = (whole.data[: run.stop] for whole in self.tensors)
        return keys, values

    def collect(self, run: range, *gradients: Tensor) -> list[Tensor]:
        """Takes the gradients that slice ``run`` has for keys and values up to its own. Returns those of its own, which are complete now:
        summed in at least 4 bytes."""
        assert run.stop == self.waited, f"backward of slice {run} does not follow that of the one from {self.waited} on"
        if not self.sums:
            self.sums = [own.to(torch.promote_types(own.dtype, torch.float32), copy=True) for own in gradients]
            self.counted += [self.counts(total) for total in self.sums]
        else:
            for total, own in zip(self.sums, gradients):
                total[: run.stop] += own
        self.waited = run.start
        return [total[run.start : run.stop].to(own.dtype) for total, own in zip(self.sums, gradients)]


class _Seen(torch.autograd.Function):
    """Keys and values of a slice -> those up to its own."""

    @staticmethod
    def forward(ctx: Any, key: Tensor, value: Tensor, kept: KeptKeys, run: range) -> tuple[Tensor, Tensor]:
        ctx.kept, ctx.run = kept, run
        return kept.add(run, key, value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return *ctx.kept.collect(ctx.run, *gradients), None, None
