"""A search over a table of published trials in place of a cluster: the same policy, measured times from the table. Pure.

Rows of one model, sequence length, device and number of devices are one search; they may differ in everything else: layout,
kernel, batch (times are compared per token). Rows that differ in nothing but what was measured are one trial, as they would be on a
cluster. The cost of a trial is counted as a cluster would charge it: ``start_s``, then
warm-up and measured steps on all devices, where a trial that cannot win, or whose step time is known, is ended as soon as the search allows
it, and one that runs out of memory ends in its first step. The grid runs every row to the end. Tables tell one time of a run, not how much
its steps scatter: all steps of a row take that time, and the search takes single ones to be off as usual (``USUAL_SCATTER``), unless it is
given steps that do scatter (``Scatter``). ``search.enough=0`` counts all steps of trials that can win.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol

import numpy as np

from launcher.config.schema import HardwareConfig
from launcher.config.search import SearchConfig
from launcher.config.trainer import TrainerProfile
from launcher.config.uncertainty import Widths
from launcher.cost.recomputing import plain
from launcher.cost.uncertainty import coordinates
from launcher.search.policy import Policy, Stop, TrialCost, TrialObservation
from launcher.search.steps import USUAL_SCATTER, ending, enough_of, expected_steps, noise_of, scatter_of
from launcher.search.surrogate import Candidates
from launcher.tables.canonical import UNKNOWN, MeasuredRun, Unanswerable
from launcher.tables.cases import TableCase, table_case
from launcher.tables.predictions import predict_rows
from launcher.tables.validation import short
from trainer.shared.records.outcome import Reason

MIN_ROWS = 5
"""Rows that ran which a table needs to be worth a search."""
LAYOUTS = 3
"""Different layouts that it needs."""
ATTENTION = ("unfused", "fused_softmax", "tiled", "flash1", "flash2")


class Scatter(Protocol):
    """How steps differ from the time of their run."""

    def __call__(self, count: int) -> Sequence[float]:
        """Factors of ``count`` steps of a trial, the warm-up's but the first before the others."""


@dataclass(frozen=True)
class MeasuredSweep:
    """The trials of one search."""

    name: str
    cases: list[TableCase]
    seconds: np.ndarray  # measured step time per trial; inf: did not run
    out_of_memory: np.ndarray  # true if the run failed with too little memory
    tokens: np.ndarray  # tokens of a step and device, per trial

    def __len__(self) -> int:
        return len(self.cases)

    @property
    def cost(self) -> np.ndarray:
        """What the search minimises: seconds per token and device."""
        return self.seconds / self.tokens


@dataclass(frozen=True)
class Step:
    """One trial of a replay."""

    row: int  # number in the CSV
    predicted_s: float  # by the uncorrected cost model
    measured_s: float | None
    behind_best: float | None  # fraction by which it is slower than the table's best
    gpu_hours: float
    stopped: bool  # it was stopped because it could not win
    measured_steps: int  # after its warm-up


@dataclass(frozen=True)
class Replay:
    """How a search of one table went."""

    name: str
    rows: int  # that differ in more than what was measured
    ran: int
    steps: list[Step]
    grid_gpu_hours: float
    reason: str  # why it stopped
    doubt: float | None  # probability that an untried layout is faster by more than the tolerance, as the search believed in the end
    tolerance: float
    behind: float | None  # how far the layout that the search chose is behind the table's best; None: no trial ran

    @property
    def trials_to_best(self) -> int | None:
        """Trials until one within the tolerance of the table's best was measured; None: never."""
        within = (i for i, s in enumerate(self.steps, 1) if s.behind_best is not None and s.behind_best <= self.tolerance)
        return next(within, None)

    @property
    def gpu_hours(self) -> float:
        return sum(step.gpu_hours for step in self.steps)


