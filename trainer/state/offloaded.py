"""AdamW where a share of the states is in host memory: the device's at once, the host's by its own thread, bucket by bucket."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trainer.shared.run.resolved import ResolvedOptimizerConfig
from trainer.state.host import HostStates
from trainer.state.optimizer import AdamW
from trainer.state.parameters import OptimizerShard

HOST = torch.device("cpu")


class OffloadedAdamW:
    """AdamW on the pieces that this rank owns, on the device and in host memory."""

    def __init__(self, config: ResolvedOptimizerConfig, tasks: Sequence[Sequence[OptimizerShard]], device: torch.device):
        self.shards: list[OptimizerShard] = []
        self.here = AdamW(config, [[piece for piece in task if piece.host is None] for task in tasks], device)
        buckets = {id(piece.host): piece.host for task in tasks for piece in task if piece.host is not None}
        self.there: list[tuple[HostStates, AdamW]] = [
            (host, AdamW(config, [[piece for piece in task if piece.host is host] for task in tasks], HOST)) for host in buckets.values()
        ]

    def begin(self, updates: int) -> None:
        """Continues after so many updates."""
        for optimizer in (self.here, *(optimizer for _, optimizer in self.there)):
            optimizer.begin(updates)

    def step(self, lr: float, factors: Tensor, skip: Tensor) -> None:
        """Updates the device's pieces, and leaves with each bucket of the host what its thread does before it hands on the weights. The
        thread waits for the factors, which the device may still have to compute; this one does not."""
        self.here.step(lr, factors, skip)
        own, none = (torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda).copy_(x, non_blocking=True) for x in (factors, skip))
        for host, optimizer in self.there:
            host.update = partial(self._update, optimizer, lr, own, none, host.memory.ready())

    @staticmethod
    def _update(optimizer: AdamW, lr: float, factors: Tensor, skip: Tensor, known: Any) -> None:
        if known is not None:
            known.synchronize()
        optimizer.step(lr, factors, skip)
