"""All communication between ranks: named groups that count calls and bytes, and whose errors name rank, group and collective.

A ``Group`` of one rank makes no call and counts nothing, so callers need no special case. Calls return a ``Pending``; after its
``wait`` the result is usable (on CUDA it orders streams and does not block the host). The time spent in ``wait`` is exposed
communication.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.comm.clock import Clock
from trainer.comm.watchdog import InFlightCollectives, Watchdog
from trainer.launch.failure import CommunicationError

# torch 2.13 renamed the flat collectives and warns about the old names
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

MAX = dist.ReduceOp.MAX
SUM = dist.ReduceOp.SUM


@dataclass
class Ledger:
    """Communicates for one rank: counts calls and bytes by (group, operation), and times waits.

    ``payload`` counts the full tensor of an all_gather or reduce_scatter (all shards), the tensor of an all_reduce, and the message of a
    send. ``wire`` is a ring algorithm's traffic for it.
    """

    clock: Clock
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    payload: Counter[tuple[str, str]] = field(default_factory=Counter)
    wire: Counter[tuple[str, str]] = field(default_factory=Counter)
    waits: list[tuple[Any, Any]] = field(default_factory=list)  # (start, end) marks of the clock in this step
    in_flight: InFlightCollectives | None = None  # what a watchdog looks at

    def count(self, group: Group, operation: str, nbytes: int) -> None:
        """Counts one call. A ring all_reduce of n bytes over g ranks sends 2 n (g-1)/g, all_gather and reduce_scatter half of it."""
        key = (group.name, operation)
        share = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0}.get(operation)
        self.calls[key] += 1
        self.payload[key] += nbytes
        self.wire[key] += nbytes if share is None else int(share * nbytes * (group.size - 1) / group.size)

    def copied(self, where: str, operation: str, nbytes: int) -> None:
        """Counts a copy between the device and ``where``."""
        key = (where, operation)
        self.calls[key] += 1
        self.payload[key] += nbytes
        self.wire[key] += nbytes

    def clear(self) -> None:
        self.calls.clear()
        self.payload.clear()
        self.wire.clear()


@dataclass
class Pending:
    """A collective that has been started. ``keep`` are tensors that must outlive it."""

    work: Any
    group: Group
    operation: str
    keep: tuple[Tensor, ...] = ()

    @property
    def over(self) -> bool:
        return self.work is None or self.work.is_completed()

    def wait(self) -> None:
        """Waits until the result is usable. ``CommunicationError`` if the collective failed."""
        if self.work is None:
            return
        clock = self.group.ledger.clock
        start = clock.mark()
        try:
            self.work.wait()
        except (RuntimeError, ValueError) as error:
            raise self.group.failed(self.operation, error) from error
        self.work, self.keep = None, ()
        if start is not None:
            self.group.ledger.waits.append((start, clock.mark()))


class _Works(list[Any]):
    """Several of torch's handles as one."""

    def wait(self) -> None:
        for work in self:
            work.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self)


class _OnceWaited:
    """A handle that is waited for once, by whichever thread is first. Gloo copies the result of a reduce-scatter at every wait
    (ProcessGroupGloo.cpp, ``reduce_scatter_tensor_coalesced``): a second one would undo later changes of it."""

    def __init__(self, work: Any):
        self.work, self.lock, self.waited = work, threading.Lock(), False

    def wait(self) -> None:
        with self.lock:
            if not self.waited:
                self.work.wait()
                self.waited = True

    def is_completed(self) -> bool:
        return self.waited or bool(self.work.is_completed())


def _once(work: Any, result: Tensor) -> Any:
    """Returns the handle, on a CPU one that is waited for once; on CUDA every stream has to wait."""
    return work if work is None or result.is_cuda else _OnceWaited(work)


