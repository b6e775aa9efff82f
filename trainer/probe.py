"""Measures a machine: ``python -m trainer`` with ``run.task=probe`` runs this instead of a training.

All ranks measure at the same time, so that memory, network ports and cores are shared as in training. Each figure is the best of
several repetitions, because other processes can only add time. CPU ranks take turns on the cores: what they do alone is measured
in CPU seconds, and a collective in wall-clock and CPU seconds. Rank 0 writes the figures to ``result.json``, under "probe", and
a line of ``metrics.jsonl`` after each part.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.comm.clock import Clock
from trainer.comm.collectives import Group, Pending, World
from trainer.data.dataset import Synthetic
from trainer.generate.generate import PromptRequest, generate
from trainer.generate.measure import draw
from trainer.generate.session import Session
from trainer.launch.rank_env import RankEnv
from trainer.loop import choose_device
from trainer.models.layers import Init
from trainer.shared.records.outcome import Status
from trainer.shared.records.trial_files import METRICS, RESULT, write_outcome
from trainer.shared.run.rules import resolve
from trainer.shared.run.schema import LayoutConfig, ModelConfig, TrainConfig
from trainer.state.host import HostMemory
from trainer.state.optimizer import AdamW
from trainer.state.parameters import OptimizerShard, ParameterRecord
from trainer.step import Engine

Figures = dict[str, Any]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
OPERATION = "all_reduce", "all_gather", "reduce_scatter", "all_to_all"


@dataclass(frozen=True)
class ProbeSizes:
    """Sizes and durations of the measurements on a kind of device."""

    products: tuple[tuple[int, int, int], ...]  # rows, columns, inner size
    copy_bytes: int
    messages: tuple[int, ...]  # bytes
    burst: int  # calls per reading of the clock
    product_s: float = 0.03  # for each product
    message_s: float = 0.25  # for each collective, size and group


HOST = ProbeSizes(
    ((64, 64, 64), (64, 256, 64), (256, 64, 256), (256, 256, 256), (64, 1024, 256), (256, 1024, 256), (1024, 256, 256), (512, 512, 1024)),
    copy_bytes=32 << 20,
    messages=(4 << 10, 64 << 10, 512 << 10, 4 << 20),
    burst=1,
)
CUDA = ProbeSizes(
    tuple((m, n, k) for m in (512, 2048, 8192, 16384) for n, k in ((1024, 1024), (1024, 4096), (4096, 1024), (4096, 4096), (12288, 12288))),
    copy_bytes=1 << 30,
    messages=(32 << 10, 1 << 20, 16 << 20, 256 << 20),
    burst=10,
)
RARE = ("fp16", "fp64")
"""Precisions measured for a few shapes only."""
BURSTS = 6
"""Bursts into which a collective's repetitions are divided; the fastest counts."""
TURNS = 8
"""Minimum repetitions of a step."""
TOKENS = 16
"""Tokens of a generation that is timed."""
SMALL = 4 << 10
"""Bytes of a message that holds next to nothing."""
PAUSE_S = 5e-4
"""Seconds that ranks compute before they are woken: about a block of a small model."""
WAKINGS = 20
"""Wakings per reading of the clock: as many as a request waits for one after the other, of which some take long."""


def probe(config: TrainConfig, env: RankEnv, out: Path, attempt: int) -> Status:
    """Measure on every rank of ``env``; rank 0 writes the figures."""
    device = choose_device(config.run.device, env.local_rank)
    torch.set_num_threads(config.run.threads)
    world = World(env.rank, env.world_size, device, env.address, env.port, config.run.timeout_s)
    try:
        probing = Probe(world, config.run.threads, out, attempt)
        result = {"status": Status.DONE.value, "attempt": attempt, "world_size": world.size, "probe": probing.run()}
        if world.rank == 0:
            write_outcome(out / RESULT, result)
    finally:
        world.close()
    return Status.DONE


