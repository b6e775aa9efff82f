"""The training state of a rank: flat buckets of parameters, gradients and optimizer states, each sharded by its own factor.

Life of a bucket in a step (levels as in ``trainer.layout.shards``; a level of one rank costs nothing):

    before a unit computes    all-gather the parameter shard over level params
    gradients arrive          they are added into a flat buffer, in fp32 (fp64 in fp64 runs)
    all have arrived          reduce-scatter over params and grads, add to the gradient shard: after each micro-batch where
                              gradients are sharded, else once, after the last one
    last micro-batch          reduce-scatter over optimizer, all-reduce over replicas, while backward goes on
    optimizer                 updates the master shard; all-gather over optimizer and grads back into the parameter shard

All collectives of a bucket are started by the arrival of its last gradient, in the same order on every rank.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainer.layout import Bucket, Factors, plan_buckets
from trainer.parallel.collectives import Group, Pending
from trainer.parallel.parameters import Owned, initial_value
from trainer.parallel.plan import Member


@dataclass(frozen=True)
class Precision:
    """Types of a run: what is computed in, and what gradients, master weights and moments are kept in."""

    compute: torch.dtype
    master: torch.dtype

    @classmethod
    def of(cls, name: str) -> Precision:
        wide = torch.float64 if name == "fp64" else torch.float32
        return cls({"bf16": torch.bfloat16, "fp16": torch.float16}.get(name, wide), wide)


class Pool:
    """Flat buffers that are used again and again, by length and type: page faults cost more than the arithmetic."""

    def __init__(self, device: torch.device):
        self.device = device
        self.free: dict[tuple[str, int, torch.dtype], list[Tensor]] = defaultdict(list)
        self.nbytes: dict[str, int] = defaultdict(int)  # of all buffers ever made, by part

    def take(self, part: str, numel: int, dtype: torch.dtype) -> Tensor:
        """A buffer that starts zero and later holds what its last user left. ``part`` is weights or gradients."""
        waiting = self.free[part, numel, dtype]
        if waiting:
            return waiting.pop()
        self.nbytes[part] += numel * dtype.itemsize
        return torch.zeros(numel, dtype=dtype, device=self.device)

    def give(self, part: str, buffer: Tensor) -> None:
        self.free[part, buffer.numel(), buffer.dtype].append(buffer)


Steps = Iterator[tuple[Pending, bool]]
"""Collectives of one bucket, each started when the one before is complete; with each, whether another depends on it."""


class Chain:
    """Runs the collectives of many buckets, in the same order on every rank, and keeps as many in the air as it may."""

    def __init__(self) -> None:
        self.active: list[tuple[Steps, Pending, bool]] = []

    def start(self, steps: Steps) -> None:
        """Start the first collective of ``steps``; those of earlier buckets that others depend on are brought to the next."""
        self._advance(only_followed=True)
        self._next(steps, self.active)

    def finish(self) -> None:
        """Until nothing is in the air."""
        while self.active:
            self._advance(only_followed=False)

    def _advance(self, only_followed: bool) -> None:
        remaining: list[tuple[Steps, Pending, bool]] = []
        for steps, pending, followed in self.active:
            if only_followed and not followed:
                remaining.append((steps, pending, followed))
                continue
            pending.wait()
            self._next(steps, remaining)
        self.active = remaining

    @staticmethod
    def _next(steps: Steps, active: list[tuple[Steps, Pending, bool]]) -> None:
        for pending, followed in steps:
            active.append((steps, pending, followed))
            return


class Slot:
    """A parameter in its bucket, and how many of its gradients have arrived in this step."""

    def __init__(self, member: Member, start: int):
        self.record, self.parameter = member.record, member.parameter
        self.start, self.stop = start, start + member.record.local_numel
        self.arrived = 0
        self.fresh = True  # the next gradient replaces what is in the buffer

    def view(self, buffer: Tensor) -> Tensor:
        return buffer[self.start : self.stop].view(self.record.local_shape)


class FlatBucket:
    """The state of some parameters in flat buffers. ``numel`` elements, of which this rank keeps three nested ranges."""

    def __init__(
        self,
        plan: Bucket,
        members: dict[str, Member],
        factors: Factors,
        data_index: int,
        levels: dict[str, Group],
        precision: Precision,
        pool: Pool,
        chain: Chain,
    ):
        self.plan, self.numel, self.levels, self.precision, self.pool, self.chain = plan, plan.numel, levels, precision, pool, chain
        self.slots = [Slot(members[slot.name], slot.start) for slot in plan.slots]
        self.ranges = {state: factors.shard(state, data_index, plan.numel) for state in ("params", "grads", "optimizer")}
        self.sharded_grads = factors.grads > 1
        device = pool.device
        self.shard = torch.zeros(len(self.ranges["params"]), dtype=precision.compute, device=device)
        self.whole = self.shard if factors.params == 1 else None
        self.holds = 0
        self.users = 1  # units that compute with it, each of which holds it for its backward
        self.gathering: Pending | None = None
        self.accumulated = torch.zeros(len(self.ranges["grads"]), dtype=precision.master, device=device)
        self.partial = None if self.sharded_grads else self.accumulated
        own = _within(self.ranges["optimizer"], self.ranges["params"])
        self.weight = (
            self.shard[own]
            if precision.compute == precision.master
            else torch.zeros(len(self.ranges["optimizer"]), dtype=precision.master, device=device)
        )
        self.exp_avg, self.exp_avg_sq = torch.zeros_like(self.weight), torch.zeros_like(self.weight)
        self.gradient = self.accumulated[_within(self.ranges["optimizer"], self.ranges["grads"])]
        if self.whole is not None:
            self._point_parameters(self.whole)

    # parameters

    def initialize(self, seed: int) -> None:
        """Initial weights: into the shard and, exactly, into the master."""
        for slot in self.slots:
            value = initial_value(slot.record, seed).flatten()
            for state, target in (("params", self.shard), ("optimizer", self.weight)):
                owned = self.ranges[state]
                start, stop = max(slot.start, owned.start), min(slot.stop, owned.stop)
                if start < stop:
                    target[start - owned.start : stop - owned.start] = value[start - slot.start : stop - slot.start].to(target)

    def hold(self) -> None:
        """Start to make the parameters whole, if they are not; they stay so until as many releases."""
        if self.whole is self.shard:
            return
        self.holds += 1
        if self.whole is None:
            self.whole = self.pool.take("weights", self.numel, self.precision.compute)
            self._settle()
            self.gathering = self.levels["params"].all_gather(self.whole, self.shard)
            self._point_parameters(self.whole)

    def use(self) -> None:
        """Wait until the parameters can be computed with."""
        self._settle()

    def release(self) -> None:
        """Forget the whole parameters when nobody holds them."""
        if self.whole is None or self.whole is self.shard:
            return
        self.holds -= 1
        if self.holds == 0:
            self._settle()
            empty = self.shard.new_empty(0)
            for slot in self.slots:
                slot.parameter.data = empty
            self.pool.give("weights", self.whole)
            self.whole = None

    def _settle(self) -> None:
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None

    def _point_parameters(self, whole: Tensor) -> None:
        for slot in self.slots:
            slot.parameter.data = slot.view(whole)

    # gradients

    def begin(self, micro_batches: int) -> None:
        """A new step: nothing has arrived."""
        self.flushes_left = micro_batches if self.sharded_grads else 1
        self.per_flush = 1 if self.sharded_grads else micro_batches
        self.flushes = 0
        self.fresh = True  # nothing has been added to the gradient shard
        for slot in self.slots:
            slot.arrived, slot.fresh = 0, True
        self.missing = len(self.slots)

    def buffer(self, slot: Slot) -> tuple[Tensor, bool]:
        """Where a gradient of ``slot`` goes, and whether it is the first there."""
        if self.partial is None:
            self.partial = self.pool.take("gradients", self.numel, self.precision.master)
            for other in self.slots:
                other.fresh = True
        fresh, slot.fresh = slot.fresh, False
        return slot.view(self.partial), fresh

    def arrive(self, slot: Slot) -> None:
        """One gradient of ``slot`` has been added; reduce when it was the last one missing."""
        slot.arrived += 1
        if slot.arrived == self._due(slot):
            self.missing -= 1
        if self.missing == 0 and self.flushes_left:
            self.flushes += 1
            self.flushes_left -= 1
            self.missing = sum(slot.arrived < self._due(slot) for slot in self.slots)
            for _ in range(self.users):
                self.release()
            self.chain.start(self._reduction(last=self.flushes_left == 0))

    def _due(self, slot: Slot) -> int:
        return (self.flushes + 1) * self.per_flush * slot.record.uses

    def _reduction(self, last: bool) -> Steps:
        if self.sharded_grads:
            assert self.partial is not None
            piece, whole = self.partial, self.partial
            self.partial = None
            for slot in self.slots:
                if slot.fresh:  # its gradient of this micro-batch came early, with those of the one before
                    slot.view(whole).zero_()
            for level in (self.levels["params"], self.levels["grads"]):
                if level.size > 1:
                    target = piece.chunk(level.size)[level.index]
                    yield level.reduce_scatter(target, piece), True
                    piece = target
            if self.fresh:
                self.accumulated.copy_(piece)
            else:
                self.accumulated.add_(piece)
            self.fresh = False
            self.pool.give("gradients", whole)
        if last:
            optimizer, replicas = self.levels["optimizer"], self.levels["replicas"]
            if optimizer.size > 1:
                yield optimizer.reduce_scatter(self.gradient, self.accumulated), replicas.size > 1
            if replicas.size > 1:
                yield replicas.all_reduce(self.gradient), False

    # optimizer

    def restore(self) -> Steps:
        """Bring the updated master back into the parameter shard: up the levels optimizer and grads."""
        own, grads = (_within(self.ranges[state], self.ranges["params"]) for state in ("optimizer", "grads"))
        if self.weight.dtype != self.shard.dtype:
            self.shard[own].copy_(self.weight)
        climbs = [(self.levels["optimizer"], self.shard[grads], self.shard[own]), (self.levels["grads"], self.shard, self.shard[grads])]
        climbs = [climb for climb in climbs if climb[0].size > 1]
        for i, (level, output, piece) in enumerate(climbs):
            yield level.all_gather(output, piece), i + 1 < len(climbs)

    def owned(self) -> list[Owned]:
        """The pieces of parameters in this rank's optimizer shard."""
        records = {slot.record.name: slot.record for slot in self.slots}
        saves = self.levels["replicas"].index == 0
        pieces = []
        for piece in self.plan.pieces(self.ranges["optimizer"]):
            record, part = records[piece.name], slice(piece.position, piece.position + piece.numel)
            pieces.append(
                Owned(
                    record,
                    piece.offset,
                    piece.numel,
                    self.weight[part],
                    self.exp_avg[part],
                    self.exp_avg_sq[part],
                    self.gradient[part],
                    saves and record.primary,
                )
            )
        return pieces

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes of the buffers this rank keeps, by part."""
        master = 0 if self.weight.dtype == self.shard.dtype else self.weight.nbytes
        return {
            "weights": self.shard.nbytes,
            "gradients": self.accumulated.nbytes,
            "optimizer": master + self.exp_avg.nbytes + self.exp_avg_sq.nbytes,
        }


def _within(inner: range, outer: range) -> slice:
    return slice(inner.start - outer.start, inner.stop - outer.start)


class ShardedState:
    """All buckets of a rank, in backward order, and the sink of all gradients (``trainer.parallel.tensor.Gradients``)."""

    def __init__(
        self, factors: Factors, data_index: int, levels: dict[str, Group], precision: Precision, device: torch.device, bucket_bytes: int
    ):
        self.factors, self.data_index, self.levels, self.precision = factors, data_index, levels, precision
        self.pool, self.chain = Pool(device), Chain()
        self.capacity = max(1, bucket_bytes // precision.master.itemsize)
        self.buckets: list[FlatBucket] = []
        self.units: dict[str, list[FlatBucket]] = defaultdict(list)
        self.slots: dict[nn.Parameter, tuple[FlatBucket, Slot]] = {}
        self.deferred: list[Callable[[], None]] | None = None

    def add_stretch(self, members: list[Member]) -> None:
        """Make the state of one chunk's parameters, given in the order of registration. Call for later chunks first."""
        runs: list[list[Member]] = []
        for member in reversed(members):
            if not runs or (self.factors.params > 1 and runs[-1][-1].units[0] != member.units[0]):
                runs.append([])
            runs[-1].append(member)
        for run in runs:
            by_name = {m.record.name: m for m in run}
            alone = [m.record.name for m in run if "tied" in m.record.partial]
            sizes = [(m.record.name, m.record.local_numel) for m in run]
            for plan in plan_buckets(sizes, self.capacity, self.factors.optimizer, alone):
                self._add(plan, by_name)

    def _add(self, plan: Bucket, members: dict[str, Member]) -> None:
        bucket = FlatBucket(plan, members, self.factors, self.data_index, self.levels, self.precision, self.pool, self.chain)
        self.buckets.append(bucket)
        for slot in bucket.slots:
            for unit in members[slot.record.name].units:
                if bucket not in self.units[unit]:
                    self.units[unit].append(bucket)
            self.slots[slot.parameter] = (bucket, slot)
            slot.parameter.register_post_accumulate_grad_hook(self._collect)
        bucket.users = sum(bucket in buckets for buckets in self.units.values())

    # the sink of gradients

    def later(self, work: Callable[[], None]) -> None:
        if self.deferred is None:
            work()
        else:
            self.deferred.append(work)

    def _collect(self, parameter: Tensor) -> None:
        """Take a gradient that did travel through autograd; the hook is called without one for those that did not."""
        assert isinstance(parameter, nn.Parameter)
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None:
            self.add(parameter, gradient)

    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        bucket, slot = self.slots[parameter]
        view, fresh = bucket.buffer(slot)
        if fresh:
            view.copy_(gradient)
        else:
            view.add_(gradient)
        bucket.arrive(slot)

    def add_product(self, parameter: nn.Parameter, left: Tensor, right: Tensor) -> None:
        bucket, slot = self.slots[parameter]
        view, fresh = bucket.buffer(slot)
        view = view.view(-1, right.shape[-1])
        if view.dtype != left.dtype:
            product = left.t() @ right
            view.copy_(product) if fresh else view.add_(product)
        elif fresh:
            torch.mm(left.t(), right, out=view)
        else:
            view.addmm_(left.t(), right)
        bucket.arrive(slot)

    def add_rows(self, parameter: nn.Parameter, rows: Tensor, gradient: Tensor) -> None:
        bucket, slot = self.slots[parameter]
        view, fresh = bucket.buffer(slot)
        if fresh:
            view.zero_()
        view.index_add_(0, rows, gradient.to(view.dtype))
        bucket.arrive(slot)

    @contextlib.contextmanager
    def deferring(self) -> Iterator[list[Callable[[], None]]]:
        """Inside, work on weight gradients is put on the list instead of being done."""
        work: list[Callable[[], None]] = []
        self.deferred = work
        try:
            yield work
        finally:
            self.deferred = None

    # a step

    def begin(self, micro_batches: int) -> None:
        for bucket in self.buckets:
            bucket.begin(micro_batches)

    def finish(self) -> None:
        """Wait until every gradient shard is the sum over the data axis. ``RuntimeError`` if some gradient never came."""
        for bucket in self.buckets:
            if bucket.flushes_left:
                late = next(slot.record.name for slot in bucket.slots if slot.arrived < bucket._due(slot))
                raise RuntimeError(f"no gradient arrived for {late}")
        self.chain.finish()

    def restore(self) -> None:
        """Spread updated weights, the parameters that are needed first in the next forward first."""
        for bucket in reversed(self.buckets):
            self.chain.start(bucket.restore())
        self.chain.finish()

    def owned(self) -> list[Owned]:
        return [piece for bucket in self.buckets for piece in bucket.owned()]

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes of all buffers, by part, those of the pool included."""
        total = {"weights": 0, "gradients": 0, "optimizer": 0} | self.pool.nbytes
        for bucket in self.buckets:
            for part, n in bucket.nbytes.items():
                total[part] += n
        return total
