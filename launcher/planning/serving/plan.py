"""Predictions of every way to serve a model on a cluster: the front, three recommendations, and relaxations if no row keeps the limits.
Pure.

Rows that break a rule, do not fit, or serve less than arrives are out, with the reason. The front holds the rows that no other one beats in
both request time and cost per token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from launcher.config.engine import released
from launcher.config.inference import SlaConfig, WorkloadConfig
from launcher.config.schema import Config
from launcher.cost.calibration import measured
from launcher.cost.inference import HostCosts, InferenceCase, InferenceEstimate, closed, opened, static
from launcher.cost.inference.case import NINE_OF_TEN
from launcher.cost.inputs.device import Device, check_network
from launcher.cost.inputs.shape import Shape
from launcher.cost.parts import scale
from launcher.cost.thresholds import FITS
from launcher.planning.serving.limits import clash, limits, outward
from launcher.planning.serving.rules import check
from launcher.planning.serving.space import name_of, serving_space, serving_space_beyond
from trainer.shared.run.derived import resolve_model

MEMORY = "memory: weights and one request's keys and values do not fit, or a whole static batch's"
SATURATED = "load: more arrives than is served"
DOMINATED = "dominated: another one answers as fast and costs no more"


@dataclass(frozen=True)
class Relaxation:
    """Limits to relax together, each with a sufficient value, and the row of a plan that then keeps them."""

    limits: dict[str, float]
    plan: InferencePlan
    row: int


@dataclass(frozen=True)
class InferencePlan:
    """The rows of a space with their predictions."""

    case: InferenceCase
    estimate: InferenceEstimate
    sla: SlaConfig
    device_hour: float
    dropped: dict[str, int]  # combinations that were not predicted, by reason
    rate: float | None = None  # arriving requests per second, in an open loop
    among: np.ndarray | None = None  # in a search: the measured rows, which may be recommended
    wider: InferencePlan | None = None  # if no row keeps the limits: also rows with more devices than sla.devices

    @property
    def table(self) -> np.ndarray:
        return self.case.table

    @cached_property
    def values(self) -> dict[str, np.ndarray]:
        """Returns the quantity that each limit bounds, by the limit's name."""
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
        """Returns the factors on a predicted time between which nine of ten measurements lie."""
        wide = math.exp(NINE_OF_TEN * self.case.error_spread)
        return 1 / wide, wide

    @cached_property
    def possible(self) -> np.ndarray:
        """Marks the rows that are likely to fit and serve all arrivals."""
        fits = np.asarray(self.estimate.fits >= FITS)
        return fits if self.among is None else fits & self.among

    @cached_property
    def front(self) -> np.ndarray:
        """Returns the rows on the front, fastest first."""
        rows = np.flatnonzero(self.possible)
        return rows[front(self.values["latency_ms"][rows], self.values["cost"][rows])]

    @cached_property
    def kept(self) -> np.ndarray:
        """Marks the rows that keep all limits."""
        return self.possible & (np.max(self.excess(), axis=0, initial=0.0) <= 1 + 1e-9)

    def corrected(self, first: np.ndarray, further: np.ndarray, fails: np.ndarray, among: np.ndarray | None = None) -> InferencePlan:
        """Returns the plan with factors on the seconds to the first token and per further one, without rows that failed."""
        e = self.estimate
        known = replace(e, prompt=scale(e.prompt, first), step=scale(e.step, further), fits=np.where(fails, 0.0, e.fits))
        if self.rate is not None:  # all arrivals are served: requests in flight grow in proportion to the latency
            known = replace(known, arriving=e.arriving * known.latency / e.latency)
        return replace(self, estimate=known, among=among, wider=None)

    def excess(self) -> np.ndarray:
        """Returns the ratio by which each set limit is missed, above 1 where it is: (limits, rows)."""
        ratios = [
            limit / self.values[name] if name == "throughput" else self.values[name] / limit for name, limit in limits(self.sla).items()
        ]
        return np.array(ratios).reshape(-1, len(self.table))

    @property
    def out(self) -> dict[str, int]:
        """Counts the rows that are out, by reason."""
        fits = np.asarray(self.estimate.room >= 1) if self.rate is not None else self.possible
        reasons = {MEMORY: int((~self.possible & ~fits).sum()), SATURATED: int((~self.possible & fits).sum())}
        reasons[DOMINATED] = int(self.possible.sum()) - len(self.front)
        return {reason: count for reason, count in reasons.items() if count}

    @property
    def most_served(self) -> tuple[float, int] | None:
        """Returns the best row's requests per second, rounded down, and that row, if more arrive than any row serves; else None.

        A full replica serves its number of slots in the time for which a request holds one (``launcher.cost.inference.requests``)."""
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
        """Says why no row is possible and how to change that; empty if one is."""
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
        """Returns the row of ``among`` (a mask) that is best by a value, the cheaper one of equals; None if the mask is empty."""
        rows = np.flatnonzero(among)
        if not len(rows):
            return None
        least = -self.values[name][rows] if name == "throughput" else self.values[name][rows]
        return int(rows[np.lexsort((self.values["cost"][rows], np.round(least, 9)))[0]])

    @property
    def recommended(self) -> dict[str, int | None]:
        """Returns the recommended rows, by their strength."""
        return {
            "lowest latency": self.best("latency_ms", self.possible),
            "highest throughput": self.best("throughput", self.possible),
            "best under your limits": self.best("cost", self.kept),
        }

    def relaxations(self) -> list[Relaxation]:
        """Returns alternatives if no row keeps all limits. Each relaxes one limit, as far as needed, with the row that is best then, the
        smallest step first; if relaxing one limit is not enough, the only alternative relaxes all missed limits together."""
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
        """Relaxes the limits ``names`` as far as ``row`` needs, to four digits, or more if the limits would contradict each other."""
        for digits in (4, 6, 9, 17):
            enough: dict[str, Any] = {name: outward(float(self.values[name][row]), name, digits) for name in names}
            if not clash(replace(self.sla, **enough), int(self.case.output)):
                break
        return Relaxation(enough, self, row)


def front(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Returns the positions that no other one beats in both values (less is better), in order of the first."""
    order = np.lexsort((second, first))
    best = np.minimum.accumulate(np.concatenate([[np.inf], second[order][:-1]]))
    return order[second[order] < best]


def plan_inference(config: Config) -> InferencePlan:
    """Plans ``config``. ``ConfigError`` if its settings contradict each other."""
    config = replace(config, engine=released(config.engine))
    check(config)
    table, dropped = serving_space(config)
    found = _predicted(config, table, dropped)
    if not found.kept.any() and len(beyond := serving_space_beyond(config)):
        found = replace(found, wider=_predicted(config, np.concatenate([table, beyond]), {}))
    return found


def _predicted(config: Config, table: np.ndarray, dropped: dict[str, int]) -> InferencePlan:
    """Predicts the rows of ``table``, whose requests in flight follow from the arrival rate if there is one."""
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
    """Estimates static batches if configured or if the engine has no others; else a closed loop, or open arrivals (at ``rate``, by row)."""
    if work.rate is not None:
        return opened(case, work.rate if rate is None else rate)
    if work.concurrency is None:
        return static(case) if work.batch is not None or case.engine.batching != "continuous" else closed(case)
    found = closed(case)  # if it cannot be divided evenly, some replicas have fewer
    return replace(found, arriving=np.minimum(found.arriving, work.concurrency / case.replicas))
