"""Measurement of the time and memory of requests: ``python -m trainer`` with ``run.task=inference``, under any layout.

Weights are random, prompts synthetic, and every request generates its maximum of tokens: their values do not affect times. Requests arrive
in static batches, in a closed loop, or at random (``requests.mode``). A step is a batch, or as many requests as a replica has in
flight; ``run.steps`` of them are measured, the first ``run.warmup_steps`` left out. Rank 0 writes a line of ``metrics.jsonl`` for each, and
percentiles over all requests into ``result.json``.
"""

from __future__ import annotations

import json
import random
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from trainer.generate.broker import percentiles
from trainer.generate.generate import Decoder, PromptRequest, RequestUpdate, TextRow, check_prompts
from trainer.generate.ranks import world_of
from trainer.generate.session import Session
from trainer.launch.rank_env import RankEnv
from trainer.loop import collect_garbage_by_hand, versions
from trainer.shared.records.outcome import Status
from trainer.shared.records.summary import spread
from trainer.shared.records.trial_files import METRICS, RESULT, write_outcome
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.read import to_dict
from trainer.shared.run.resolved import ResolvedTrainConfig
from trainer.shared.run.schema import RequestsConfig
from trainer.state.parameters import OptimizerShard

AT_ONCE = 256
"""The most requests in flight per replica if they arrive at random; others wait."""
LONGEST_WAIT_S = 30.0
"""The longest wait of a turn for an arrival: other ranks wait in a collective meanwhile, which must not time out."""


def measure(config: ResolvedTrainConfig, env: RankEnv, out: Path, attempt: int) -> Status:
    """Measures on every rank of ``env``; rank 0 writes the results. ``ConfigError`` for a run without the section ``requests``."""
    if config.requests is None:
        raise ConfigError("run.task=inference needs the section 'requests'; use `trireme search task=inference`")
    asked = config.requests
    check_prompts([[0] * asked.input], [asked.output], config.model.seq)
    with world_of(config, env) as world:
        load = OfferedLoad(asked, config, lambda line: _tell(line, config, out, attempt))
        session = Session(config, world, draw)
        decoder = Decoder(session, asked.batch if asked.mode != "open" else AT_ONCE)
        collect_garbage_by_hand()
        decoder.run(load.hear, load.tell)
        ranks = world.group.gather_objects(_own(session, decoder))
        if world.rank == 0:
            write_outcome(out / RESULT, _result(config, load, ranks, attempt))
    return Status.DONE


def _own(session: Session, decoder: Decoder) -> dict[str, Any]:
    """Returns this rank's memory. The peak is the device's own if it records one, else computed from counted bytes."""
    rank, cached = session.rank, decoder.most_cached
    peak = rank.peak_memory() + (0 if rank.device.type == "cuda" else cached)
    return {"memory": rank.memory() | {"keys and values": cached}, "peak": peak, "host": socket.gethostname()}


def draw(owned: Sequence[OptimizerShard]) -> None:
    """Draws random weights small enough that no sum overflows."""
    for part in owned:
        part.weight.normal_(0.0, 0.02)


@dataclass
class TimedRequest:
    """A request under way: the times at which it was due and at which its first and last token came, in seconds of one clock."""

    due: float
    counts: bool  # false for requests that only spread the others out
    first: float = 0.0
    last: float = 0.0