class Probe:
    """The measurements of one rank, in the same order on all ranks."""

    def __init__(self, world: World, threads: int, out: Path, attempt: int):
        self.world, self.device, self.clock = world, world.device, Clock(world.device)
        self.extent = CUDA if self.clock.on_device else HOST
        self.in_turns = not self.clock.on_device and threads == 1
        self.out, self.attempt, self.told = out, attempt, 0
        hosts = world.group.gather_objects(socket.gethostname())
        self.per_node = hosts.count(hosts[0])
        self.hosts = list(dict.fromkeys(hosts))

    def run(self) -> Figures:
        """All figures. Times in seconds, sizes in bytes."""
        parts: list[tuple[str, Callable[[], Any]]] = [
            ("products", self.products),
            ("copy", self.copy),
            ("host_memory", self.host_memory),
            ("block", self.block),
            ("turn", self.turn),
        ]
        groups = self.groups()
        for group, near in groups:
            parts += [(f"{name} over {group.size} ranks", lambda *_, g=group, n=near, o=name: self.exchange(g, n, o)) for name in OPERATION]
        if not self.clock.on_device:  # what a GPU waits with does not sleep
            parts += [("waking", lambda: self.waking(groups))]
        parts += [(f"send {where}", lambda *_, w=where: self.send(w)) for where in self.pairs()]
        found: dict[str, Any] = {"exchanges": []}
        for number, (name, measure) in enumerate(parts):
            self.tell(number, len(parts), name)
            figures = measure()
            if name in ("products", "copy", "host_memory", "block", "turn", "waking"):
                found[name] = figures
            else:
                found["exchanges"] += figures
        self.tell(len(parts), len(parts), "done")
        return self.machine() | found

    def machine(self) -> Figures:
        """Describe the machine."""
        about = {"nodes": len(self.hosts), "per_node": self.per_node, "hosts": self.hosts, "torch": str(torch.__version__)}
        if self.clock.on_device:
            known = torch.cuda.get_device_properties(self.device)
            return about | {"device": known.name, "host": False, "units": known.multi_processor_count, "memory_bytes": known.total_memory}
        return about | {"device": "cpu", "host": True, "units": 1, "cores": len(os.sched_getaffinity(0)), "memory_bytes": None}

    def tell(self, done: int, of: int, what: str) -> None:
        """One line of progress, from rank 0."""
        if self.world.rank == 0:
            with (self.out / METRICS).open("a") as stream:
                stream.write(json.dumps({"attempt": self.attempt, "step": done, "of": of, "what": what, "time": time.time()}) + "\n")

    # -- one rank ------------------------------------------------------------------------------------------------------

    def products(self) -> list[Figures]:
        """Matrix products (m x k) (k x n) as a trainer has them, by precision and shape."""
        found = []
        for precision, dtype in DTYPES.items():
            sizes = self.extent.products[:4] if precision in RARE else self.extent.products
            own = [self._product(dtype, *size) for size in sizes]
            for (m, n, k), seconds in zip(sizes, self._typical(own), strict=True):
                found.append({"precision": precision, "m": m, "n": n, "k": k, "seconds": seconds})
        return found

    def _product(self, dtype: torch.dtype, m: int, n: int, k: int) -> float:
        left, right = (torch.randn(rows, columns, device=self.device).to(dtype) for rows, columns in ((m, k), (k, n)))
        result = torch.empty(m, n, dtype=dtype, device=self.device)
        return self._best(lambda: torch.mm(left, right, out=result), self.extent.product_s)

    def copy(self) -> Figures:
        """A copy in the device's memory: half of the bytes are read, half written."""
        source = torch.ones(self.extent.copy_bytes // 4, device=self.device)
        target = torch.empty_like(source)
        own = self._best(lambda: target.copy_(source), 10 * self.extent.product_s)
        return {"bytes": self.extent.copy_bytes, "seconds": self._typical([own])[0]}

    def host_memory(self) -> Figures:
        """Times of offloaded optimizer states: of a copy from the device into the host's memory, and of an update there."""
        memory, numel = HostMemory.of(1.0, self.world, None), self.extent.copy_bytes // 4
        device, gradient = torch.ones(numel, device=self.device), memory.buffer(numel, torch.float32)
        weight, exp_avg, exp_avg_sq = (memory.buffer(numel, torch.float32) for _ in range(3))
        record = ParameterRecord("w", (numel,), ((0, numel),), (numel,), Init(0.0), "matrices")
        piece = OptimizerShard(record, 0, numel, weight, exp_avg, exp_avg_sq, gradient, saves=True)
        optimizer = AdamW(resolve(TrainConfig(layout=LayoutConfig(data=1)), 1).optimizer, [[piece]], torch.device("cpu"))
        down = self._best(lambda: gradient.copy_(device, non_blocking=True), 10 * self.extent.product_s)
        factors, skip = torch.ones(1, dtype=torch.float64), torch.zeros(())
        update = self._best(lambda: memory.submit(optimizer.step, 1e-3, factors, skip).result(), 10 * self.extent.product_s)
        down, update = self._typical([down, update])
        return {"bytes": 4 * numel, "copy": down, "update": update, "update_bytes": 32 * numel}

    def block(self) -> Figures:
        """Host overhead of a block, a micro-batch and a step: their times with next to nothing to compute."""
        sizes = ((2, 1), (10, 1), (2, 5))
        work = [self._step_of(*size) for size in sizes]
        best, deadline = [float("inf")] * len(sizes), time.perf_counter() + 15 * self.extent.product_s
        for turn in itertools.count():
            times = [self._once(step, 1)[self.in_turns] for step in work]
            best = [min(old, new) for old, new in zip(best, times, strict=True)] if turn else best  # the first allocates
            if turn >= TURNS and time.perf_counter() > deadline:
                break
        small, deep, long = self._typical(best)
        block, turn_s = (deep - small) / 8, (long - small) / 4
        return {"block": block, "micro_batch": max(turn_s - 2 * block, 0.0), "step": max(small - turn_s, 0.0)}

    def turn(self) -> Figures:
        """Host overhead of generation: what a turn, a block and a row take with next to nothing to compute, and an entry of the vocabulary
        per row, from which a token is chosen. Medians: requests are predicted as they are reported."""
        sizes = ((2, 1, 64), (10, 1, 64), (2, 5, 64), (2, 5, 4160))
        work = [self._generation_of(*size) for size in sizes]
        rounds = [[self._once(each, 1)[self.in_turns] for each in work] for _ in range(TURNS)]  # a drift of the machine meets all alike
        small, deep, broad, wide = self._typical([statistics.median(times) / TOKENS for times in zip(*rounds)])
        block, row = max(deep - small, 0.0) / 8, max(broad - small, 0.0) / 4
        return {"turn": max(small - 2 * block - row, 0.0), "block": block, "row": row, "logit": max(wide - broad, 0.0) / 5 / 4096}

    def _generation_of(self, layers: int, rows: int, vocab: int) -> Callable[[], Any]:
        """``TOKENS`` turns of a model too small to compute anything, on this rank alone."""
        model = ModelConfig(layers=layers, hidden=16, heads=2, vocab=vocab, seq=64)
        run = replace(TrainConfig().run, task="inference", global_batch=1)
        config = resolve(TrainConfig(model=model, layout=LayoutConfig(data=1), run=run), 1)
        session = Session(config, World(0, 1, self.device, "", 0, 1.0), draw)
        requests = [PromptRequest(number, [1, 2], TOKENS) for number in range(rows)]
        return lambda: generate(session, requests)

    def _step_of(self, layers: int, micro_batches: int) -> Callable[[], Any]:
        """A step of a model too small to compute anything, on this rank alone."""
        model = ModelConfig(layers=layers, hidden=16, heads=2, vocab=64, seq=8)
        run = replace(TrainConfig().run, global_batch=micro_batches, steps=100)
        config = resolve(TrainConfig(model=model, layout=LayoutConfig(data=1), run=run), 1)
        alone = World(0, 1, self.device, "", 0, 1.0)
        engine = Engine(config, alone, Synthetic(model.vocab, model.seq, 1))
        step = itertools.count()
        return lambda: engine.step(next(step))

    def _best(self, work: Callable[[], Any], seconds: float) -> float:
        """Seconds of one call: the fastest of as many bursts as fit into ``seconds``, at least 3, after one warm-up."""
        burst = self.extent.burst
        self._once(work, burst)
        deadline = time.perf_counter() + seconds
        times: list[float] = []
        while len(times) < 3 or time.perf_counter() < deadline:
            passed, busy = self._once(work, burst)
            times.append(busy if self.in_turns else passed)
        return min(times)

    def _once(self, work: Callable[[], Any], burst: int) -> tuple[float, float]:
        """Seconds of one call: wall-clock time, and CPU time of this process."""
        used, start = time.process_time(), self.clock.mark()
        for _ in range(burst):
            work()
        end = self.clock.mark()
        self.clock.synchronize()
        return self.clock.seconds(start, end) / burst, (time.process_time() - used) / burst

    def _typical(self, own: Sequence[float]) -> list[float]:
        """The median over all ranks, entry by entry."""
        return [statistics.median(each) for each in zip(*self.world.group.gather_objects(list(own)), strict=True)]

    # -- several ranks ---------------------------------------------------------------------------------------------------

    def groups(self) -> list[tuple[Group, int]]:
        """Groups to measure, and how many of their ranks share a node. All ranks are in groups of the same size at the same time."""
        known = groups_of(self.world.rank, self.per_node, len(self.hosts))
        return [(self.world.make_group(f"{len(ranks)} ranks, {near} near", ranks), near) for ranks, near in known]

    def exchange(self, group: Group, near: int, operation: str) -> list[Figures]:
        """One collective by payload: the whole tensor's bytes."""
        found = []
        for payload in self.extent.messages:
            shard = torch.ones(payload // 4 // group.size, device=self.device)
            whole = torch.ones(shard.numel() * group.size, device=self.device)
            work = _collective(group, operation, whole, shard)
            about = {"operation": operation, "size": group.size, "near": near, "bytes": whole.numel() * 4}
            found.append(about | self._together(work))
        return found

    def pairs(self) -> dict[str, int]:
        """Distance between the ranks of a pair, inside a node and between nodes."""
        distances = {"inside a node": 1} if self.per_node > 1 else {}
        return distances | ({"between nodes": self.per_node} if len(self.hosts) > 1 else {})

    def send(self, where: str) -> list[Figures]:
        """A message to a neighbour and one back, by size; half of it is one way. A rank without a neighbour sends nothing."""
        distance = self.pairs()[where]
        ranks = pair_of(self.world.rank, distance, self.per_node, self.world.size)
        group = self.world.make_group(f"pair {where}", ranks)
        found = []
        for payload in self.extent.messages:
            message = torch.ones(payload // 4, device=self.device)
            both = self._together(_there_and_back(group, message) if len(ranks) == 2 else (lambda: None))
            about = {"operation": "send", "size": 2, "near": 2 if distance < self.per_node else 1, "bytes": payload}
            found.append(about | {name: seconds / 2 for name, seconds in both.items()})
        return found

    def waking(self, groups: Sequence[tuple[Group, int]]) -> list[Figures]:
        """A small message between ranks that compute in between, as in generation. What waits has fallen asleep by then: waking it takes
        longer than the same in a burst. Only the first group of each size is at work; medians, as of ``turn``."""
        work, found = self._pause(), []
        for group, near in groups:
            for operation in ("all_reduce", "all_gather", "send")[: 3 if group.size == 2 else 2]:
                own = self._woken(group, operation, work) if group.ranks[0] == 0 else None
                seconds = max(self.world.group.gather_objects(own)[0], 1e-7)
                found.append({"operation": operation, "size": group.size, "near": near, "bytes": SMALL, "seconds": seconds})
        return found

    def _pause(self) -> Callable[[], None]:
        """A computation of ``PAUSE_S``, as many products on every rank."""
        left, right = torch.ones(64, 64), torch.zeros(64, 64)
        (once,) = self._typical([self._best(lambda: torch.mm(left, right), self.extent.product_s)])
        times = range(round(PAUSE_S / once))

        def work() -> None:
            for _ in times:
                torch.mm(left, right)

        return work

    def _woken(self, group: Group, operation: str, work: Callable[[], None]) -> float:
        """Seconds of ``operation`` between computations of ``work``: with them, less without. A message is answered, each side computes in
        turn."""
        shard, ways = torch.ones(SMALL // 4 // group.size), 2 if operation == "send" else 1
        whole = torch.ones(shard.numel() * group.size)

        def exchange() -> None:
            work()
            _collective(group, operation, whole, shard)()

        both = exchange if ways == 1 else _there_and_back(group, whole, work)
        times: list[tuple[float, float]] = []
        for _ in range(TURNS):
            group.all_reduce(torch.zeros(1)).wait()
            alone = self._once(work, WAKINGS)[0]
            group.all_reduce(torch.zeros(1)).wait()
            times.append((alone, self._once(both, WAKINGS)[0]))
        alone, together = (statistics.median(each) for each in zip(*times))
        return together / ways - alone

    def _together(self, work: Callable[[], Any]) -> Figures:
        """Seconds of one call that all ranks make: the fastest burst of the slowest rank, and the CPU seconds that it takes."""
        work()
        slowest = max(self.world.group.gather_objects(self._once(work, 2)[0]))
        burst = max(1, min(200, int(self.extent.message_s / BURSTS / slowest)))
        bursts = []
        for _ in range(BURSTS):
            self.world.group.all_reduce(torch.zeros(1, device=self.device)).wait()
            bursts.append(self._once(work, burst))
        passed, busy = (min(times) for times in zip(*bursts, strict=True))
        own = self.world.group.gather_objects((passed, busy))
        return {"seconds": max(each[0] for each in own), "busy_s": statistics.median(each[1] for each in own)}


def _collective(group: Group, operation: str, whole: Tensor, shard: Tensor) -> Callable[[], None]:
    come = torch.empty_like(whole)
    calls: dict[str, Callable[[], Pending]] = {
        "all_reduce": lambda: group.all_reduce(whole),
        "all_gather": lambda: group.all_gather(whole, shard),
        "reduce_scatter": lambda: group.reduce_scatter(shard, whole),
        "all_to_all": lambda: group.all_to_all(come, whole),
    }
    return lambda: calls[operation]().wait()


def _there_and_back(group: Group, message: Tensor, work: Callable[[], None] = lambda: None) -> Callable[[], None]:
    """A message and one back, after ``work`` of the one that sends."""
    lower = group.index == 0

    def turn() -> None:
        for sends in (lower, not lower):
            if sends:
                work()
            (group.send(message, 1 - group.index) if sends else group.receive(message, 1 - group.index)).wait()

    return turn


def groups_of(rank: int, per_node: int, nodes: int) -> list[tuple[list[int], int]]:
    """The groups of ``rank`` to measure (inside a node, across nodes, all ranks), and how many ranks of each share a node."""
    node, found = rank // per_node, []
    for size in _sizes(per_node):
        if per_node % size == 0:
            first = rank - rank % size
            found.append((list(range(first, first + size)), size))
    for size in _sizes(nodes):
        if nodes % size == 0:
            first = node - node % size
            found.append(([(first + i) * per_node + rank % per_node for i in range(size)], 1))
    if nodes > 1 and per_node > 1:
        found.append((list(range(nodes * per_node)), per_node))
    return found


def pair_of(rank: int, distance: int, per_node: int, world_size: int) -> list[int]:
    """``rank`` and the rank ``distance`` away that it exchanges messages with, ascending; only ``rank`` if there is none."""
    peer = rank + distance if (rank // distance) % 2 == 0 else rank - distance
    inside = distance >= per_node or peer // per_node == rank // per_node
    return sorted((rank, peer)) if peer < world_size and inside else [rank]


def _sizes(most: int) -> list[int]:
    """2, 4, 8, ... and ``most`` itself."""
    powers = [1 << i for i in range(1, most.bit_length()) if 1 << i <= most]
    return sorted({*powers, most} - {1})
