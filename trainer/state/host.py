"""Optimizer states in host memory: a share of every bucket's, whose gradients come down and whose weights go up (ZeRO-Offload: Ren et al.
2021, arXiv 2101.06840; files: ZeRO-Infinity, Rajbhandari et al. 2021, arXiv 2104.07857).

One thread of a rank does all of it, in the order in which it was asked to:

    gradients of a bucket are reduced    copies those of its share down, while backward goes on
    partial gradients are summed         copies the rest of them down
    the global norm is known             updates the share of one bucket after the other, and copies new weights up, as the next forward
                                         needs them

No update can begin before the last gradient has come: a factor that clips by the global norm depends on all of them, and so does the
decision that a step which is not finite changes nothing. What hides behind backward are the copies down; what hides behind the next forward
are the updates of all buckets but the first. On CUDA copies run on a stream of their own, from and to pinned memory.

States may be files, which the update reads and writes through the page cache.
"""

from __future__ import annotations

import mmap
import os
import socket
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.comm.collectives import Ledger, World
from trainer.shared.parallel.shards import on_host
from trainer.shared.run.errors import ConfigError

PAGE = 4096
"""Bytes at whose multiples memory is pinned, and the states of a bucket begin in a file."""


@dataclass(frozen=True)
class HostNeeds:
    """Bytes that the states of some elements need in memory and in a file."""

    memory: int
    file: int


class HostMemory:
    """The host memory of one rank, and the thread that works there."""

    def __init__(self, share: float, device: torch.device, ledger: Ledger, folder: str | None = None, threads: int | None = None):
        """``share`` of the elements of each bucket have their states here; in a file of ``folder``, if it is given. An update has
        ``threads`` threads, by default as many as any other operation."""
        self.share, self.ledger, self.folder = share, ledger, folder
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        start = (torch.set_num_threads, (threads,)) if threads else (None, ())
        self.thread = ThreadPoolExecutor(1, "host memory", *start)  # starts with the first call
        self.file: mmap.mmap | None = None
        self.taken = 0  # bytes of the file

    @classmethod
    def of(cls, share: float, world: World, folder: str | None) -> HostMemory:
        """Returns that of this rank. Collective. Beside a GPU the cores of a host have nothing else to do, and its ranks share them."""
        hosts = world.group.gather_objects(socket.gethostname())
        cores = len(os.sched_getaffinity(0)) // hosts.count(socket.gethostname())
        return cls(share, world.device, world.ledger, folder, max(cores - 1, 1) if world.device.type == "cuda" else None)

    def elements(self, numel: int) -> int:
        return on_host(numel, self.share)

    def needs(self, numel: int, compute: torch.dtype, master: torch.dtype, moments: torch.dtype, averages: bool) -> HostNeeds:
        """Returns the bytes of ``HostStates`` of so many elements: weights, their average and moments, and the buffers of copies."""
        states, copied = [master, *[master] * averages, moments, moments], [master]
        if compute != master or self.folder is not None:
            copied.append(compute)
        kept, buffers = (sum(_pages(numel * dtype.itemsize) for dtype in dtypes) for dtypes in (states, copied))
        return HostNeeds(kept + buffers, 0) if self.folder is None else HostNeeds(buffers, kept)

    def reserve(self, nbytes: int) -> None:
        """Makes the file, which has no name and goes with the process. ``ConfigError`` if the folder does not take it."""
        if self.folder is None or nbytes == 0:
            return
        try:
            os.makedirs(self.folder, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder) as file:
                os.posix_fallocate(file.fileno(), 0, nbytes)
                self.file = mmap.mmap(file.fileno(), nbytes)
        except OSError as error:
            raise ConfigError(
                f"run.offload_path={self.folder} cannot hold {nbytes / 1e9:.3g} GB of a rank's optimizer states: {error.strerror}; name a "
                "folder that can be written to and has room for those of all ranks of a host, or lower layout.sharding.offload"
            ) from error

    def state(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Returns zeros: in the file, if there is one."""
        if self.file is None:
            return self.buffer(numel, dtype)
        start, self.taken = self.taken, self.taken + _pages(numel * dtype.itemsize)
        return torch.frombuffer(self.file, dtype=dtype, count=numel, offset=start)

    def buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Returns zeros in memory, pinned where a GPU copies. (torch's own pinned tensors take the next power of two.)"""
        if self.stream is None:
            return torch.zeros(numel, dtype=dtype)
        memory = mmap.mmap(-1, _pages(numel * dtype.itemsize))
        tensor = torch.frombuffer(memory, dtype=dtype, count=numel)
        failed = int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), len(memory), 0))
        if failed:
            raise MemoryError(
                f"the host pins no {len(memory) / 1e9:.3g} GB for optimizer states (CUDA error {failed}); raise the limit of locked memory "
                "(ulimit -l), or lower layout.sharding.offload"
            )
        return tensor

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        return self.thread.submit(work, *arguments)

    def ready(self) -> Any:
        """Returns an event at the end of all work that is queued so far; None on a CPU, which has done it."""
        if self.stream is None:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def copy(self, pairs: list[tuple[Tensor, Tensor]], after: Any) -> Any:
        """Copies to the first of each pair from the second when ``after`` is over, an event or a collective: the same call makes the
        stream of copies wait for either, or this thread on a CPU. Returns an event at the end, as ``ready``."""
        with nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
            if after is not None:
                after.wait()
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            return self.ready()

    def count(self, operation: str, nbytes: int) -> None:
        """Counts a copy, beside what ranks send each other."""
        self.ledger.copied("host memory", operation, nbytes)


