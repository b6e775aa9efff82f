"""Counts the bytes that autograd keeps for backward, on any device, and holds them against a budget."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from trainer.failure import OverBudget


class Held:
    """A saved tensor; its bytes are given back when autograd drops it."""

    def __init__(self, tensor: Tensor, meter: ActivationMeter):
        self.tensor, self.meter, self.pointer = tensor, meter, tensor.untyped_storage().data_ptr()
        meter.add(self.pointer, tensor.untyped_storage().nbytes())

    def __del__(self) -> None:
        self.meter.remove(self.pointer)


class ActivationMeter:
    """Bytes of storages saved for backward: each storage once, however many views of it are saved.

    ``resting`` are storages that exist anyway (parameters). ``budget`` bytes may be in use, resting ones not included.
    """

    def __init__(self, resting: set[int], budget: int | None):
        self.resting, self.budget = resting, budget
        self.now = self.peak = 0
        self.users: dict[int, int] = {}
        self.sizes: dict[int, int] = {}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Count what is saved inside."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield

    def add(self, pointer: int, nbytes: int) -> None:
        """One more user of a storage. ``OverBudget`` when that is too much."""
        if pointer in self.resting:
            return
        self.users[pointer] = self.users.get(pointer, 0) + 1
        if self.users[pointer] == 1:
            self.sizes[pointer] = nbytes
            self.now += nbytes
            self.peak = max(self.peak, self.now)
            if self.budget is not None and self.now > self.budget:
                raise OverBudget(f"activations need more than the {self.budget / 1e9:.3g} GB that run.memory_gb leaves for them")

    def remove(self, pointer: int) -> None:
        """One user less."""
        if pointer in self.users:
            self.users[pointer] -= 1
            if self.users[pointer] == 0:
                del self.users[pointer]
                self.now -= self.sizes.pop(pointer)

    def hold(self, tensor: Tensor) -> Held:
        """Count a tensor that is kept by other means, as long as the returned object lives."""
        return Held(tensor, self)

    def _pack(self, tensor: Tensor) -> Any:
        return Held(tensor, self)

    def _unpack(self, held: Held) -> Tensor:
        return held.tensor
