"""Sweeps on disk as the launcher and the trainer leave them, made by hand: the truth that ranking, mirror and report read."""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher.config import Config, HardwareConfig, resolve
from launcher.trials.store import Point, Record, Store
from trainer.shared.parallel import schedule as schedules
from trainer.shared.parallel.actions import Kind
from trainer.shared.parallel.simulate import Times, simulate
from trainer.shared.records.outcome import Reason, Status
from trainer.shared.run.schema import LayoutConfig, ModelConfig, RunConfig

HARDWARE = HardwareConfig("small", peak_tflops={"fp32": 0.1}, memory_bandwidth_gbs=20.0, link_gbs=5.0, network_gbs=1.0)
STARTED = 1_790_000_000.0
STEPS, WARMUP = 8, 2
EVENT_KINDS = {Kind.SEND_FORWARD: "send", Kind.SEND_BACKWARD: "send", Kind.RECV_FORWARD: "receive", Kind.RECV_BACKWARD: "receive"}


def config(tensor: int = 1, pipeline: int = 1, *, ranks: int = 4, **layout: Any) -> Config:
    """A resolved run of a tiny model over ``ranks`` local ranks."""
    base = Config(
        model=ModelConfig(layers=4, hidden=64, heads=4, vocab=512, seq=32),
        layout=LayoutConfig(tensor=tensor, pipeline=pipeline, **layout),
        run=RunConfig(steps=STEPS, warmup_steps=WARMUP, global_batch=8),
    )
    return resolve(replace(base, cluster=replace(base.cluster, gpus_per_node=ranks, hardware=HARDWARE)))


def point(tensor: int = 1, pipeline: int = 1, *, predicted: dict[str, Any] | None = None, **layout: Any) -> Point:
    overrides = (f"layout.tensor={tensor}", f"layout.pipeline={pipeline}", *(f"layout.{k}={v}" for k, v in layout.items()))
    return Point(overrides, config(tensor, pipeline, **layout), predicted=predicted)


def seeded(seed: int, *overrides: str) -> Point:
    """A trial of the same layout as the others of its kind, with a seed of its own."""
    planned = point(2, 2)
    assert planned.config is not None
    changed = replace(planned.config, run=replace(planned.config.run, seed=seed))
    return Point(("model=gpt_tiny", f"run.seed={seed}", *overrides), changed)


def tracked_at(planned: Point, uri: str) -> Point:
    """The same trial, tracked by a server."""
    assert planned.config is not None
    return replace(planned, config=replace(planned.config, tracking=replace(planned.config.tracking, uri=uri)))


class SweepOnDisk:
    """A sweep whose trials are brought to the state that a test needs."""

    def __init__(self, root: Path, name: str = "planted"):
        self.store, self.name = Store(root), name
        self.records: list[Record] = []

    def add(self, planned: Point, status: Status = Status.PLANNED, reason: Reason | None = None, detail: str = "") -> Record:
        """A trial that left no file but its record."""
        record = self.store.plan(planned, self.name)
        record.status = record.status if record.status is Status.PRUNED else status
        record.reason, record.detail = record.reason or reason, record.detail or detail
        record.commit, record.started, record.submitted = "0123abcd", STARTED, STARTED - 1
        record.ended = STARTED + 60 if status.final else None
        self.records.append(record)
        self.store.write_sweep(self.name, self.records, "test")
        if record.status is not Status.PRUNED:
            self.store.save(record)
        return record

    def done(self, planned: Point, step_time: float, spread: float = 0.02, **changes: Any) -> Record:
        """A trial that was measured: metrics, result, timeline and logs. ``changes`` are put into its ``result.json``."""
        record = self.add(planned, Status.DONE)
        times = step_times(step_time, spread)
        write_metrics(record, times)
        write_json(record.directory / "result.json", result_of(record, times) | changes)
        write_json(record.directory / "timeline.json", timeline_of(record, step_time))
        write_logs(record, "rank {rank} is ready\nstep 8 done\n")
        return record

    def failed(
        self, planned: Point, reason: Reason = Reason.OUT_OF_MEMORY, message: str = "needs 3.2e9 bytes, has 2e9", log: str = ""
    ) -> Record:
        """A trial of which rank 1 failed."""
        record = self.add(planned, Status.FAILED, reason, f"rank 1: {message}")
        failure = {"attempt": 0, "rank": 1, "reason": reason.value, "message": message, "collective": None}
        write_json(record.directory / "failure-1.json", failure)
        write_logs(record, log or f"rank {{rank}} is ready\nerror: {message}\n")
        return record


