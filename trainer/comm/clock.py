"""Time on the device: marks that cost next to nothing in the step and are read after it."""

from __future__ import annotations

import time
from typing import Any

import torch


class Clock:
    """Times with ``mark()`` and ``seconds(a, b)``. On CUDA a mark is an event on the current stream, which costs the host microseconds:
    while ``marking`` is off there are none (None)."""

    def __init__(self, device: torch.device):
        self.device = device
        self.on_device = device.type == "cuda"
        self.marking = True

    def mark(self) -> Any:
        return self.stamp() if self.marking else None

    def stamp(self) -> Any:
        """A mark whether or not ``marking`` is on."""
        if not self.on_device:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        return start.elapsed_time(end) / 1e3 if self.on_device else end - start

    def wait(self, mark: Any) -> None:
        if self.on_device:
            mark.synchronize()

    def synchronize(self) -> None:
        if self.on_device:
            torch.cuda.synchronize(self.device)