class OfferedLoad:
    """The requests of rank 0, their arrivals and their durations. ``tell_step`` gets a line for every step."""

    def __init__(self, asked: RequestsConfig, config: ResolvedTrainConfig, tell_step: Callable[[dict[str, Any]], None]):
        self.asked, self.tell_step = asked, tell_step
        self.each = asked.batch * config.layout.data  # requests of a step
        self.steps, self.vocab = config.run.steps, config.model.vocab
        self.random = random.Random(config.run.seed)
        self.begun = self.done = 0
        self.next_due = 0.0
        self.open: dict[int, TimedRequest] = {}
        self.round: list[TimedRequest] = []
        self.round_began = 0.0
        self.rounds: list[tuple[float, list[TimedRequest]]] = []  # seconds, requests

    def hear(self, idle: bool) -> RequestUpdate:
        """Returns the requests that begin now."""
        if len(self.rounds) == self.steps:
            return RequestUpdate(dropped=frozenset(self.open), over=True)
        now = time.perf_counter()
        self.round_began = self.round_began or now
        due = {"static": self._batch, "closed": self._replacements, "open": self._arrivals}[self.asked.mode](now, idle)
        return RequestUpdate([self._request(at, tokens) for at, tokens in due])

    def _batch(self, now: float, idle: bool) -> list[tuple[float, int]]:
        return [(now, self.asked.output)] * (self.each if idle else 0)

    def _replacements(self, now: float, idle: bool) -> list[tuple[float, int]]:
        """Returns one request for each that ended. The first ones have fewer tokens, so that afterwards some end in every turn."""
        if self.begun == 0:
            return [(now, max(1, self.asked.output * (i + 1) // self.each)) for i in range(self.each)]
        return [(now, self.asked.output)] * (self.each - len(self.open))

    def _arrivals(self, now: float, idle: bool) -> list[tuple[float, int]]:
        """Returns the requests due by now, with exponential gaps. If nothing runs, waits for the next one."""
        rate = self.asked.rate or 1.0
        self.next_due = self.next_due or now
        if idle and self.next_due > now:
            time.sleep(min(self.next_due - now, LONGEST_WAIT_S))
            now = time.perf_counter()
        due = []
        while self.next_due <= now:
            due.append((self.next_due, self.asked.output))
            self.next_due += self.random.expovariate(rate)
        return due

    def _request(self, due: float, tokens: int) -> PromptRequest:
        name, self.begun = self.begun, self.begun + 1
        self.open[name] = TimedRequest(due, self.asked.mode != "closed" or name >= self.each)
        return PromptRequest(name, self.random.choices(range(self.vocab), k=self.asked.input), tokens, name=name)

    def tell(self, row: TextRow) -> None:
        """Records that a request has grown or ended."""
        timed = self.open[row.request.name]
        timed.last = time.perf_counter()
        timed.first = timed.first or timed.last
        if row.made.ended:
            del self.open[row.request.name]
            if timed.counts and len(self.rounds) < self.steps:
                self.round.append(timed)
                if len(self.round) == self.each:
                    self._end_round(timed.last)

    def _end_round(self, now: float) -> None:
        seconds, requests = now - self.round_began, self.round
        self.rounds.append((seconds, requests))
        self.round, self.round_began = [], now if self.asked.mode != "static" else 0.0
        self.tell_step({"step": len(self.rounds), **{name: fmean(values) for name, values in self.figures(requests).items()},
                        "tokens_per_s": len(requests) * self.asked.output / seconds})  # fmt: skip

    def figures(self, requests: Sequence[TimedRequest]) -> dict[str, list[float]]:
        """Returns seconds of some requests by kind of time."""
        further = max(self.asked.output - 1, 1)
        return {
            "latency_s": [r.last - r.due for r in requests],
            "ttft_s": [r.first - r.due for r in requests],
            "tpot_s": [(r.last - r.first) / further for r in requests],
        }


def _tell(line: dict[str, Any], config: ResolvedTrainConfig, out: Path, attempt: int) -> None:
    with (out / METRICS).open("a") as file:
        file.write(json.dumps({"attempt": attempt, **line, "step_time_s": line["latency_s"], "time": time.time()}) + "\n")
    print(f"step {line['step']}/{config.run.steps}  {line['latency_s']:.4g} s a request, {line['tpot_s']:.4g} s a token", flush=True)


def _result(config: ResolvedTrainConfig, load: OfferedLoad, ranks: Sequence[dict[str, Any]], attempt: int) -> dict[str, Any]:
    rounds = load.rounds[config.run.warmup_steps :]
    figures = load.figures([request for _, requests in rounds for request in requests])
    times = [fmean(load.figures(requests)["latency_s"]) for _, requests in load.rounds]
    rates = [len(requests) / seconds for seconds, requests in rounds]
    step_time, step_spread = spread(times[config.run.warmup_steps :])
    fullest = max(ranks, key=lambda rank: rank["peak"])
    served = sum(len(requests) for _, requests in rounds) / sum(seconds for seconds, _ in rounds)
    return {
        "status": Status.DONE.value,
        "attempt": attempt,
        **{name: percentiles(tuple(values)) for name, values in (figures | {"requests_per_s": rates}).items()},
        "step_times_s": times,
        "step_time_s": step_time,
        "step_time_spread_s": step_spread,
        "tokens_per_s": served * load.asked.output,
        "peak_memory_bytes": fullest["peak"],
        "memory": fullest["memory"],
        "world_size": len(ranks),
        "layout": to_dict(config.layout),
        "model": to_dict(config.model),
        "requests": to_dict(load.asked),
        "hosts": sorted({rank["host"] for rank in ranks}),
        "versions": versions(),
    }
