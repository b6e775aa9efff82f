"""The average of weights over the tail of a run: it watches, and changes nothing that is trained.

After each of n steps every element is (w1 + ... + wn) / n, kept by the rank that keeps the master weight (Polyak and Juditsky 1992; of
language models: Kaddour 2022, arXiv 2209.14981). What a host updates it averages, too, on the same thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from trainer.state.host import HostStates
from trainer.state.parameters import OptimizerShard


class TailAverage:
    """The averages of the weights in ``pieces``, of those that have one."""

    def __init__(self, start: int | None, pieces: Sequence[OptimizerShard]):
        """``start``: completed steps after which further ones count; None: none does."""
        self.start, self.count = start, 0  # steps that the average is of
        self.pairs: dict[HostStates | None, tuple[list[Tensor], list[Tensor]]] = {}  # averages and weights, by where they are
        for piece in pieces:
            if piece.average is not None and len(piece.average):
                averages, weights = self.pairs.setdefault(piece.host, ([], []))
                averages.append(piece.average)
                weights.append(piece.weight)

    def add(self, steps: int) -> None:
        """Counts the weights after so many completed steps, whose update the device has been given and hosts have before them."""
        if self.start is None:
            return
        self.count = self.count + 1 if steps > self.start else 0
        if not self.count:
            return
        for host, (averages, weights) in self.pairs.items():
            if host is None:
                torch._foreach_lerp_(averages, weights, 1 / self.count)
            else:
                host.update = _after(host.update, averages, weights, 1 / self.count)

    @contextlib.contextmanager
    def in_place(self, publish: Callable[[], None]) -> Iterator[None]:
        """Inside, the model computes with the average. ``publish`` hands weights on to what computes, and ends when they are there."""
        self._exchange()
        publish()
        try:
            yield
        finally:
            self._exchange()
            publish()

    def _exchange(self) -> None:
        for averages, weights in self.pairs.values():
            for average, weight in zip(averages, weights):
                before = weight.clone()
                weight.copy_(average)
                average.copy_(before)


def _after(update: Callable[[], None] | None, averages: list[Tensor], weights: list[Tensor], share: float) -> Callable[[], None]:
    """Returns the update of a host with what follows it."""

    def both() -> None:
        if update is not None:
            update()
        torch._foreach_lerp_(averages, weights, share)

    return both
