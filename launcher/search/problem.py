"""From a plan to the candidates of a search: which layouts enter, and how each is tried on as few nodes as keep its structure. Pure."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from launcher.config.schema import Config
from launcher.config.uncertainty import Widths
from launcher.cost.inputs.layouts import to_layout
from launcher.cost.model import estimate
from launcher.cost.thresholds import NEVER_TRIED
from launcher.cost.uncertainty import TimeSurrogate, Traits, columns
from launcher.planning.layout_names import overrides_of
from launcher.planning.plan import Plan
from launcher.search.candidates import candidates, needed
from launcher.search.policy import Policy, ScaledDownPlan, SearchTrial, TrialCost
from launcher.search.steps import expected_steps
from launcher.search.surrogate import Candidates
from trainer.shared.run.derived import world_size_of
from trainer.shared.run.errors import ConfigError, divisors
from trainer.shared.run.schema import LayoutConfig

HOPELESSLY_SLOW = 3.0
"""Layouts predicted this many times slower than the fastest are not candidates: no model is that wrong between two layouts."""
SHARDED = ("params", "grads", "optimizer")


@dataclass(frozen=True)
class SearchProblem:
    """The candidates of a search: rows of a plan, their scaled-down trials, and predictions of both."""

    config: Config
    table: np.ndarray  # layouts at full size
    candidates: Candidates
    small_table: np.ndarray
    small_batch: np.ndarray  # sequences of a step of the small trial
    small: ScaledDownPlan
    widths: Widths  # of predictions

    def policy(self) -> Policy:
        """The search of these candidates, from its beginning."""
        ranks = np.prod([self.small_table[name] for name in ("tensor", "pipeline", "context", "data")], axis=0)
        start, one = self.config.search.start_s, self.small.parts.sum(axis=1)
        run = self.config.run
        steps = expected_steps(self.config.search, run.steps, run.warmup_steps)
        price = TrialCost(ranks * (start + steps * one), ranks * (start + one))
        return Policy(self.candidates, self.config.search, self.small, price, self.widths)

    def layout(self, index: int) -> LayoutConfig:
        return to_layout(self.table[index])

    def trial_config(self, trial: SearchTrial) -> Config:
        """The run that measures ``trial``. The same once more has another seed: it is a trial of its own and takes as long."""
        run = dataclasses.replace(self.config.run, seed=self.config.run.seed + trial.repeats)
        if trial.full:
            return dataclasses.replace(self.config, layout=self.layout(trial.index), run=run)
        layout, batch = to_layout(self.small_table[trial.index]), int(self.small_batch[trial.index])
        per_node = self.config.cluster.gpus_per_node
        nodes = -(-world_size_of(layout) // per_node)
        cluster = dataclasses.replace(self.config.cluster, nodes=nodes)
        run = dataclasses.replace(run, global_batch=batch)
        return dataclasses.replace(self.config, layout=layout, run=run, cluster=cluster)

    def words(self, trial: SearchTrial) -> list[str]:
        """The overrides that make the trial out of ``config``."""
        config = self.trial_config(trial)
        made = overrides_of(config.layout, self.config.layout)
        if trial.repeats:
            made.append(f"run.seed={config.run.seed}")
        if not trial.full:
            made += [f"cluster.nodes={config.cluster.nodes}", f"run.global_batch={config.run.global_batch}"]
        return made

    def predicted(self, trial: SearchTrial) -> tuple[np.ndarray, float]:
        """Seconds by part and bytes that are predicted of ``trial``."""
        if trial.full:
            return self.candidates.parts[trial.index], float(self.candidates.memory[trial.index])
        return self.small.parts[trial.index], float(self.small.memory[trial.index])

    def interval(self, trial: SearchTrial) -> tuple[float, float]:
        """Seconds between which 80 % of such steps lie, before anything is measured."""
        parts = self.predicted(trial)[0][None, :]
        kind = Traits(parts / parts.sum(), self.candidates.features[trial.index : trial.index + 1])
        low, high = TimeSurrogate(parts.sum(axis=1), kind, self.widths).posterior().interval
        return float(low[0]), float(high[0])


def search_problem(config: Config, planned: Plan) -> SearchProblem:
    """Candidates for the layouts of ``planned``."""
    table = planned.space.table
    seconds, fits = planned.seconds, planned.estimate.fits
    hopeful = fits >= NEVER_TRIED
    if not hopeful.any():
        raise ConfigError(
            "no layout is likely to fit into memory; use more devices, a smaller model, or recompute more (trireme plan shows by how much)"
        )
    rows = np.flatnonzero(hopeful & (seconds <= HOPELESSLY_SLOW * seconds[hopeful].min()))
    chosen = table[rows]
    case = dataclasses.replace(planned.case, table=chosen)
    full = candidates(case, estimate(case))
    if config.search.nodes == "full":
        batch = np.full(len(rows), config.run.global_batch)
        return SearchProblem(config, chosen, full, chosen, batch, ScaledDownPlan(full.parts, full.memory), planned.widths)
    small_table, batch = shrunk(case, config.cluster.gpus_per_node, config.run.global_batch)
    if (small_table["data"] == chosen["data"]).all():
        return SearchProblem(config, chosen, full, chosen, batch, ScaledDownPlan(full.parts, full.memory), planned.widths)
    fewer = dataclasses.replace(case, table=small_table, global_batch=batch)
    predicted = estimate(fewer)
    small = ScaledDownPlan(columns(predicted.causes, len(rows)), needed(fewer, predicted))
    return SearchProblem(config, chosen, full, small_table, batch, small, planned.widths)


def shrunk(case: Any, gpus_per_node: int, global_batch: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns each layout with the fewest replicas (two, unless there is one) that fill whole nodes, keep every shard and fit as surely,
    and its batch. Micro-batches per replica stay; sharded states grow, so replicas are kept where memory is short."""
    table, full_fits = case.table, np.asarray(estimate(case).fits)
    small, step = table.copy(), np.zeros(len(table), dtype=int)
    folded = table["context"] * (table["tensor"] if case.trainer.memory.whole_experts else 1)
    experts = table["expert"] * table["expert_tensor"]
    unit = experts // np.gcd(experts, folded)  # replicas over which a set of experts is dealt out
    rows = table[["tensor", "pipeline", "context", "data", *SHARDED]].tolist()
    ladders = [
        ladder(t * p * c, d, tuple(shards), gpus_per_node, c, u) for (t, p, c, d, *shards), u in zip(rows, unit.tolist(), strict=True)
    ]
    undecided = np.ones(len(table), dtype=bool)
    while undecided.any():
        for i in np.flatnonzero(undecided):
            _resize(small, table, int(i), ladders[i][step[i]])
        batch = global_batch * small["data"] // table["data"]
        fits = np.asarray(estimate(dataclasses.replace(case, table=small, global_batch=batch)).fits)
        undecided &= (fits < 0.9 * full_fits) & (small["data"] < table["data"])
        step[undecided] += 1
    return small, batch


@cache
def ladder(model_ranks: int, data: int, shards: tuple[int, ...], gpus_per_node: int, context: int = 1, unit: int = 1) -> tuple[int, ...]:
    """Replicas that a trial may have, ascending, ``data`` last. States are sharded over data x ``context``; experts need a multiple of
    ``unit`` replicas."""
    kept = [factor for factor in shards if factor < data * context]
    fewer = [d for d in divisors(data)[:-1] if d >= 2 and d % unit == 0 and (model_ranks * d) % gpus_per_node == 0]
    return (*(d for d in fewer if all(d * context % factor == 0 for factor in kept)), data)


def _resize(small: np.ndarray, table: np.ndarray, i: int, data: int) -> None:
    context = int(table["context"][i])
    whole = int(table["data"][i]) * context
    small["data"][i] = data
    for name in SHARDED:
        small[name][i] = data * context if table[name][i] == whole else table[name][i]
