"""A fork server whose ranks play a training instead of doing one, so that the sweep can be tested without torch.

Everything around the ranks is real: processes, forks, signals, exit codes, files. What a rank does is told by
``data.pattern`` of its configuration, a word and its arguments:

    ok                  make run.steps steps and write a result
    sleep SECONDS       as ok, but each step takes so long
    gate [REASON]       as ok, but attempt 0 waits at step 2 until there is a file "go" in the trial's directory; then rank 0 fails
                        for REASON, if there is one
    fail RANK REASON    RANK fails for REASON at step 2; its peers fail a moment later, of a broken connection
    once REASON         as fail 0, but only in attempt 0
    die RANK SIGNAL     RANK is killed by SIGNAL at step 2; its peers hang
    exit RANK CODE      RANK exits with CODE at step 2 without a word; its peers hang
    linger              write a result and go on for ever
    resume STEPS        stop after STEPS steps of an attempt, as after a checkpoint at a time limit, until run.steps is reached

Run as a program it is the fork_server. Each start of a rank adds a line to ``starts`` in the trial's directory.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

from trainer import fork_server
from trainer.shared.records.outcome import Reason
from trainer.shared.records.trial_files import RESULT, failure_file, write_outcome
from trainer.shared.run.derived import world_size_of
from trainer.shared.run.read import load
from trainer.shared.run.schema import TrainConfig


class Failed(Exception):
    """This rank fails, for a reason."""


class Rank:
    """One played rank."""

    def __init__(self, config: TrainConfig, out: Path, attempt: int):
        self.config, self.out, self.attempt = config, out, attempt
        self.rank = int(os.environ["RANK"])
        self.what, *self.arguments = config.data.pattern.split()
        self.steps = self._steps_before()

    def run(self) -> int:
        with (self.out / "starts").open("a") as stream:
            stream.write(f"{self.attempt} {self.rank}\n")
        print(f"rank {self.rank} of attempt {self.attempt} begins", flush=True)
        try:
            while self.steps < self.config.run.steps:
                self.step()
        except Failed as failure:
            reason, message = failure.args
            words = {"attempt": self.attempt, "rank": self.rank, "reason": reason, "message": message}
            write_outcome(self.out / failure_file(self.rank), words)
            if self.rank == 0:
                self.result("failed", reason, message)
            return 1
        except StopAsked as stop:
            self.result("stopped", stop.reason, "after a checkpoint")
            return 75
        self.result("done")
        while self.what == "linger":
            time.sleep(1)
        return 0

    def step(self) -> None:
        self.steps += 1
        time.sleep(float(self.arguments[0]) if self.what == "sleep" else 0.001)
        if self.rank == 0:
            line = {"attempt": self.attempt, "step": self.steps, "loss": 1 / self.steps, "step_time_s": 0.01}
            with (self.out / "metrics.jsonl").open("a") as stream:
                stream.write(json.dumps(line) + "\n")
        getattr(self, f"do_{self.what}", lambda *_: None)(*self.arguments)

    def do_gate(self, reason: str = "") -> None:
        while self.attempt == 0 and self.steps == 2 and not (self.out / "go").exists():
            time.sleep(0.02)
        if reason and self.attempt == 0:
            self.do_fail("0", reason)

    def do_fail(self, rank: str, reason: str) -> None:
        if self.steps == 2:
            if self.rank == int(rank):
                raise Failed(reason.replace("_", " "), "played failure")
            time.sleep(0.2)
            raise Failed(Reason.COMMUNICATION.value, "connection reset by peer")

    def do_once(self, reason: str) -> None:
        if self.attempt == 0:
            self.do_fail("0", reason)

    def do_die(self, rank: str, number: str) -> None:
        if self.steps == 2:
            if self.rank == int(rank):
                os.kill(os.getpid(), int(number))
            time.sleep(1000)

    def do_exit(self, rank: str, code: str) -> None:
        if self.steps == 2:
            if self.rank == int(rank):
                os._exit(int(code))
            time.sleep(1000)

    def do_resume(self, steps: str) -> None:
        if self.steps % int(steps) == 0 and self.steps < self.config.run.steps:
            raise StopAsked(Reason.TIME_LIMIT)

    def result(self, status: str, reason: str | None = None, message: str = "") -> None:
        if self.rank == 0:
            outcome = {"status": status, "reason": reason, "message": message, "attempt": self.attempt, "step_time_s": 0.01}
            write_outcome(self.out / RESULT, outcome | {"world_size": world_size_of(self.config.layout)})

    def _steps_before(self) -> int:
        """Where ``resume`` goes on."""
        path = self.out / "metrics.jsonl"
        return json.loads(path.read_text().splitlines()[-1])["step"] if self.what == "resume" and path.exists() else 0


class StopAsked(Exception):
    def __init__(self, reason: Reason):
        self.reason = reason.value


def entry(argv: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--attempt", type=int)
    arguments = parser.parse_args(argv)

    def stop(_number: int, _frame: object) -> None:
        raise StopAsked(Reason.PREEMPTED)

    signal.signal(signal.SIGTERM, stop)
    return Rank(load(arguments.config), arguments.out, arguments.attempt).run()


if __name__ == "__main__":
    fork_server.GRACE_S = 0.3
    fork_server.reply({"ready": True})
    fork_server.ForkServer(entry).serve()
    sys.exit(0)
