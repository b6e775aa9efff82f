"""The training state of a rank: all its buckets. Receives all gradients (``trainer.tensor.layers.Gradients``)."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial

import torch
from torch import Tensor, nn

from trainer.shared.parallel.shards import Bucket, plan_buckets
from trainer.state.bucket import Common, FlatBucket, ParameterSlot
from trainer.state.parameters import Member, Owned


@lru_cache
def sums_wide(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this device adds a product of ``dtype`` to a sum in fp32 by itself: no rounding, and a third of the traffic."""
    if device.type != "cuda":
        return False
    try:
        ones = torch.ones(16, 16, dtype=dtype, device=device)
        return bool((torch.addmm(ones.float(), ones, ones, out_dtype=torch.float32) == 17).all())
    except (RuntimeError, TypeError):
        return False


def _add_product(view: Tensor, fresh: bool, left: Tensor, right: Tensor) -> None:
    """Add ``left^T right`` to ``view``, or overwrite it if it is ``fresh``."""
    if view.dtype != left.dtype and sums_wide(left.device, left.dtype):
        sums = torch.mm if fresh else partial(torch.addmm, view)
        sums(left.t(), right, out_dtype=view.dtype, out=view)
    elif view.dtype != left.dtype:
        product = left.t() @ right
        view.copy_(product) if fresh else view.add_(product)
    elif fresh:
        torch.mm(left.t(), right, out=view)
    else:
        view.addmm_(left.t(), right)


SMALL = 1 << 16
"""Elements of a gradient that waits for others, to be added together with them: those of biases and norms, whose launch takes longer."""


class Waiting:
    """Small gradients that have arrived and are still to be added, all in a few launches."""

    def __init__(self) -> None:
        self.parts: dict[ParameterSlot, tuple[Tensor, bool, Tensor]] = {}  # where to, whether they overwrite it, and the gradient

    def add(self) -> None:
        """Add all that wait."""
        for first in (True, False):
            parts = [(view, gradient) for view, fresh, gradient in self.parts.values() if fresh is first]
            for dtype in {gradient.dtype for _, gradient in parts}:
                views = [view for view, gradient in parts if gradient.dtype == dtype]
                gradients = [gradient for _, gradient in parts if gradient.dtype == dtype]
                if first:
                    torch._foreach_copy_(views, gradients)
                else:
                    torch._foreach_add_(views, _as(views, gradients))
        self.parts.clear()


