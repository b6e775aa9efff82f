"""The state of some parameters in flat buffers, in nested shards.

A bucket during a step (levels as in ``trainer.shared.parallel.shards``; a level of one rank costs nothing):

    before a unit computes    all-gather the parameter shard over level params
    gradients arrive          they are added into a flat buffer, in fp32 (fp64 in fp64 runs)
    all have arrived          reduce-scatter over params and grads, add to the gradient shard: after each micro-batch if gradients
                              are sharded, else once, after the last one
    last micro-batch          reduce-scatter over optimizer, all-reduce over replicas, overlapped with backward
    optimizer                 updates the master shard; all-gather over optimizer and grads into the parameter shard, overlapped
                              with the next forward

A share of the optimizer's states may be in host memory (``trainer.state.host``): the last elements of the bucket's optimizer shard.

The arrival of a bucket's last gradient starts its collectives, in the same order on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trainer.comm.collectives import Group, Pending
from trainer.shared.parallel.shards import Bucket, Factors
from trainer.state.buffers import CollectiveQueue, Pool, Steps
from trainer.state.host import HostMemory, HostNeeds, HostStates
from trainer.state.parameters import ModelParameter, OptimizerShard, initial_part


@dataclass(frozen=True)
class Precision:
    """The dtypes of a run: of computation, of gradients and master weights, and of the optimizer's moments."""

    compute: torch.dtype
    master: torch.dtype
    moments: torch.dtype

    @property
    def all(self) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
        """Returns the types in the order of the fields."""
        return self.compute, self.master, self.moments

    @property
    def products(self) -> torch.dtype:
        """Returns the type of the products of an optimizer: fp16 has too small a range for them."""
        return self.master if self.compute == self.master else torch.bfloat16

    @classmethod
    def of(cls, name: str, trains: bool = True, moments: str = "fp32") -> Precision:
        """Returns the types of a precision. Frozen weights have no separate master copy."""
        wide = torch.float64 if name == "fp64" else torch.float32
        compute = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}.get(name, wide)
        return cls(compute, wide if trains else compute, torch.bfloat16 if moments == "bf16" else wide)


@dataclass(frozen=True)
class BucketSettings:
    """Shared settings of buckets whose parameters are replicated over the same ranks. ``data_index``: this rank among them."""

    factors: Factors
    data_index: int
    levels: dict[str, Group]  # by name: params, grads, optimizer, replicas
    precision: Precision
    pool: Pool
    queue: CollectiveQueue
    trains: bool = True  # else there are weights alone: no gradients, no moments
    one_moment: Collection[str] = ()  # groups of parameters whose squared gradients are not averaged
    host: HostMemory | None = None  # which has a share of the states
    averages: bool = False  # weights have an average beside them

    def frozen(self) -> BucketSettings:
        """Returns settings of frozen parameters: only their own sharding applies, in the type of computation."""
        params, compute = self.factors.params, self.precision.compute
        return replace(
            self, factors=Factors(params, params, params, self.factors.data), precision=Precision(compute, compute, compute), trains=False
        )