def step_times(median: float, spread: float, seed: int = 0) -> list[float]:
    """Slow warm-up steps, then times around ``median`` within ``spread`` of it."""
    generator = random.Random(seed)
    measured = [median * (1 + spread * (generator.random() - 0.5)) for _ in range(STEPS - WARMUP - 1)]
    return [median * 3, median * 1.5, *sorted([*measured, median])]


def losses(steps: int, disturbance: float = 0.0) -> list[float]:
    return [(2 + 4 * math.exp(-step / 5)) * (1 + disturbance * math.sin(step)) for step in range(1, steps + 1)]


def metric_line(step: int, seconds: float, attempt: int = 0) -> dict[str, Any]:
    return {
        "attempt": attempt, "step": step, "loss": losses(step)[-1], "grad_norm": 1 / step, "lr": 1e-3, "step_time_s": seconds,
        "tokens_per_s": 256 / seconds, "time": STARTED + step * seconds + 100 * attempt,
    }  # fmt: skip


def write_metrics(record: Record, times: Sequence[float], *, first: int = 1, attempt: int = 0) -> None:
    """Append steps ``first``, ``first + 1``, ... as the trainer does."""
    with (record.directory / "metrics.jsonl").open("a") as file:
        for step, seconds in enumerate(times, start=first):
            file.write(json.dumps(metric_line(step, seconds, attempt)) + "\n")


def result_of(record: Record, times: Sequence[float]) -> dict[str, Any]:
    measured = times[WARMUP:]
    quartiles = statistics.quantiles(measured, n=4, method="inclusive")
    world = record.world_size
    return {
        "status": "done", "reason": None, "message": "", "attempt": 0, "losses": losses(len(times)), "grad_norms": [1.0] * len(times),
        "step_times_s": list(times), "step_time_s": statistics.median(measured), "step_time_spread_s": quartiles[2] - quartiles[0],
        "tokens_per_s": 256 / statistics.median(measured), "tflops_per_gpu": 0.01, "mfu": None, "hfu": None,
        "peak_memory_bytes": 40_000_000 // world + 9_000_000,
        "memory": {"weights": 8e6 / world, "gradients": 8e6 / world, "optimizer": 24e6 / world, "activations": 9e6},
        "world_size": world, "layout": record.config["layout"], "model": record.config["model"],
        "versions": {"torch": "2.13.0", "python": "3.11", "trireme": "0.1.0"}, "hosts": ["here"],
    }  # fmt: skip


def timeline_of(record: Record, step_time: float) -> dict[str, Any]:
    """The trial's schedule, simulated, as if every rank of a stage had traced the same."""
    layout = record.config["layout"]
    stages, chunks = layout["pipeline"], layout["virtual_pipeline"]
    micro_batches = record.config["run"]["global_batch"] // (layout["micro_batch"] * layout["data"])
    plan = schedules.build(layout["schedule"], stages, chunks, micro_batches)
    unit = step_time / (4 * (micro_batches + stages))
    spans = simulate(plan, Times.equal(stages * chunks, unit, unit, unit, unit / 5))
    per_stage = layout["tensor"] * layout["data"]
    events = [
        {
            "rank": stage * per_stage + peer, "stage": stage, "chunk": span.action.chunk, "micro_batch": span.action.micro_batch,
            "kind": EVENT_KINDS.get(span.action.kind, span.action.kind.value), "start_s": span.start, "end_s": span.end,
        }
        for stage, rank in enumerate(spans) for span in rank for peer in range(per_stage)
    ]  # fmt: skip
    return {"step": WARMUP + 1, "schedule": layout["schedule"], "events": events}


def write_logs(record: Record, text: str) -> None:
    (record.directory / "logs").mkdir(exist_ok=True)
    for rank in range(record.world_size):
        (record.directory / "logs" / f"attempt{record.attempt}.rank{rank}.log").write_text(text.replace("{rank}", str(rank)))


def write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data))


def demo_sweep(root: Path, name: str = "planted") -> SweepOnDisk:
    """Three measured layouts, one out of memory, one impossible, one still to run."""
    sweep = SweepOnDisk(root, name)
    sweep.done(point(1, 1), 0.30)
    sweep.failed(point(4, 1))
    sweep.done(point(2, 2, predicted={"step_time_s": 0.22, "memory_bytes": 2e7, "parts": {}}), 0.20)
    sweep.done(point(1, 4), 0.25)
    sweep.add(Point(("layout.tensor=3",), None, "layout.tensor=3 does not divide model.heads=4; use 1, 2 or 4"))
    sweep.add(point(2, 1))
    return sweep
