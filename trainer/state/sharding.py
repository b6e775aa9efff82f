"""The training state of a rank: all its buckets. Receives all gradients (``trainer.tensor.layers.Gradients``)."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial

import torch
from torch import Tensor, nn

from trainer.shared.parallel.placement import Replicate
from trainer.shared.parallel.shards import Bucket, plan_buckets
from trainer.state.bucket import BucketSettings, FlatBucket
from trainer.state.host import HostNeeds
from trainer.state.parameters import ModelParameter, OptimizerShard


@lru_cache
def sums_wide(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether this device adds a product of ``dtype`` to a sum in fp32 natively: no rounding, and a third of the traffic."""
    if device.type != "cuda":
        return False
    try:
        ones = torch.ones(16, 16, dtype=dtype, device=device)
        return bool((torch.addmm(ones.float(), ones, ones, out_dtype=torch.float32) == 17).all())
    except (RuntimeError, TypeError):
        return False


def _add_product(view: Tensor, fresh: bool, left: Tensor, right: Tensor) -> None:
    """Adds ``left^T right`` to ``view``, or overwrites it if it is ``fresh``."""
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


class PendingGradients:
    """Small gradients that have arrived and are still to be added, all in a few launches."""

    def __init__(self) -> None:
        self.parts: dict[ModelParameter, tuple[Tensor, bool, Tensor]] = {}  # where to, whether they overwrite it, and the gradient

    def add(self) -> None:
        """Adds all pending products."""
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

    def __init__(self, settings: Mapping[str, BucketSettings], bucket_bytes: int):
        """``settings`` by the axis over which parameters are replicated: its ranks share their states."""
        self.settings, (first, *_) = settings, settings.values()
        self.pool, self.queue = first.pool, first.queue
        self.capacity = max(1, bucket_bytes // first.precision.master.itemsize)  # approximate elements of a bucket
        self.beside = 0  # bytes of optimizer states that are in no bucket
        self.plans: list[tuple[Bucket, dict[str, ModelParameter], BucketSettings]] = []
        self.buckets: list[FlatBucket] = []
        self.units: dict[str, list[FlatBucket]] = defaultdict(list)
        self.places: dict[nn.Parameter, tuple[FlatBucket, ModelParameter]] = {}
        self.pending = PendingGradients()
        self.deferred: Deferred | None = None
        self.arriving: Callable[[str, Tensor], object] | None = None  # called with (name, sum so far) for each gradient
        self.counted: Callable[[Tensor], object] | None = None  # tracks the bytes of a tensor that deferred work keeps alive

    def add_model_part(self, parameters: Iterable[ModelParameter]) -> None:
        """Plans the state of one chunk's parameters, in the order of registration. Call it for the last chunk first."""
        for axis, settings in self.settings.items():
            alike = [p for p in parameters if p.record.placement.get(axis) == Replicate()]
            self._plan([p for p in alike if p.record.trainable], settings)
            self._plan([p for p in alike if not p.record.trainable], settings.frozen())

    def _plan(self, parameters: list[ModelParameter], settings: BucketSettings) -> None:
        runs: list[list[ModelParameter]] = []
        for parameter in reversed(parameters):
            if not runs or (settings.factors.params > 1 and runs[-1][-1].units[0] != parameter.units[0]):
                runs.append([])
            runs[-1].append(parameter)
        for run in runs:
            by_name = {p.record.name: p for p in run}
            alone = [p.record.name for p in run if p.record.partial("tied")]
            sizes = [(p.record.name, p.record.local_numel) for p in run]
            for plan in plan_buckets(sizes, self.capacity, settings.factors.optimizer, alone):
                self.plans.append((plan, by_name, settings))

    @property
    def trained(self) -> list[FlatBucket]:
        return [bucket for bucket in self.buckets if bucket.trains]

    @property
    def planned_bytes(self) -> int:
        return sum(FlatBucket.planned_bytes(*plan) for plan in self.plans)

    @property
    def planned_host(self) -> HostNeeds:
        needs = [FlatBucket.planned_host(plan, settings) for plan, _, settings in self.plans]
        return HostNeeds(sum(each.memory for each in needs), sum(each.file for each in needs))

    def make(self) -> None:
        for plan, parameters, settings in self.plans:
            self._add(FlatBucket(plan, parameters, settings, self.pending.add))

    def _add(self, bucket: FlatBucket) -> None:
        self.buckets.append(bucket)
        for parameter in bucket.parameters:
            for unit in parameter.units:
                if bucket not in self.units[unit]:
                    self.units[unit].append(bucket)
            self.places[parameter.tensor] = (bucket, parameter)
            if parameter.record.trainable:
                parameter.tensor.register_post_accumulate_grad_hook(self._collect)
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
        """Takes a gradient that autograd computed. The hook also runs, without a gradient, for those that bypass autograd."""
        assert isinstance(parameter, nn.Parameter)
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None:
            self.add(parameter, gradient)

    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        bucket, known, view, fresh = self._place(parameter)
        self.pending.parts[known] = view, fresh, gradient
        if gradient.numel() > SMALL or self.arriving is not None:
            self.pending.add()
        self._arrived(bucket, known, view)

    def _place(self, parameter: nn.Parameter) -> tuple[FlatBucket, ModelParameter, Tensor, bool]:
        """Returns the target of a gradient, and whether it overwrites."""
        bucket, known = self.places[parameter]
        if known in self.pending.parts:
            self.pending.add()
        return bucket, known, *bucket.buffer(known)

    def add_product(self, parameter: nn.Parameter, left: Tensor, right: Tensor) -> None:
        self.add_products(parameter, [(left, right)])

    def add_products(self, parameter: nn.Parameter, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        for left, right in pairs:
            bucket, known, view, fresh = self._place(parameter)
            _add_product(view.view(-1, right.shape[-1]), fresh, left, right)
        self._arrived(bucket, known, view)

    def add_grouped(self, parameter: nn.Parameter, left: Tensor, right: Tensor, sizes: Sequence[int]) -> None:
        bucket, known, view, fresh = self._place(parameter)
        parts = (tensor.split(list(sizes)) for tensor in (left, right))
        for matrix, outputs, inputs in zip(view.flatten(1, -2), *parts):
            if len(inputs):
                _add_product(matrix, fresh, outputs, inputs)
            elif fresh:
                matrix.zero_()
        self._arrived(bucket, known, view)

    def add_rows(self, parameter: nn.Parameter, rows: Tensor, gradient: Tensor) -> None:
        bucket, known, view, fresh = self._place(parameter)
        if fresh:
            view.zero_()
        view.index_add_(0, rows, gradient.to(view.dtype))
        self._arrived(bucket, known, view)

    def _arrived(self, bucket: FlatBucket, parameter: ModelParameter, gradient: Tensor) -> None:
        if self.arriving is not None:
            self.arriving(parameter.record.name, gradient)
        bucket.arrive(parameter)

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
        """Waits until every gradient shard is the sum over the data axis. ``RuntimeError`` if some gradient never came."""
        for bucket in self.trained:
            if bucket.flushes_left:
                raise RuntimeError(f"no gradient arrived for {bucket.late()[0].record.name}")
        self.settle()

    def send_late(self) -> None:
        """Sends down what gradients lacked until now, of states in host memory."""
        for bucket in self.trained:
            bucket.send_late()

    def publish_updates(self) -> None:
        """Starts to publish updated weights, in the order in which the next forward needs them."""
        for bucket in reversed(self.buckets):
            if not bucket.frozen:
                bucket.publish_update()

    def settle(self) -> None:
        self.queue.finish()

    def optimizer_shards(self) -> list[OptimizerShard]:
        return [shard for bucket in self.buckets for shard in bucket.optimizer_shards()]

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes of all buffers, by part, including those of the pool."""
        total = {"weights": 0, "gradients": 0, "optimizer": self.beside} | self.pool.nbytes
        for bucket in self.buckets:
            for part, n in bucket.nbytes.items():
                total[part] += n
        return total