class FlatBucket:
    """The state of some parameters in flat buffers of ``numel`` elements, of which this rank keeps three nested ranges."""

    def __init__(self, plan: Bucket, parameters: dict[str, ModelParameter], settings: BucketSettings, complete: Callable[[], None]):
        """``complete`` adds gradients that have arrived and are not yet in their buffer."""
        self.plan, self.numel, self.levels, self.precision = plan, plan.numel, settings.levels, settings.precision
        self.pool, self.queue = settings.pool, settings.queue
        self.complete = complete
        self.parameters = [parameters[slot.name] for slot in plan.slots]
        for parameter, slot in zip(self.parameters, plan.slots):
            parameter.place = slice(slot.start, slot.stop)
        self.ranges = {s: settings.factors.shard(s, settings.data_index, plan.numel) for s in ("params", "grads", "optimizer")}
        self._make_parameters(sharded=settings.factors.params > 1)
        self.frozen = not any(parameter.record.trainable for parameter in self.parameters)
        self.keeps = settings.data_index < settings.factors.optimizer  # first of the replicas that hold the same elements
        self.sharded_grads = settings.factors.grads > 1
        self.trains, self.one_moment = settings.trains, settings.one_moment
        self.accumulated = self._zeros("grads", self.precision.master) if self.trains else self.shard.new_zeros(0)
        self.partial = None if self.sharded_grads else self.accumulated  # the buffer that gradients are added to, while there is one
        self.without_squares = _without_squares(plan, parameters, settings)
        self._make_optimizer(settings)

    def _make_parameters(self, sharded: bool) -> None:
        self.shard = self._zeros("params", self.precision.compute)
        self.whole = None if sharded else self.shard
        self.unshards = 0
        self.users = 1  # units that compute with it, each of which unshards it for its backward
        self.gathering: Pending | None = None
        self.publishing: Steps | None = None
        if self.whole is not None:
            self._point_parameters(self.whole)

    def _make_optimizer(self, settings: BucketSettings) -> None:
        """Master weights (the parameters themselves if the dtype is the same), moments, and the reduced gradient. Squared gradients lie
        one after the other, without the parameters that have none."""
        aliased = self.precision.compute == self.precision.master
        owned = self.ranges["optimizer"]
        kept = len(owned) - _hosted(self.plan, settings)
        self.here, self.there = owned[:kept], owned[kept:]
        own = _within(self.here, self.ranges["params"])
        self.weight = self.shard[own] if aliased else torch.zeros(kept, dtype=self.precision.master, device=self.pool.device)
        moments = self.weight if self.trains else self.weight[:0]
        self.exp_avg = torch.zeros_like(moments, dtype=self.precision.moments)
        self.exp_avg_sq = self.exp_avg.new_zeros(len(moments) - (self.without_squares if self.trains else 0))
        self.average = torch.zeros_like(moments if settings.averages else moments[:0])
        self.gradient = self.accumulated[_within(owned, self.ranges["grads"])]
        self.host: HostStates | None = None
        if settings.host is not None and self.there:
            late = {p.record.name for p in self.parameters if p.record.late}
            pieces = [slice(p.position, p.position + p.numel) for p in self.plan.pieces(self.there) if p.name in late]
            self.host = HostStates(settings.host, len(self.there), self.precision.all, pieces, settings.averages)

    def _zeros(self, state: str, dtype: torch.dtype) -> Tensor:
        return torch.zeros(len(self.ranges[state]), dtype=dtype, device=self.pool.device)

    # parameters

    def initialize(self, seed: int) -> None:
        """Initial weights of the optimizer's shard, each drawn by the rank that keeps it; ``publish_update`` hands them on."""
        for shard in self.optimizer_shards():
            shard.weight.copy_(initial_part(shard.record, seed, shard.offset, shard.offset + shard.numel))

    def unshard(self) -> None:
        """Starts to all-gather the parameters if they are sharded. They stay gathered until ``reshard`` was called as often."""
        if self.whole is self.shard:
            return
        self.unshards += 1
        if self.whole is None:
            self._wait_published()
            self.whole = self.pool.take("weights", self.numel, self.precision.compute)
            self.gathering = self.levels["params"].all_gather(self.whole, self.shard)
            self._point_parameters(self.whole)

    def wait_unshard(self) -> None:
        self._wait_published()
        self._wait_gathered()

    def reshard(self) -> None:
        """Frees the gathered parameters when their last user is done."""
        if self.whole is None or self.whole is self.shard:
            return
        self.unshards -= 1
        if self.unshards == 0:
            self._wait_gathered()
            empty = self.shard.new_empty(0)
            for parameter in self.parameters:
                parameter.tensor.data = empty
            self.pool.give("weights", self.whole)
            self.whole = None

    def _wait_published(self) -> None:
        if self.publishing is not None:
            self.queue.complete(self.publishing)
            self.publishing = None

    def _wait_gathered(self) -> None:
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None

    def _point_parameters(self, whole: Tensor) -> None:
        for parameter in self.parameters:
            parameter.tensor.data = parameter.view(whole)

    # gradients

    def begin(self, micro_batches: int) -> None:
        """Begins a step: no gradient has arrived."""
        self.flushes_left = micro_batches if self.sharded_grads else 1
        self.per_flush = 1 if self.sharded_grads else micro_batches
        self.flushes = 0
        self.fresh = True  # nothing has been added to the gradient shard
        for parameter in self.parameters:
            parameter.arrived, parameter.fresh = 0, True
        self.missing = len(self.parameters)

    def buffer(self, parameter: ModelParameter) -> tuple[Tensor, bool]:
        """Returns the buffer for a gradient of ``parameter``, and whether the gradient overwrites it."""
        if self.partial is None:
            self.partial = self.pool.take("gradients", self.numel, self.precision.master)
            for other in self.parameters:
                other.fresh = True
        if parameter.last is None or parameter.last[0] is not self.partial:
            parameter.last = self.partial, parameter.view(self.partial)
        fresh, parameter.fresh = parameter.fresh, False
        return parameter.last[1], fresh

    def arrive(self, parameter: ModelParameter) -> None:
        """Counts one gradient of ``parameter``; starts the reduction after the last one."""
        parameter.arrived += 1
        if parameter.arrived == self._due(parameter):
            self.missing -= 1
        if self.missing == 0 and self.flushes_left:
            self.flushes += 1
            self.flushes_left -= 1
            self.missing = len(self.late())
            self.complete()
            for _ in range(self.users):
                self.reshard()
            self.queue.start(self._reduction(last=self.flushes_left == 0))

    def late(self) -> list[ModelParameter]:
        return [parameter for parameter in self.parameters if parameter.arrived < self._due(parameter)]

    def _due(self, parameter: ModelParameter) -> int:
        return (self.flushes + 1) * self.per_flush * len(parameter.units)

    def _reduction(self, last: bool) -> Steps:
        if self.sharded_grads:
            assert self.partial is not None
            piece, whole = self.partial, self.partial
            self.partial = None
            for parameter in self.parameters:
                if parameter.fresh:  # its gradient arrived early, with those of the previous micro-batch
                    parameter.view(whole).zero_()
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
                reducing = optimizer.reduce_scatter(self.gradient, self.accumulated)
                if replicas.size == 1:
                    self._send_down(reducing)
                yield reducing, replicas.size > 1
            if replicas.size > 1:
                reducing = replicas.all_reduce(self.gradient)
                self._send_down(reducing)
                yield reducing, False
            if optimizer.size == replicas.size == 1:
                self._send_down()

    def _send_down(self, reducing: Pending | None = None) -> None:
        if self.host is not None:
            self.host.receive(self._hosted_gradient, None if reducing is None else reducing.work)

    def send_late(self) -> None:
        """Sends the gradients down that have been summed over axes of the layout."""
        if self.host is not None:
            self.host.receive(self._hosted_gradient, late=True)

    @property
    def _hosted_gradient(self) -> Tensor:
        return self.gradient[len(self.here) :]

    # optimizer

    def publish_update(self) -> None:
        """Starts to copy the updated master weights into the parameter shard; ``unshard`` and ``wait_unshard`` wait for it."""
        self.publishing = self._publication()
        self.queue.start(self.publishing)

    def _publication(self) -> Steps:
        """Weights come up from the host, and are all-gathered over the levels optimizer and grads: when a unit needs them, for earlier the
        host has not updated them."""
        own, grads = (_within(self.ranges[state], self.ranges["params"]) for state in ("optimizer", "grads"))
        if self.weight.dtype != self.shard.dtype:
            self.shard[_within(self.here, self.ranges["params"])].copy_(self.weight)
        if self.host is not None:
            yield self.host.publish(self.shard[_within(self.there, self.ranges["params"])]), False
        gathers = [(self.levels["optimizer"], self.shard[grads], self.shard[own]), (self.levels["grads"], self.shard, self.shard[grads])]
        gathers = [gather for gather in gathers if gather[0].size > 1]
        for i, (level, output, piece) in enumerate(gathers):
            yield level.all_gather(output, piece), i + 1 < len(gathers)

    def optimizer_shards(self) -> list[OptimizerShard]:
        """Returns the pieces of parameters whose optimizer state this rank has: those of the device, then those of the host."""
        records = {parameter.record.name: parameter.record for parameter in self.parameters}
        reduced = {p.name: self.gradient[p.position : p.position + p.numel] for p in self.plan.pieces(self.ranges["optimizer"])}
        pieces, before = [], 0  # elements without squares
        for piece in self.plan.pieces(self.here):
            record, part = records[piece.name], slice(piece.position, piece.position + piece.numel)
            weight, exp_avg, gradient = (state[part] for state in (self.weight, self.exp_avg, self.gradient))
            first, squared = piece.position - before, record.group not in self.one_moment
            exp_avg_sq = self.exp_avg_sq[first : first + squared * piece.numel]
            before += 0 if squared else piece.numel
            saves = self.keeps and record.primary
            own = OptimizerShard(record, piece.offset, piece.numel, weight, exp_avg, exp_avg_sq, gradient, saves)
            pieces.append(replace(own, reduced=reduced.pop(piece.name), average=self.average[part]))
        for piece in self.plan.pieces(self.there):
            assert self.host is not None
            record, part = records[piece.name], slice(piece.position, piece.position + piece.numel)
            host = self.host
            weight, exp_avg, exp_avg_sq, gradient = (x[part] for x in (host.weight, host.exp_avg, host.exp_avg_sq, host.gradient))
            sums = reduced.pop(piece.name, self.gradient[:0])
            saves = self.keeps and record.primary
            own = OptimizerShard(record, piece.offset, piece.numel, weight, exp_avg, exp_avg_sq, gradient, saves, host, sums)
            pieces.append(replace(own, average=host.average[part]))
        return pieces

    @staticmethod
    def planned_bytes(plan: Bucket, parameters: Mapping[str, ModelParameter], settings: BucketSettings) -> int:
        """The sum of ``nbytes``, before anything is allocated."""
        factors, compute, master = settings.factors, settings.precision.compute.itemsize, settings.precision.master.itemsize
        if not settings.trains:
            return plan.numel // factors.params * compute
        moment = settings.precision.moments.itemsize
        states = 2 * moment + (0 if settings.precision.compute == settings.precision.master else master) + settings.averages * master
        whole = plan.numel // factors.params * compute + plan.numel // factors.grads * master
        here = plan.numel // factors.optimizer - _hosted(plan, settings)
        return whole + here * states - moment * _without_squares(plan, parameters, settings)

    @staticmethod
    def planned_host(plan: Bucket, settings: BucketSettings) -> HostNeeds:
        """Returns the bytes in host memory and in a file, likewise."""
        hosted = _hosted(plan, settings)
        return HostNeeds(0, 0) if settings.host is None else settings.host.needs(hosted, *settings.precision.all, settings.averages)

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes of the buffers this rank keeps, by part."""
        master = 0 if self.weight.dtype == self.shard.dtype else self.weight.nbytes
        return {
            "weights": self.shard.nbytes,
            "gradients": self.accumulated.nbytes,
            "optimizer": master + self.exp_avg.nbytes + self.exp_avg_sq.nbytes + self.average.nbytes,
        }


def _hosted(plan: Bucket, settings: BucketSettings) -> int:
    """Returns how many elements of a rank's shard of the optimizer's states are in host memory."""
    if settings.host is None or not settings.trains:
        return 0
    return settings.host.elements(plan.numel // settings.factors.optimizer)


def _without_squares(plan: Bucket, parameters: Mapping[str, ModelParameter], settings: BucketSettings) -> int:
    """Returns how many elements of this rank's shard of the optimizer's states belong to groups of one moment."""
    owned = settings.factors.shard("optimizer", settings.data_index, plan.numel)
    return sum(piece.numel for piece in plan.pieces(owned) if parameters[piece.name].record.group in settings.one_moment)


def _within(inner: range, outer: range) -> slice:
    return slice(inner.start - outer.start, inner.stop - outer.start)
