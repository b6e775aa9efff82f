"""Time on the device: marks that cost next to nothing in the step and are read after it."""

from __future__ import annotations

import time
from typing import Any

import torch


class Clock:
    """``mark()`` now, ``seconds(a, b)`` later. On CUDA a mark is an event on the current stream; the host does not wait for it."""

    def __init__(self, device: torch.device):
        self.device = device
        self.on_device = device.type == "cuda"

    def mark(self) -> Any:
        if not self.on_device:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """Seconds from ``start`` to ``end``, both of which have passed."""
        return start.elapsed_time(end) / 1e3 if self.on_device else end - start

    def synchronize(self) -> None:
        """Wait until every mark has passed."""
        if self.on_device:
            torch.cuda.synchronize(self.device)