@dataclass
class Group:
    """Ranks that communicate along one axis. ``handle`` is torch's process group, None for a single rank."""

    name: str
    ranks: tuple[int, ...]
    rank: int  # global rank of this process
    ledger: Ledger
    handle: Any = None

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def index(self) -> int:
        return self.ranks.index(self.rank)

    def all_reduce(self, tensor: Tensor, op: Any = SUM) -> Pending:
        return self._start("all_reduce", tensor, lambda: dist.all_reduce(tensor, op=op, group=self.handle, async_op=True), tensor)

    def all_gather(self, output: Tensor, shard: Tensor) -> Pending:
        """``output`` = the shards of all ranks in order, along dimension 0. ``shard`` may be a view of its own part of ``output``."""
        if self.size == 1:
            return self._alone(output, shard)
        return self._start("all_gather", output, lambda: _all_gather(output, shard, group=self.handle, async_op=True), output, shard)

    def reduce_scatter(self, shard: Tensor, tensor: Tensor) -> Pending:
        """``shard`` = this rank's piece, along dimension 0, of the sum of ``tensor`` over the group."""
        if self.size == 1:
            return self._alone(shard, tensor)
        call = lambda: _once(_reduce_scatter(shard, tensor, group=self.handle, async_op=True), shard)  # noqa: E731
        return self._start("reduce_scatter", tensor, call, shard, tensor)

    def all_to_all(self, output: Tensor, tensor: Tensor, come: list[int] | None = None, to: list[int] | None = None) -> Pending:
        """``output`` = the rows that each rank, in order, has for this one in its ``tensor``. ``to`` go to each rank, ``come`` from each;
        by default, equal parts. Counted are rows that leave the rank."""
        if self.size == 1:
            return self._alone(output, tensor)
        kept = len(tensor) // self.size if to is None else to[self.index]
        self.ledger.count(self, "all_to_all", (len(tensor) - kept) * tensor[:1].nbytes)
        call = lambda: dist.all_to_all_single(output, tensor, come, to, group=self.handle, async_op=True)  # noqa: E731
        return self._start("all_to_all", None, call, output, tensor)

    def computing(self, operation: str, nbytes: int, call: Callable[[], Any]) -> Any:
        """Returns the result of ``call``, which computes while it communicates ``nbytes``, in stream order; its waits are unknown."""
        self.ledger.count(self, operation, nbytes)
        with self._blocking(operation):
            result = call()
        if self.ledger.clock.on_device and self.ledger.in_flight is not None:
            self.ledger.in_flight.add(f"{operation} over {self.name}", self.ranks, self.ledger.clock.stamp().query)
        return result

    def share_memory(self, nbytes: int) -> str:
        """Reserves symmetric memory of all ranks (torch). Collective. Returns why that is impossible, else nothing."""
        from torch.distributed._symmetric_memory import get_symm_mem_workspace  # registers operations, which nobody else needs

        hosts = sorted(set(self.gather_objects(socket.gethostname())))
        if len(hosts) > 1:  # torch would wait for a peer on the same host
            return f"ranks {', '.join(map(str, self.ranks))} are on {len(hosts)} hosts"
        try:
            with self._blocking("share_memory"):
                get_symm_mem_workspace(self.handle.group_name, nbytes)
        except CommunicationError as error:
            return str(error)
        return ""

    def send(self, tensor: Tensor, peer: int) -> Pending:
        """Sends to the rank at position ``peer``. It may complete only after the peer has posted its receive."""
        return self._start("send", tensor, lambda: dist.isend(tensor, group=self.handle, group_dst=peer), tensor)

    def receive(self, tensor: Tensor, peer: int) -> Pending:
        """Receives into ``tensor`` from the rank at position ``peer``. Not counted here: the sender counts it."""
        return self._start("receive", None, lambda: dist.irecv(tensor, group=self.handle, group_src=peer), tensor)

    def pass_on(self, tensor: Tensor, into: Tensor) -> Pending:
        """Sends ``tensor`` to the next position of a ring, and receives ``into`` from the one before. All ranks must take part. Both go to
        NCCL at once, which would wait for one of two neighbours forever otherwise."""
        ways = ((dist.isend, tensor, 1), (dist.irecv, into, -1))

        def call() -> _Works:
            peers = [(way, own, (self.index + step) % self.size) for way, own, step in ways]
            return _Works(dist.batch_isend_irecv([dist.P2POp(way, own, group=self.handle, group_peer=peer) for way, own, peer in peers]))

        return self._start("send", tensor, call, tensor, into)

    def connect(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Sends one byte over each (sender, receiver) by position, in the order given, which is the same on every rank. Not counted.

        NCCL connects a pair at its first use and blocks the host until both sides are there. A receive posted before a send that the
        same peer waits for would block forever. Once connected, sends and receives are only queued.
        """
        byte = torch.zeros(1, dtype=torch.uint8, device=self.ledger.clock.device)
        with self._blocking("connect"):
            for sender, receiver in pairs:
                if self.index == sender:
                    dist.send(byte, group=self.handle, group_dst=receiver)
                elif self.index == receiver:
                    dist.recv(byte, group=self.handle, group_src=sender)

    def gather_objects(self, value: Any) -> list[Any]:
        """``value`` of every rank, on every rank. For small plain data, outside the step."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with self._blocking("gather_objects"):
            dist.all_gather_object(values, value, group=self.handle)
        return values

    def together(self, act: Callable[[], Any], errors: tuple[type[Exception], ...]) -> Any:
        """``act()`` on every rank; its own result on each. If some raise one of ``errors``, all raise the first."""
        result, failure = None, None
        try:
            result = act()
        except errors as error:
            failure = error
        failures = [f for f in self.gather_objects(failure) if f is not None]
        if failures:
            raise failures[0]
        return result

    def failed(self, operation: str, error: Exception) -> CommunicationError:
        """The error that names rank, collective and group."""
        collective = f"{operation} over {self.name}"
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return CommunicationError(f"rank {self.rank}: {collective} (ranks {', '.join(map(str, self.ranks))}) failed: {first}", collective)

    def _alone(self, output: Tensor, source: Tensor) -> Pending:
        if output.data_ptr() != source.data_ptr():
            output.copy_(source)
        return Pending(None, self, "copy")

    def _start(self, operation: str, counted: Tensor | None, call: Callable[[], Any], *keep: Tensor) -> Pending:
        if self.size == 1:
            return Pending(None, self, operation)
        if counted is not None:
            self.ledger.count(self, operation, counted.numel() * counted.element_size())
        try:
            work = call()
        except (RuntimeError, ValueError) as error:
            raise self.failed(operation, error) from error
        pending = Pending(work, self, operation, keep)
        if self.ledger.in_flight is not None:
            self.ledger.in_flight.add(f"{operation} over {self.name}", self.ranks, self._over(pending, work))
        return pending

    def _over(self, pending: Pending, work: Any) -> Callable[[], bool]:
        """Returns a test whether a collective is complete. On a CPU a finished wait says so; on a GPU the host's wait says nothing."""
        if self.ledger.clock.on_device:
            return lambda: bool(work.is_completed())
        return lambda: pending.work is None or bool(work.is_completed())

    @contextlib.contextmanager
    def _blocking(self, operation: str) -> Iterator[None]:
        """Inside, the host waits for its peers. ``CommunicationError`` if that fails."""
        ended: list[bool] = []
        if self.ledger.in_flight is not None:
            self.ledger.in_flight.add(f"{operation} over {self.name}", self.ranks, lambda: bool(ended))
        try:
            yield
        except torch.OutOfMemoryError:  # of this rank: peers are not to blame
            raise
        except (RuntimeError, ValueError) as error:
            raise self.failed(operation, error) from error
        finally:
            ended.append(True)


TORCH_LATER_S = 60.0
"""Seconds of torch's own limit beyond the watchdog's, which names the stuck collective."""


class World:
    """All ranks of the run; makes groups of them. Must be closed."""

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device,
        address: str,
        port: int,
        timeout_s: float,
        record: Callable[[Exception], int] | None = None,
    ):
        """With ``record``, which writes an error down, a watchdog ends a rank whose collective is not complete after ``timeout_s``."""
        self.rank, self.size, self.device = rank, size, device
        self.timeout = timedelta(seconds=timeout_s if record is None else timeout_s + TORCH_LATER_S)
        self.watchdog: Watchdog | None = None
        self.ledger = Ledger(Clock(device))
        self.group = Group("world", tuple(range(size)), rank, self.ledger)
        if size > 1:
            self._connect(address, port, timeout_s)
        if size > 1 and record is not None:
            self.ledger.in_flight = InFlightCollectives()
            raises = device.type != "cuda"  # gloo's collectives do when a peer is lost, NCCL's do not
            self.watchdog = Watchdog(rank, size, (address, port), timeout_s, raises, self.ledger.in_flight, record)

    def _connect(self, address: str, port: int, timeout_s: float) -> None:
        try:
            store = dist.TCPStore(address, port, self.size, self.rank == 0, timedelta(seconds=timeout_s))
            backend = "nccl" if self.device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, timeout=self.timeout)
        except (RuntimeError, ValueError, OSError) as error:
            first = (str(error).strip().splitlines() or [""])[0]
            raise CommunicationError(f"rank {self.rank} cannot meet the others at {address}:{port}: {first}", "rendezvous") from error
        self.group.handle = dist.group.WORLD

    def make_group(self, name: str, ranks: list[int]) -> Group:
        """The group of ``ranks``, which includes this one. Ranks must make the groups that they share in the same order."""
        group = Group(name, tuple(ranks), self.rank, self.ledger)
        if len(ranks) > 1:
            try:
                group.handle = dist.new_group(list(ranks), timeout=self.timeout, use_local_synchronization=True)
            except (RuntimeError, ValueError) as error:
                raise group.failed("new_group", error) from error
        return group

    def close(self) -> None:
        """Leaves the job; peers that still communicate will fail. Measurements are written by now, so closing errors are only reported."""
        if self.watchdog is not None:
            self.watchdog.close()
        if self.size > 1 and dist.is_initialized():
            try:
                dist.destroy_process_group()
            except Exception as error:
                print(f"leaving the job failed: {error}", file=sys.stderr)
