"""Reusable buffers, and a queue of collectives that overlap with computation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import Tensor

from trainer.comm.collectives import Pending
from trainer.state.host import Upload


class Pool:
    """Flat buffers for reuse, by length and dtype: the page faults of new ones would cost more than the arithmetic."""

    def __init__(self, device: torch.device):
        self.device = device
        self.free: dict[tuple[str, int, torch.dtype], list[Tensor]] = defaultdict(list)
        self.nbytes: dict[str, int] = defaultdict(int)  # of all buffers ever made, by part

    def take(self, part: str, numel: int, dtype: torch.dtype) -> Tensor:
        """A buffer: zero when new, else with its last user's content. ``part`` is weights or gradients."""
        waiting = self.free[part, numel, dtype]
        if waiting:
            return waiting.pop()
        self.nbytes[part] += numel * dtype.itemsize
        return torch.zeros(numel, dtype=dtype, device=self.device)

    def give(self, part: str, buffer: Tensor) -> None:
        self.free[part, buffer.numel(), buffer.dtype].append(buffer)


Steps = Iterator[tuple[Pending | Upload, bool]]
"""The collectives of one bucket, each started after the one before is complete, with whether the next should start as soon as it can."""


class CollectiveQueue:
    """Runs the collectives of many buckets in the same order on every rank, as many at once as their order allows."""

    def __init__(self) -> None:
        self.active: list[tuple[Steps, Pending | Upload, bool]] = []  # in the order in which they were started

    def start(self, steps: Steps) -> None:
        """Starts the first collective of ``steps``. First, earlier buckets whose next collective depends on the active one advance."""
        self._advance(only_followed=True)
        self._next(steps, self.active)

    def complete(self, steps: Steps) -> None:
        while any(steps is other for other, _, _ in self.active):
            self._advance(only_followed=False, last=steps)

    def finish(self) -> None:
        while self.active:
            self._advance(only_followed=False)

    def _advance(self, only_followed: bool, last: Steps | None = None) -> None:
        """Waits for each active collective, up to those of ``last``, and starts its successor."""
        remaining: list[tuple[Steps, Pending | Upload, bool]] = []
        passed = False
        for steps, pending, followed in self.active:
            if passed or (only_followed and not followed):
                remaining.append((steps, pending, followed))
            else:
                pending.wait()
                self._next(steps, remaining)
            passed = passed or steps is last
        self.active = remaining

    @staticmethod
    def _next(steps: Steps, active: list[tuple[Steps, Pending | Upload, bool]]) -> None:
        for pending, followed in steps:
            active.append((steps, pending, followed))
            return