def tables(
    rows: Sequence[MeasuredRun], hardware: dict[str, HardwareConfig], trainer: TrainerProfile | None = None, least: int = MIN_ROWS
) -> list[MeasuredSweep]:
    """The searches that ``rows`` contain: groups with at least ``least`` rows that ran and three different layouts, or two where two rows
    are enough. ``trainer`` replaces the rows' own."""
    groups: dict[tuple[Any, ...], list[MeasuredRun]] = defaultdict(list)
    keys = ("source", "model", "layers", "hidden", "heads", "ffn", "vocab", "seq", "hardware", "memory_gb", "gpus", "precision")
    for row in rows:
        if "global_batch" not in row.assumed and (row.step_seconds or row["oom"] is not None):
            groups[tuple(row.stated(key) for key in keys)].append(row)
    found = []
    for group in groups.values():
        table = _table(group, hardware, trainer)
        layouts = {q.layout.tobytes() + repr(q.trainer).encode() for q in table.cases}
        if np.isfinite(table.seconds).sum() >= least and len(layouts) >= min(least, LAYOUTS):
            found.append(without_repeats(table))
    return found


def without_repeats(table: MeasuredSweep) -> MeasuredSweep:
    """Every trial once: of rows that say the same of all that a prediction depends on (and of their own trainer, where another one replaces
    it), the median of those that ran."""
    groups: dict[object, list[int]] = defaultdict(list)
    for i, case in enumerate(table.cases):
        asked = (case.shape, case.global_batch, case.device, case.constants, case.precision, case.trainer)
        own = (case.layout.tobytes(), case.row["trainer"], case.row["trainer_changes"])
        groups[own, repr(asked)].append(i)
    first = [members[0] for members in groups.values()]
    seconds = np.array([_median_of_those_that_ran(table.seconds[members]) for members in groups.values()])
    short_of_memory = np.array([table.out_of_memory[members].any() for members in groups.values()])
    cases = [table.cases[i] for i in first]
    return MeasuredSweep(table.name, cases, seconds, short_of_memory & np.isinf(seconds), table.tokens[first])


def _median_of_those_that_ran(seconds: np.ndarray) -> float:
    ran = seconds[np.isfinite(seconds)]
    return float(np.median(ran)) if len(ran) else np.inf


def replay(
    table: MeasuredSweep,
    settings: SearchConfig,
    steps: int = 10,
    warmup_steps: int = 2,
    widths: Widths | None = None,
    scatter: Scatter | None = None,
) -> Replay:
    """Search ``table`` with trials of ``steps`` steps, ``warmup_steps`` of them not measured."""
    candidates = _candidates(table)
    one = candidates.seconds * table.tokens
    expected = expected_steps(settings, steps, warmup_steps)
    policy = Policy(candidates, settings, price=TrialCost(settings.start_s + expected * one, settings.start_s + one), widths=widths)
    best = float(table.cost.min())
    done: list[Step] = []
    seen: list[list[float]] = []  # steps of earlier trials
    while not isinstance(proposed := policy.ask(), Stop):
        trial = proposed[0]
        i, ran = trial.index, bool(np.isfinite(table.cost[trial.index]))
        known = _known_scatter(seen, scatter)
        shown, reason = (
            _run(float(table.cost[i]), trial.prune_above_s, settings, (steps, warmup_steps), known, scatter) if ran else ([], None)
        )
        seen.append(shown)
        spent = _gpu_hours(table, i, settings, warmup_steps + len(shown), float(candidates.seconds[i]))
        behind, seconds = (float(table.cost[i] / best - 1), float(table.seconds[i])) if ran else (None, None)
        stopped = reason is Reason.CANNOT_WIN
        done.append(Step(table.cases[i].row.number, float(one[i]), seconds, behind, spent, stopped, len(shown)))
        if not ran:
            reason = Reason.OUT_OF_MEMORY if table.out_of_memory[i] else Reason.ERROR
        told = median(shown) if shown else math.inf
        noise = noise_of(shown, known) if scatter else USUAL_SCATTER / math.sqrt(max(len(shown), 1))
        policy.tell(trial, TrialObservation(told, reason or Reason.ERROR, noise, gpu_hours=spent))
    grid = float(_grid(table, candidates, settings, steps).sum())
    ranked = policy.ranking()
    chosen = float(table.cost[ranked[0]] / best - 1) if ranked else None
    return Replay(
        table.name,
        len(table),
        int(np.isfinite(table.seconds).sum()),
        done,
        grid,
        proposed.reason,
        proposed.doubt,
        settings.tolerance,
        chosen,
    )


