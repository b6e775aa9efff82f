"""What a job hangs in has a name, also where collectives complete late and never raise."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.farm import Farm, Finished
from tests.small_runs import small
from trainer.comm import watchdog
from trainer.comm.collectives import Group
from trainer.launch.failure import record_failure
from trainer.launch.rank_env import RankEnv
from trainer.shared.run.read import from_dict
from trainer.shared.run.rules import resolve
from trainer.shared.run.schema import TrainConfig
from trainer.step import Engine


class Silent:
    """A collective as NCCL's: a lost peer leaves it incomplete for ever, and no call raises."""

    def __init__(self, work: Any):
        self.work, self.done = work, threading.Event()
        threading.Thread(target=self._complete, daemon=True).start()

    def _complete(self) -> None:
        try:
            self.work.wait()
            self.done.set()
        except RuntimeError:
            pass

    def is_completed(self) -> bool:
        return self.done.is_set()

    def wait(self) -> None:
        self.done.wait()


def play(env: RankEnv, folder: Path, what: str, victim: int, config: dict[str, Any], silent: bool) -> None:
    """A training in which ``what`` happens to one rank in its fourth step."""
    from trainer.loop import train

    begun: list[watchdog.Watchdog] = []
    if silent:
        start = Group._start
        Group._start = lambda self, *a: _silenced(start(self, *a))  # type: ignore[method-assign,assignment,misc]
        watchdog.SILENCE_S = 8.0
        if what == "lost early" and env.rank == victim:
            watchdog.PERIOD_S = 600.0  # lost before its watchdog said anything
        begin = watchdog.Watchdog.__init__

        def deaf(self: watchdog.Watchdog, *a: Any) -> None:
            begun.append(self)
            begin(self, *a[:4], False, *a[5:])

        watchdog.Watchdog.__init__ = deaf  # type: ignore[method-assign]
    queue = Engine.queue

    def queued(self: Engine, step: int, *a: Any, **b: Any) -> Any:
        if step == 3 and env.rank == victim:
            if what != "hangs":
                while what == "lost late" and begun[0].beats < 2:
                    time.sleep(0.05)
                os.kill(os.getpid(), signal.SIGSTOP)  # as a node that is gone: nobody here sees it end
            wait_here_for_ever()
        return queue(self, step, *a, **b)

    Engine.queue = queued  # type: ignore[method-assign]
    try:
        train(resolve(from_dict(TrainConfig, config), env.world_size), env, folder, 0)
    except Exception as error:
        os._exit(record_failure(error, env, folder, 0))


def played(farm: Farm, world_size: int, **arguments: Any) -> Finished:
    out = farm.folder()
    return farm.wait(farm.start(farm.write_call(out, play, **arguments), world_size, out))


def wait_here_for_ever() -> None:
    time.sleep(600)


def _silenced(pending: Any) -> Any:
    if pending.work is not None:
        pending.work = Silent(pending.work)
    return pending


@pytest.mark.parametrize("silent", [False, True])
def test_a_rank_that_hangs_outside_of_any_collective_says_where(farm: Farm, silent: bool) -> None:
    config = small(steps=100, data=2, pipeline=2, run={"timeout_s": 6.0})
    run = played(farm, 4, what="hangs", victim=3, config=config, silent=silent)
    assert set(run.codes.values()) == {1}, run.logs
    assert run.failure(3)["reason"] == "node"
    assert "rank 3 waits in no collective: it was at wait_here_for_ever (test_watchdog.py" in run.failure(3)["message"]
    assert " over " in run.failure(0)["collective"] and "has not completed within 6 s" in run.failure(0)["message"]
    assert run.result["reason"] == "node" and run.result["message"].startswith("rank 3: "), "the cause is the run's reason"


@pytest.mark.parametrize("what", ["lost early", "lost late"])
def test_a_lost_rank_is_named_where_collectives_do_not_raise(farm: Farm, what: str) -> None:
    """By its silence, not by the time limit of collectives."""
    run = played(farm, 4, what=what, victim=2, config=small(steps=100, data=4, run={"timeout_s": 3000.0}), silent=True)
    assert run.codes == {0: 1, 1: 1, 2: -9, 3: 1}, run.logs
    for rank in (0, 1, 3):
        assert run.failure(rank)["reason"] == "communication"
        assert "rank 2 has said nothing for 8 s; no answer from rank 2" in run.failure(rank)["message"]
    assert run.result["reason"] == "communication"


def test_a_value_that_is_not_finite_is_named_where_collectives_do_not_raise(farm: Farm) -> None:
    config = small(steps=3, data=2, optimizer={"lr": 1e300}, run={"timeout_s": 60.0})
    run = played(farm, 2, what="nothing", victim=-1, config=config, silent=True)
    assert run.result["reason"] == "numerics" and "is not finite" in run.result["message"]
