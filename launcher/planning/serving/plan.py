"""Every way to serve a model on a cluster predicted: the front, three recommendations, and what to relax where nothing keeps the limits.
Pure.

Rows that break a rule, do not fit, or serve less than what arrives are out, with the reason. The front are those that no other one beats in
both the time of a request and the cost of a token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from launcher.config.inference import SlaConfig, WorkloadConfig
from launcher.config.schema import Config
from launcher.cost.calibration import measured
from launcher.cost.inference import HostCosts, InferenceCase, InferenceEstimate, closed, opened, static
from launcher.cost.inputs.device import Device, check_network
from launcher.cost.inputs.shape import Shape
from launcher.cost.parts import scale
from launcher.cost.thresholds import FITS
from launcher.planning.serving.limits import clash, limits, outward
from launcher.planning.serving.rules import check
from launcher.planning.serving.space import name_of, serving_space, serving_space_beyond
from trainer.shared.run.rules import resolve_model

MEMORY = "memory: weights and one request's keys and values do not fit, or a whole static batch's"
SATURATED = "load: more arrives than is served"
DOMINATED = "dominated: another one answers as fast and costs no more"
NINE_OF_TEN = 1.645
"""Standard errors to either side that hold nine of ten."""


@dataclass(frozen=True)
class Relaxation:
    """Limits that have to give, all of them, each with the value that is enough, and the row of a plan that keeps them then."""

    limits: dict[str, float]
    plan: InferencePlan
    row: int


@dataclass(frozen=True)
class InferencePlan:
    """The rows of a space with what is predicted of each."""

    case: InferenceCase
    estimate: InferenceEstimate
    sla: SlaConfig
    device_hour: float
    dropped: dict[str, int]  # combinations that were not predicted, by reason
    rate: float | None = None  # requests per second that arrive, where they do
    among: np.ndarray | None = None  # of a search: which rows were measured, and may be recommended
    wider: InferencePlan | None = None  # where nothing keeps the limits: the same rows, and those of more devices than sla.devices

    @property
    def table(self) -> np.ndarray:
        return self.case.table

    @cached_property
    def values(self) -> dict[str, np.ndarray]:
        """What the limits are about, by name of the limit."""
        e, devices = self.estimate, self.table["tensor"] * self.table["pipeline"] * self.table["replicas"]
        tokens = e.throughput * np.asarray(self.case.output)
        cost = devices * self.device_hour / 3600 / tokens * 1e6
        return {
            "latency_ms": 1e3 * e.latency,
            "ttft_ms": 1e3 * e.ttft,
            "tpot_ms": 1e3 * e.tpot,
            "throughput": e.throughput,
            "devices": devices,
            "cost": cost,
        }

    @property
    def interval(self) -> tuple[float, float]:
        """Factors on a time between which it lies in nine of ten cases."""
        wide = math.exp(NINE_OF_TEN * self.case.constants.error_spread)
        return 1 / wide, wide

    @cached_property
    def possible(self) -> np.ndarray:
        """Whether a row is likely to fit and serves what arrives."""
        fits = np.asarray(self.estimate.fits >= FITS)
        return fits if self.among is None else fits & self.among

    @cached_property
    def front(self) -> np.ndarray:
        """Rows on the front, fastest first."""
        rows = np.flatnonzero(self.possible)
        return rows[front(self.values["latency_ms"][rows], self.values["cost"][rows])]

    @cached_property
    def kept(self) -> np.ndarray:
        """Whether a row keeps all limits."""
        return self.possible & (np.max(self.excess(), axis=0, initial=0.0) <= 1 + 1e-9)

    def corrected(self, first: np.ndarray, further: np.ndarray, fails: np.ndarray, among: np.ndarray | None = None) -> InferencePlan:
        """The same with factors on the seconds to the first token and per further one, without rows that were seen to fail."""
        e = self.estimate
        known = replace(e, prompt=scale(e.prompt, first), step=scale(e.step, further), fits=np.where(fails, 0.0, e.fits))
        if self.rate is not None:  # what arrives is served all the same: as much more is in flight as it takes longer
            known = replace(known, arriving=e.arriving * known.latency / e.latency)
        return replace(self, estimate=known, among=among, wider=None)

    def excess(self) -> np.ndarray:
        """By how much each limit that is given is missed, as a ratio above 1: (limits, rows)."""
        ratios = [
            limit / self.values[name] if name == "throughput" else self.values[name] / limit for name, limit in limits(self.sla).items()
        ]
        return np.array(ratios).reshape(-1, len(self.table))

    @property
    def out(self) -> dict[str, int]:
        """How many rows are out, by reason."""
        fits = np.asarray(self.estimate.room >= 1) if self.rate is not None else self.possible
        reasons = {MEMORY: int((~self.possible & ~fits).sum()), SATURATED: int((~self.possible & fits).sum())}
        reasons[DOMINATED] = int(self.possible.sum()) - len(self.front)
        return {reason: count for reason, count in reasons.items() if count}

    @property
    def most_served(self) -> tuple[float, int] | None:
        """Where more arrives than any row serves: the requests per second that the best one serves, rounded down, and that row.

        A full room serves as many as it has in the time for which each of them holds its place (``launcher.cost.inference.requests``)."""
        e = self.estimate
        full = np.asarray(e.room >= 1)
        if self.rate is None or self.possible.any() or not full.any():
            return None
        held = np.maximum(e.ttft, e.tpot) + (e.output - 1) * e.tpot
        served = np.where(full, e.replicas * e.running / held, 0.0)
        row = int(np.argmax(served))
        return outward(float(served[row]), "throughput", 4), row

    @property
    def hopeless(self) -> str:
        """Where no row is possible: why, and what would help; else nothing."""
        if self.possible.any():
            return ""
        if self.most_served is None:
            return "nothing fits; more devices, a smaller model or weights in fewer bits would help"
        most, row = self.most_served
        return (
            f"{self.rate:g} requests/s arrive and at most {most:g} are served, by {name_of(self.table[row])}; fewer have to arrive "
            f"(workload.rate={most:g}), or more devices serve them"
        )

    def best(self, name: str, among: np.ndarray) -> int | None:
        """The row of ``among`` (a mask) with the least of a value, the cheaper one where several are equal."""
        rows = np.flatnonzero(among)
        if not len(rows):
            return None
        least = -self.values[name][rows] if name == "throughput" else self.values[name][rows]
        return int(rows[np.lexsort((self.values["cost"][rows], np.round(least, 9)))[0]])

    @property
    def recommended(self) -> dict[str, int | None]:
        """The rows to choose from, by what they are best at."""
        return {
            "lowest latency": self.best("latency_ms", self.possible),
            "highest throughput": self.best("throughput", self.possible),
            "best under your limits": self.best("cost", self.kept),
        }

    def relaxations(self) -> list[Relaxation]:
        """Where no row keeps all limits: for each limit that alone stands in the way, how far it has to give and the row that then is best,
        the least step first, any one of which is enough; where no single one is, what all that are missed need together."""
        if self.wider is not None:
            return self.wider.relaxations()
        excess, names = self.excess(), list(limits(self.sla))
        rows = np.flatnonzero(self.possible)
        if self.kept.any() or not len(rows) or not names:
            return []
        found: list[tuple[float, str, int]] = []
        for i, name in enumerate(names):
            others = np.max(np.delete(excess[:, rows], i, axis=0), axis=0, initial=0.0) <= 1 + 1e-9
            if others.any():
                row = int(rows[others][np.argmin(excess[i, rows[others]])])
                found.append((float(excess[i, row]), name, row))
        if found:
            return [self._relaxation([name], row) for _, name, row in sorted(found)]
        row = int(rows[np.argmin(np.max(excess[:, rows], axis=0))])
        return [self._relaxation([name for i, name in enumerate(names) if excess[i, row] > 1 + 1e-9], row)]

    def _relaxation(self, names: Sequence[str], row: int) -> Relaxation:
        """``names`` as far as ``row`` needs it: in four digits, or in more where the limits would contradict each other."""
        for digits in (4, 6, 9, 17):
            enough: dict[str, Any] = {name: outward(float(self.values[name][row]), name, digits) for name in names}
            if not clash(replace(self.sla, **enough), int(self.case.output)):
                break
        return Relaxation(enough, self, row)


def front(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Positions that no other one beats in both values (both the less the better), in order of the first."""
    order = np.lexsort((second, first))
    best = np.minimum.accumulate(np.concatenate([[np.inf], second[order][:-1]]))
    return order[second[order] < best]