class HostStates:
    """The states of ``numel`` elements of a bucket in host memory; ``late`` are those whose gradient is summed once more at the end."""

    def __init__(
        self, memory: HostMemory, numel: int, dtypes: tuple[torch.dtype, torch.dtype, torch.dtype], late: list[slice], averages: bool
    ):  # dtypes of computation, master weights and moments
        compute, master, moments = dtypes
        self.memory, self.late, self.early = memory, late, _between(late, numel)
        self.weight = memory.state(numel, master)
        self.exp_avg, self.exp_avg_sq = memory.state(numel, moments), memory.state(numel, moments)
        self.average = memory.state(numel, master) if averages else self.weight[:0]
        self.gradient = memory.buffer(numel, master)
        same = compute == master and memory.file is None
        self.outgoing = self.weight if same else memory.buffer(numel, compute)
        self.received: Any = None  # when the last copy of gradients is done
        self.sent: Any = None  # and that of weights
        self.update: Callable[[], None] | None = None  # of the step; the thread calls it before it copies weights

    def receive(self, gradient: Tensor, after: Any = None, late: bool = False) -> None:
        """Starts to copy gradients of all elements but the late ones, or of those, when a collective is over (``after``)."""
        pairs = [(self.gradient[part], gradient[part]) for part in (self.late if late else self.early)]
        if pairs:
            self.memory.count("copy_down", sum(source.nbytes for _, source in pairs))
            self.memory.submit(self._receive, pairs, self.memory.ready() if after is None else after)

    def _receive(self, pairs: list[tuple[Tensor, Tensor]], after: Any) -> None:
        self.received = self.memory.copy(pairs, after)

    def publish(self, target: Tensor) -> Upload:
        """Starts the update, if there is one to make, and then to copy the weights to ``target``."""
        update, self.update = self.update, None
        self.memory.count("copy_up", target.nbytes)
        return Upload(self.memory.submit(self._publish, update, target, self.memory.ready()))

    def _publish(self, update: Callable[[], None] | None, target: Tensor, after: Any) -> Any:
        for copied in (self.received, self.sent):
            if copied is not None:
                copied.synchronize()
        if update is not None:
            update()
        if self.outgoing is not self.weight:
            self.outgoing.copy_(self.weight)
        self.sent = self.memory.copy([(target, self.outgoing)], after)
        return self.sent


class Upload:
    """Weights on their way up."""

    def __init__(self, sent: Future[Any]):
        self.sent = sent

    def wait(self) -> None:
        """Waits until the thread has sent them; on CUDA, lets the current stream wait until they have come."""
        come = self.sent.result()
        if come is not None:
            come.wait()


def _between(late: list[slice], numel: int) -> list[slice]:
    """Returns what ``late`` leaves of ``numel`` elements."""
    ends = [0, *(end for part in late for end in (part.start, part.stop)), numel]
    return [slice(first, stop) for first, stop in zip(ends[::2], ends[1::2]) if first < stop]


def _pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE
