"""The host of a GPU queues step after step, and waits for one value per step, a step late."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from tests.farm import Farm
from tests.small_runs import small
from trainer import loop
from trainer.comm import collectives
from trainer.comm.clock import Clock
from trainer.launch.rank_env import RankEnv
from trainer.shared.run.read import from_dict
from trainer.shared.run.rules import resolve
from trainer.shared.run.schema import TrainConfig
from trainer.step import Engine

READS = ("aten._local_scalar_dense", "aten.is_nonzero", "aten.equal")
"""Operations that make the host wait for the value of a tensor on a device."""


class DeviceClock(Clock):
    """A CPU that calls itself a device, and writes down what the host waits for."""

    events: list[str] = []  # noqa: RUF012  one per process

    def __init__(self, device: Any):
        super().__init__(device)
        self.on_device = True

    def stamp(self) -> float:
        self.events.append("mark")
        return time.perf_counter()

    def seconds(self, start: Any, end: Any) -> float:
        return float(end - start)

    def wait(self, mark: Any) -> None:
        self.events.append("wait")

    def synchronize(self) -> None:
        self.events.append("synchronize")


class Reads(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, arguments=(), named=None):  # type: ignore[no-untyped-def]
        if str(function).startswith(READS):
            DeviceClock.events.append(str(function))
        return function(*arguments, **(named or {}))


def recorded(env: RankEnv, folder: Path, config: dict[str, Any]) -> None:
    """A training on such a device; ``events.json`` has what rank 0's host did."""
    collectives.Clock = DeviceClock  # type: ignore[misc]
    queue = Engine.queue

    def queued(self: Engine, step: int, *a: Any, **b: Any) -> Any:
        DeviceClock.events.append(f"queue {step}")
        with Reads():
            done = queue(self, step, *a, **b)
        DeviceClock.events.append("queued")
        return done

    Engine.queue = queued  # type: ignore[method-assign]
    loop.train(resolve(from_dict(TrainConfig, config), env.world_size), env, folder, 0)
    if env.rank == 0:
        (folder / "events.json").write_text(json.dumps(DeviceClock.events))


LAYOUTS = [
    {"data": 2},
    {"data": 2, "sharding": {"params": 2, "grads": 2, "optimizer": 2}},
    {"pipeline": 2},
    {"tensor": 2, "recompute": "full"},
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_waits_for_nothing_and_is_read_after_the_next_one_is_queued(farm: Farm, layout: dict[str, Any]) -> None:
    """Before: two waits in every step, and two marks for every collective."""
    run = farm.call(recorded, 2, config=small(steps=8, model={"layers": 2}, run={"warmup_steps": 1, "global_batch": 4}, **layout))
    events = json.loads((run.directory / "events.json").read_text())
    host = [e for e in events if e not in ("mark", "queued")]
    assert not set(host) & {"synchronize"} and not any(e.startswith("aten") for e in host), "nothing inside a step"
    assert host == [
        "queue 0", "wait", "queue 1", "queue 2", "wait", "wait",  # the first step and the drawn one are measured, and read at once
        "queue 3", "queue 4", "wait", "queue 5", "wait", "queue 6", "wait", "queue 7", "wait", "wait",
    ]  # fmt: skip
    unmeasured = events[events.index("queue 4") : events.index("queue 5")]
    assert unmeasured.count("mark") == 2, "its begin and its end"


@pytest.mark.parametrize("layout", LAYOUTS[:2])
def test_a_step_read_late_is_the_same_step(farm: Farm, layout: dict[str, Any]) -> None:
    """Losses, norms and the checkpoint's count of updates."""
    config = small(steps=8, model={"layers": 2}, run={"checkpoint": {"every": 3}, "global_batch": 4}, **layout)
    late = farm.call(recorded, 2, config=config).result
    once = farm.train(config, 2).checked().result
    assert late["losses"] == once["losses"] and late["grad_norms"] == once["grad_norms"]
    assert len(late["step_times_s"]) == 8 and late["status"] == "done"


def test_a_step_that_is_not_finite_stops_a_run_that_reads_late_with_its_weights_as_they_were(farm: Farm) -> None:
    """The steps queued after it change nothing, so that computing it again finds where it began."""
    out = farm.folder()
    config = small(steps=8, data=2, optimizer={"lr": 1e300, "clip": 0.0})
    run = farm.wait(farm.start(farm.write_call(out, recorded, config=config), 2, out))
    assert set(run.codes.values()) == {1}
    assert "is not finite" in run.logs and "step 2:" in run.logs
