"""Memory accounting: training states before they are allocated, and tensors that autograd saves for backward."""

from __future__ import annotations

import contextlib
import os
import socket
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from trainer.comm.collectives import World
from trainer.launch.failure import OverBudget

CGROUPS = Path("/sys/fs/cgroup")


def check_room(states: int, limit_gb: float | None, world: World, offloaded: int = 0) -> None:
    """Refuses ``states`` bytes of training state on the device, and ``offloaded`` ones in the host's memory, before allocation. Collective.
    Raises ``OverBudget`` above ``run.memory_gb``; on every rank ``MemoryError`` if a host's ranks need more than it has, since the system
    would kill a process later."""
    if limit_gb is not None and states > round(limit_gb * 1e9):
        raise OverBudget(f"weights, gradients and optimizer states need {states / 1e9:.3g} GB, run.memory_gb={limit_gb:g}")
    states = offloaded + (states if world.device.type == "cpu" else 0)
    needs: Counter[str] = Counter()
    holds: dict[str, int] = {}
    for host, need, hold in world.group.gather_objects((socket.gethostname(), states, host_memory())):
        needs[host] += need
        holds[host] = hold
    for host, need in needs.items():
        if need > holds[host]:
            raise MemoryError(
                f"weights, gradients and optimizer states of the ranks on {host} need {need / 1e9:.3g} GB of its memory, "
                f"and it has {holds[host] / 1e9:.3g} GB; "
                "use a smaller model.vocab or model.hidden, or shard more (layout.tensor, layout.pipeline, layout.sharding)"
            )


def host_memory() -> int:
    """Bytes that the processes of this host or container may use."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with contextlib.suppress(OSError):
        own = Path("/proc/self/cgroup").read_text().rpartition("::/")[2].strip()
        for group in (CGROUPS, CGROUPS / own):
            with contextlib.suppress(OSError, ValueError):  # no file, or "max"
                limits.append(int((group / "memory.max").read_text()))
    return min(limits)


class TrackedTensor:
    """A tensor saved for backward, counted until autograd drops it."""

    def __init__(self, tensor: Tensor, meter: ActivationMeter):
        self.tensor, self.meter, self.pointer = tensor, meter, tensor.untyped_storage().data_ptr()
        meter.add(self.pointer, tensor.untyped_storage().nbytes())

    def __del__(self) -> None:
        self.meter.remove(self.pointer)


class ActivationMeter:
    """Counts storages saved for backward, each once, except ``resting`` ones (parameters). Raises ``OverBudget`` above ``budget`` bytes."""

    def __init__(self, resting: set[int], budget: int | None):
        self.resting, self.budget = resting, budget
        self.now = self.peak = 0
        self.users: dict[int, int] = {}
        self.sizes: dict[int, int] = {}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Counts the tensors that are saved inside."""
        with torch.autograd.graph.saved_tensors_hooks(self.track, lambda tracked: tracked.tensor):
            yield

    def add(self, pointer: int, nbytes: int) -> None:
        """Adds a user of a storage. ``OverBudget`` if that exceeds the budget."""
        if pointer in self.resting:
            return
        self.users[pointer] = self.users.get(pointer, 0) + 1
        if self.users[pointer] == 1:
            self.sizes[pointer] = nbytes
            self.now += nbytes
            self.peak = max(self.peak, self.now)
            if self.budget is not None and self.now > self.budget:
                raise OverBudget(f"activations need more than the {self.budget / 1e9:.3g} GB that run.memory_gb leaves for them")

    def remove(self, pointer: int) -> None:
        """Removes a user of a storage."""
        if pointer in self.users:
            self.users[pointer] -= 1
            if self.users[pointer] == 0:
                del self.users[pointer]
                self.now -= self.sizes.pop(pointer)

    def track(self, tensor: Tensor) -> TrackedTensor:
        """Counts a tensor that autograd does not know of, for the lifetime of the returned object."""
        return TrackedTensor(tensor, self)