def plan_inference(config: Config) -> InferencePlan:
    """The plan of ``config``. ``ConfigError`` where what is asked contradicts itself."""
    check(config)
    table, dropped = serving_space(config)
    found = _predicted(config, table, dropped)
    if not found.kept.any() and len(beyond := serving_space_beyond(config)):
        found = replace(found, wider=_predicted(config, np.concatenate([table, beyond]), {}))
    return found


def _predicted(config: Config, table: np.ndarray, dropped: dict[str, int]) -> InferencePlan:
    """What is predicted of the rows of ``table``, whose requests in flight at a rate follow from it."""
    model, work, table = resolve_model(config.model), config.workload, table.copy()
    hardware = config.cluster.hardware
    device, costs = Device.of(hardware, config.cluster.gpus_per_node), None
    check_network(config.cluster)
    if hardware.calibration:
        device = replace(device, measured=measured(hardware, device))
        costs = HostCosts.of(hardware.calibration) if config.engine.own else None
    lengths, formats = (float(work.input), float(work.output)), (config.serving.weights, config.serving.kv)
    case = InferenceCase(Shape.of(model), table, *lengths, device, config.engine, *formats, costs=costs)
    found = estimated(case, work)
    if work.rate is not None:  # requests in flight follow from the rate
        table["batch"] = np.maximum(np.ceil(found.running), 1)
    return InferencePlan(case, found, config.sla, config.serving.device_hour, dropped, work.rate)


def estimated(case: InferenceCase, work: WorkloadConfig, rate: np.ndarray | None = None) -> InferenceEstimate:
    """Static batches where they are asked for or the engine knows no others; else a closed loop, or open arrivals (at ``rate``, by row)."""
    if work.rate is not None:
        return opened(case, work.rate if rate is None else rate)
    if work.concurrency is None:
        return static(case) if work.batch is not None or case.engine.batching != "continuous" else closed(case)
    found = closed(case)  # where it cannot be shared out evenly, some replicas have fewer
    return replace(found, arriving=np.minimum(found.arriving, work.concurrency / case.replicas))
