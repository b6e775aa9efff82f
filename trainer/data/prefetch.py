"""The rows of the next step, read by a thread while this one computes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor


class Prefetch:
    """``read(n)`` gives the rows of the step that begins with sample ``n``; steps are ``stride`` samples apart."""

    def __init__(self, read: Callable[[int], Tensor], stride: int):
        self.read, self.stride = read, stride
        self.thread = ThreadPoolExecutor(1, "rows")
        self.ahead: dict[int, Future[Tensor]] = {}

    def rows(self, start: int) -> Tensor:
        """The rows of a step, from now on also those of the next one. An error of reading is raised when its rows are asked for."""
        future = self.ahead.pop(start, None) or self.thread.submit(self.read, start)
        rows = future.result()
        self.ahead = {start + self.stride: self.thread.submit(self.read, start + self.stride)}
        return rows