def grid_gpu_hours(table: MeasuredSweep, settings: SearchConfig, steps: int) -> np.ndarray:
    """(n,) GPU-hours of each trial where it runs to its end."""
    return _grid(table, _candidates(table), settings, steps)


def _grid(table: MeasuredSweep, candidates: Candidates, settings: SearchConfig, steps: int) -> np.ndarray:
    return np.array([_gpu_hours(table, i, settings, steps, float(candidates.seconds[i])) for i in range(len(table))])


def _known_scatter(seen: Sequence[Sequence[float]], scatter: Scatter | None) -> float | None:
    """What a search knows of how much single steps scatter: nothing before a trial had enough of them; then what they say, or, where all
    steps of a table take the same time, what is usual."""
    own = scatter_of(seen)
    return own if own is None or scatter is not None else USUAL_SCATTER


def _run(
    took: float, cut: float | None, settings: SearchConfig, steps: tuple[int, int], known: float | None, scatter: Scatter | None
) -> tuple[list[float], Reason | None]:
    """The measured steps of a trial that takes ``took``, as far as a search lets it run, and why it ended it. ``steps``: all, and those of
    the warm-up."""
    count, warmup = steps
    factors = [1.0] * (count - 1) if scatter is None else scatter(count - 1)
    warm, measured = ([took * factor for factor in some] for some in (factors[: warmup - 1], factors[max(warmup - 1, 0) :]))
    for shown in range(1, len(measured) + 1):
        if reason := ending(measured[:shown], warm, cut, known, enough_of(settings)):
            return measured[:shown], reason
    return measured, None


def _table(rows: Sequence[MeasuredRun], hardware: dict[str, HardwareConfig], trainer: TrainerProfile | None) -> MeasuredSweep:
    """The rows that the cost model can express."""
    found, kept = [], []
    for row in rows:
        try:
            found.append(table_case(row, hardware, trainer))
            kept.append(row)
        except Unanswerable:
            continue
    seconds = np.array([row.step_seconds or np.inf for row in kept])
    tokens = np.array([case.global_batch * case.shape.seq / case.row["gpus"] for case in found])
    first = rows[0]
    name = f"{short(first['source'])}: {first['model']} seq {first['seq']} {first['gpus']} x {first['hardware']}"
    return MeasuredSweep(name, found, seconds, np.array([row["oom"] is True for row in kept]), tokens)


def _candidates(table: MeasuredSweep) -> Candidates:
    predicted = predict_rows(table.cases)
    parts = np.array([a.causes for a in predicted])
    layouts = np.array([q.layout for q in table.cases], dtype=table.cases[0].layout.dtype)
    kernels = [
        [1.0 * (q.trainer.kernels.attention == name) for name in ATTENTION] + [1.0 * q.trainer.kernels.fused_norm] for q in table.cases
    ]
    memory = np.array([a.memory_bytes for a in predicted])
    features = np.concatenate([coordinates(layouts), np.array(kernels)], axis=1)
    trainers = np.unique([case.row["trainer"] or UNKNOWN for case in table.cases], return_inverse=True)[1]
    rest = np.unique([repr((case.global_batch, case.trainer, case.constants)) for case in table.cases], return_inverse=True)[1]
    return Candidates(parts / table.tokens[:, None], memory, features, table.cases[0].device.memory, plain(layouts, rest), trainers)


def _gpu_hours(table: MeasuredSweep, i: int, settings: SearchConfig, steps: int, predicted: float) -> float:
    """GPU-hours of a trial of ``steps`` steps; one that does not run ends within its first, as long as it is predicted to take."""
    one = table.seconds[i] if np.isfinite(table.seconds[i]) else predicted * table.tokens[i]
    gpus = table.cases[i].row["gpus"] or 1
    return float((settings.start_s + one * (steps if np.isfinite(table.seconds[i]) else 1)) * gpus / 3600)