def _as(views: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
    """``gradients`` in the type of ``views``: sums of two types are added one by one."""
    if views[0].dtype == gradients[0].dtype:
        return gradients
    flat = views[0].new_empty(sum(view.numel() for view in views))
    wide = [part.view(view.shape) for part, view in zip(flat.split([view.numel() for view in views]), views)]
    torch._foreach_copy_(wide, gradients)
    return wide


Deferred = list[tuple[Callable[[], None], list[object]]]
"""Weight-gradient work that a schedule defers, with the trackers of the tensors that it keeps alive."""


class ShardedState:
    """All buckets of a rank, in backward order."""

    def __init__(self, common: Common, bucket_bytes: int):
        self.common = common
        self.capacity = max(1, bucket_bytes // common.precision.master.itemsize)  # approximate elements of a bucket
        self.plans: list[tuple[Bucket, dict[str, Member], Common]] = []
        self.buckets: list[FlatBucket] = []
        self.units: dict[str, list[FlatBucket]] = defaultdict(list)
        self.slots: dict[nn.Parameter, tuple[FlatBucket, ParameterSlot]] = {}
        self.waiting = Waiting()
        self.deferred: Deferred | None = None
        self.arriving: Callable[[str, Tensor], object] | None = None  # called with (name, sum so far) for each gradient
        self.counted: Callable[[Tensor], object] | None = None  # tracks the bytes of a tensor that deferred work keeps alive

    def add_model_part(self, members: list[Member]) -> None:
        """Plan the state of one chunk's parameters, in the order of registration. Call it for the last chunk first."""
        self._plan([m for m in members if m.record.trainable], self.common)
        self._plan([m for m in members if not m.record.trainable], self.common.frozen())

    def _plan(self, members: list[Member], common: Common) -> None:
        runs: list[list[Member]] = []
        for member in reversed(members):
            if not runs or (self.common.factors.params > 1 and runs[-1][-1].units[0] != member.units[0]):
                runs.append([])
            runs[-1].append(member)
        for run in runs:
            by_name = {m.record.name: m for m in run}
            alone = [m.record.name for m in run if m.record.partial("tied")]
            sizes = [(m.record.name, m.record.local_numel) for m in run]
            for plan in plan_buckets(sizes, self.capacity, common.factors.optimizer, alone):
                self.plans.append((plan, by_name, common))

    @property
    def trained(self) -> list[FlatBucket]:
        """The buckets that have gradients."""
        return [bucket for bucket in self.buckets if bucket.trains]

    @property
    def planned_bytes(self) -> int:
        """Bytes of all buckets that ``make`` will allocate."""
        return sum(FlatBucket.planned_bytes(plan, common) for plan, _, common in self.plans)

    def make(self) -> None:
        """Allocate what was planned."""
        for plan, members, common in self.plans:
            self._add(FlatBucket(plan, members, common, self.waiting.add), members)

    def _add(self, bucket: FlatBucket, members: dict[str, Member]) -> None:
        self.buckets.append(bucket)
        for slot in bucket.slots:
            for unit in members[slot.record.name].units:
                if bucket not in self.units[unit]:
                    self.units[unit].append(bucket)
            self.slots[slot.parameter] = (bucket, slot)
            if slot.record.trainable:
                slot.parameter.register_post_accumulate_grad_hook(self._collect)
        bucket.users = sum(bucket in buckets for buckets in self.units.values())

    # gradients

    def later(self, work: Callable[[], None], *needs: Tensor) -> None:
        if self.deferred is None:
            work()
        else:
            self.deferred.append((work, [self.counts(tensor) for tensor in needs]))

    @property
    def defers(self) -> bool:
        return self.deferred is not None

    def counts(self, tensor: Tensor) -> object:
        return self.counted(tensor) if self.counted else None

    def _collect(self, parameter: Tensor) -> None:
        """Take a gradient that autograd computed. The hook also runs, without a gradient, for those that bypass autograd."""
        assert isinstance(parameter, nn.Parameter)
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None:
            self.add(parameter, gradient)

    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        bucket, slot, view, fresh = self._place(parameter)
        self.waiting.parts[slot] = view, fresh, gradient
        if gradient.numel() > SMALL or self.arriving is not None:
            self.waiting.add()
        self._arrived(bucket, slot, view)

    def _place(self, parameter: nn.Parameter) -> tuple[FlatBucket, ParameterSlot, Tensor, bool]:
        """Where a gradient goes, and whether it overwrites what is there."""
        bucket, slot = self.slots[parameter]
        if slot in self.waiting.parts:
            self.waiting.add()
        return bucket, slot, *bucket.buffer(slot)

    def add_product(self, parameter: nn.Parameter, left: Tensor, right: Tensor) -> None:
        self.add_products(parameter, [(left, right)])

    def add_products(self, parameter: nn.Parameter, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        bucket, slot = self.slots[parameter]
        for left, right in pairs:
            _, _, view, fresh = self._place(parameter)
            _add_product(view.view(-1, right.shape[-1]), fresh, left, right)
        self._arrived(bucket, slot, view)

    def add_rows(self, parameter: nn.Parameter, rows: Tensor, gradient: Tensor) -> None:
        bucket, slot, view, fresh = self._place(parameter)
        if fresh:
            view.zero_()
        view.index_add_(0, rows, gradient.to(view.dtype))
        self._arrived(bucket, slot, view)

    def _arrived(self, bucket: FlatBucket, slot: ParameterSlot, gradient: Tensor) -> None:
        if self.arriving is not None:
            self.arriving(slot.record.name, gradient)
        bucket.arrive(slot)

    @contextlib.contextmanager
    def deferring(self) -> Iterator[Deferred]:
        """Inside, weight-gradient work is appended to the list instead of being run."""
        work: Deferred = []
        self.deferred = work
        try:
            yield work
        finally:
            self.deferred = None

    # a step

    def begin(self, micro_batches: int) -> None:
        for bucket in self.trained:
            bucket.begin(micro_batches)

    def finish(self) -> None:
        """Wait until every gradient shard is the sum over the data axis. ``RuntimeError`` if some gradient never came."""
        for bucket in self.trained:
            if bucket.flushes_left:
                late = next(slot.record.name for slot in bucket.slots if slot.arrived < bucket._due(slot))
                raise RuntimeError(f"no gradient arrived for {late}")
        self.settle()

    def publish_updates(self) -> None:
        """Start to publish updated weights, in the order in which the next forward needs them."""
        for bucket in reversed(self.buckets):
            if not bucket.frozen:
                bucket.publish_update()

    def settle(self) -> None:
        """Wait until no collective is active."""
        self.common.chain.finish()

    def owned(self) -> list[Owned]:
        return [piece for bucket in self.buckets for piece in bucket.owned()]

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes of all buffers, by part, including those of the pool."""
        total = {"weights": 0, "gradients": 0, "optimizer": 0} | self.common.pool.nbytes
        for bucket in self.buckets:
            for part, n in bucket.nbytes.items():
                total[part] += n
        return total
