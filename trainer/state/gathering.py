"""Unshards the parameters of a unit for its computation, and prefetches those of the next unit.

Forward: unshard a unit, compute, reshard it. Backward: unshard it when the gradient of its output arrives, reshard it when all
its parameter gradients have arrived (``FlatBucket.arrive``). What is frozen has none: it is resharded when backward leaves the unit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from trainer.state.bucket import FlatBucket
from trainer.state.sharding import ShardedState


class Gathering:
    """The units of one chunk, in the order of forward. Its ``first`` part has no gradient below its first trained unit."""

    def __init__(self, state: ShardedState, units: list[tuple[str, nn.Module]], first: bool):
        self.buckets = [state.units[name] for name, _ in units]
        trained = [i for i, buckets in enumerate(self.buckets) if any(not bucket.frozen for bucket in buckets)]
        self.lowest = min(trained, default=len(units)) if first else 0
        self.ahead: set[int] = set()
        self.entered: int | None = None  # by backward
        for i, (_, module) in enumerate(units):
            module.register_forward_pre_hook(self._before(i))
            module.register_forward_hook(self._after(i))

    def prefetch(self, unit: int) -> None:
        """Starts to unshard a unit that will compute next; no-op for a unit outside the chunk."""
        if 0 <= unit < len(self.buckets) and unit not in self.ahead:
            self.ahead.add(unit)
            self._each(unit, FlatBucket.unshard)

    def enter(self, unit: int, following: int) -> None:
        """Waits for a unit's parameters and prefetches those of the ``following`` one."""
        self.prefetch(unit)
        self.ahead.remove(unit)
        self._each(unit, FlatBucket.wait_unshard)
        self.prefetch(following)

    def enter_backward(self, unit: int) -> None:
        """Backward has left the unit above, if it was in one."""
        self.leave_backward()
        self.enter(unit, unit - 1 if unit > self.lowest else -1)
        self.entered = unit

    def leave_backward(self) -> None:
        """Reshards frozen parameters of the last unit in backward."""
        for bucket in self.buckets[self.entered] if self.entered is not None else ():
            if bucket.frozen:
                bucket.reshard()
        self.entered = None

    def _each(self, unit: int, action: Callable[[FlatBucket], None]) -> None:
        for bucket in self.buckets[unit]:
            action(bucket)

    def _before(self, unit: int) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        return lambda module, inputs: self.enter(unit, unit + 1)

    def _after(self, unit: int) -> Callable[[nn.Module, tuple[Any, ...], Any], Any]:
        def after(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
            self._each(unit, FlatBucket.reshard)
            single = isinstance(output, Tensor)
            entered = _OnBackward.apply(lambda: self.enter_backward(unit), *([output] if single else output))
            return entered[0] if single else type(output)(*entered)

        return after


class _OnBackward(torch.autograd.Function):
    """The identity of tensors; calls back when their gradients have arrived."""

    @staticmethod
    def forward(ctx: Any, callback: Callable[[], None], *given: Tensor) -> tuple[Tensor, ...]:
        ctx.callback = callback
        return tuple(x.view_as(x) for x in given)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.callback()
        return None, *gradients
