"""Every layout of the space, predicted and ordered, with a reason for each exclusion. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from launcher.config.hardware import typed
from launcher.config.rules import check_precision
from launcher.config.schema import ClusterConfig, Config
from launcher.config.search import SpaceConfig
from launcher.config.uncertainty import Widths
from launcher.cost.inputs.case import Case
from launcher.cost.inputs.layouts import to_layout, to_table
from launcher.cost.model import Estimate
from launcher.cost.prediction import CostModel, Prediction, explain
from launcher.cost.recomputing import of_use, plain
from launcher.cost.thresholds import CANNOT_FIT, FITS
from launcher.cost.uncertainty import Mixture, TimeSurrogate, Traits, columns, coordinates, fastest, most_telling
from launcher.planning.expressible import expressible, refuse_axes, within_told
from launcher.planning.layout_filter import describe
from launcher.planning.space import Space, space, violations
from trainer.shared.run.derived import resolve_model
from trainer.shared.run.errors import ConfigError, listed
from trainer.shared.run.limits.layout import check_offload
from trainer.shared.run.limits.training import check_phases
from trainer.shared.run.phases import PhaseTable
from trainer.shared.run.schema import LayoutConfig

IN, AT_EDGE, MEMORY, DOMINATED = range(4)
LISTED = 1000
"""The number of fastest layouts whose covariances are computed, a square matrix of that size."""
ASKED = "asked: does not have the values given for layout keys"
PHASES = "phases: a layout of all run.phases divides the batch and the sequences of each"
SEQUENCES = "async: run.async_tensor is for layouts with sequence parallelism"
HEADS = "exchange: run.context_exchange=all_to_all needs a multiple of context key and value heads on a tensor rank"
VERDICTS = (
    "in",
    "edge: less likely than not to fit into memory",
    "memory: does not fit",
    "dominated: a layout with the same ranks is as fast and needs no more memory",
)


@dataclass(frozen=True)
class Plan:
    """The layouts of a space with their predictions; ``verdict`` holds an index into ``VERDICTS`` per layout."""

    space: Space
    case: Case
    estimate: Estimate
    verdict: np.ndarray
    widths: Widths  # of the errors of ``estimate``

    @cached_property
    def seconds(self) -> np.ndarray:
        """Caches the step time per layout: ``estimate.step_time`` sums the parts on every access."""
        return self.estimate.step_time

    @cached_property
    def chances(self) -> np.ndarray:
        """Returns the probability per layout that it is the fastest that fits; 0 for one that recomputes activations that surely fit."""
        return fastest(self._surrogate, of_use(self.estimate.fits, plain(self.space.table)))

    @cached_property
    def candidates(self) -> np.ndarray:
        """Returns the rows that are likely to fit: in, or dominated by one that is."""
        return np.flatnonzero((self.verdict == IN) | (self.verdict == DOMINATED))

    @property
    def believed(self) -> Mixture:
        """Returns the distribution of each layout's step time."""
        return self._surrogate.posterior()

    @cached_property
    def _surrogate(self) -> TimeSurrogate:
        parts = columns(self.estimate.causes, len(self.seconds))
        return TimeSurrogate(self.seconds, Traits(parts / self.seconds[:, None], coordinates(self.space.table)), self.widths)

    @cached_property
    def order(self) -> np.ndarray:
        """Returns the rows that are in, fastest first."""
        return self.fastest(IN)

    def fastest(self, verdict: int) -> np.ndarray:
        """Returns the rows of one verdict, fastest first."""
        rows = np.flatnonzero(self.verdict == verdict)
        return rows[np.argsort(self.seconds[rows], kind="stable")]

    @property
    def out(self) -> dict[str, int]:
        """Counts the predicted layouts that are out by verdict; ``space.dropped`` counts those that were not predicted."""
        counts = Counter({VERDICTS[code]: int((self.verdict == code).sum()) for code in (AT_EDGE, MEMORY, DOMINATED)})
        return {reason: count for reason, count in counts.most_common() if count}

    def most_telling(self, count: int) -> tuple[list[int], list[float]]:
        """Returns up to ``count`` rows of ``order`` whose measurement reduces the uncertainty of all step times most, and the relative
        spread of a step time before the first and after each."""
        rows = self.order[:LISTED]
        some, left = most_telling(self.widths, self._surrogate.traits.rows(rows), [np.arange(len(rows))] * count)
        return [int(rows[i]) for i in some], left

    def layout(self, row: int) -> LayoutConfig:
        return to_layout(self.space.table[row])

    def prediction(self, row: int) -> Prediction:
        return explain(self.estimate, row, self.case, self.widths)

    def find(self, layout: LayoutConfig) -> int | None:
        """Returns the row of ``layout``, or None if it is not in the space."""
        wanted = to_table([layout])[0]
        same = np.ones(len(self.space.table), dtype=bool)
        for name in self.space.table.dtype.names or ():
            same &= self.space.table[name] == wanted[name]
        rows = np.flatnonzero(same)
        return int(rows[0]) if len(rows) else None


def plan(config: Config, limits: SpaceConfig | None = None, wanted: Mapping[str, Sequence[Any]] | None = None) -> Plan:
    """Plans the model, global batch, precision and cluster of ``config``; ignores its layout.

    ``wanted`` keeps only layouts with given values, by column. ``ConfigError`` if there are none.
    """

    check_precision(config)
    check_phases(config.train_config())
    refuse_axes(config.trainer, wanted or {})

    def within(limits: SpaceConfig) -> Space:
        limits = within_told(limits, config.trainer)
        check_offload(max(limits.offload, default=0.0), config.optimizer.kind)
        if config.trainer.embedded and (config.run.compile or config.model.experts.balance_loss):  # blocks and losses of whole sequences
            limits = dataclasses.replace(limits, max_slices=1)
        return expressible(of_phases(config, limits), config.trainer)

    found = narrowed(within(limits or config.search.space), wanted or {}, lambda: within(config.search.space))
    if config.run.async_tensor and config.trainer.embedded:
        found = sharding_sequences(found)
    if config.run.context_exchange == "all_to_all" and config.trainer.embedded:
        found = exchanging_heads(found, config.model.kv_heads or config.model.heads)
    cost = CostModel(config.cluster, config.trainer)
    case = cost.case(config.model, found.table, config.run, config.tune, config.optimizer)
    predicted = cost.estimate(config.model, found.table, config.run, config.tune, config.optimizer)
    return Plan(found, case, predicted, judge(found.table, predicted), cost.widths(case))


def of_phases(config: Config, limits: SpaceConfig) -> Space:
    """Returns the layouts that every phase of the run can have."""
    phases, world_size = PhaseTable.of(config.run, config.model.seq).phases, config.cluster.world_size
    batches = [phase.global_batch for phase in phases]
    try:
        found = space(config.model, config.cluster, math.gcd(*batches), limits)
    except ConfigError as error:
        if not config.run.phases:
            raise
        raise ConfigError(
            f"run.phases: one layout has to divide the batches {', '.join(map(str, batches))} of all phases: {error}"
        ) from None
    keep = np.ones(len(found.table), dtype=bool)
    for phase in phases:
        model = resolve_model(dataclasses.replace(config.model, seq=phase.seq))
        keep &= violations(found.table, model, world_size, phase.global_batch) < 0
    if not keep.any():
        raise ConfigError(f"{PHASES}, and none does; give run.phases[].seq or run.phases[].global_batch more factors in common")
    return kept(found, keep, PHASES)


def narrowed(found: Space, wanted: Mapping[str, Sequence[Any]], usual: Callable[[], Space]) -> Space:
    """Returns the layouts of ``found`` that have the ``wanted`` values. If none has, the error also names the values in ``usual``, since
    ``found`` may end at the requested ones."""
    keep = np.ones(len(found.table), dtype=bool)
    for name, values in wanted.items():
        has = np.isin(found.table[name], list(values))
        if not has.any():
            table = usual().table
            refuse_pair(name, table[np.isin(table[name], list(values))], wanted)
            codes = np.union1d(found.table[name], table[name])[:12].tolist()
            there = [describe(name, [code]).partition("=")[2] for code in codes]
            raise ConfigError(f"no layout that obeys the rules has {describe(name, values)}; there are some with {listed(there)}")
        keep &= has
    if not keep.any():
        asked = " and ".join(describe(name, values) for name, values in wanted.items())
        raise ConfigError(f"no layout that obeys the rules has {asked} at once; give more values to one of them")
    return kept(found, keep, ASKED)


def refuse_pair(name: str, having: np.ndarray, wanted: Mapping[str, Sequence[Any]]) -> None:
    """Raises ``ConfigError`` if no layout of ``having`` (those with the wanted ``name``) has the wanted values of another column."""
    for other, values in wanted.items():
        if other == name or not len(having) or np.isin(having[other], list(values)).any():
            continue
        there = describe(other, np.unique(having[other])[:12].tolist())
        raise ConfigError(
            f"no layout that obeys the rules has {describe(name, wanted[name])} and {describe(other, values)} at once; there are some with "
            f"{describe(name, wanted[name])} and {there}"
        )


def sharding_sequences(found: Space) -> Space:
    """Keeps the layouts of ``found`` with sequence parallelism, which ``run.async_tensor`` needs."""
    keep = found.table["sequence_parallel"]
    if not keep.any():
        raise ConfigError("run.async_tensor=true is for layouts with layout.sequence_parallel=true, and there are none; leave it out")
    return kept(found, keep, SEQUENCES)


def exchanging_heads(found: Space, heads: int) -> Space:
    """Keeps the layouts of ``found`` whose context ranks can be dealt out ``heads``, of keys and values, of a tensor rank."""
    keep = heads // found.table["tensor"] % found.table["context"] == 0
    if not keep.any():
        raise ConfigError(
            f"run.context_exchange=all_to_all deals out the {heads} key and value heads of the model, and no layout has a tensor x context "
            "that divides them; use all_gather, ring, or another layout.context"
        )
    return kept(found, keep, HEADS)


def kept(found: Space, keep: np.ndarray, reason: str) -> Space:
    """Keeps some layouts of ``found``."""
    return Space(found.table[keep], found.dropped | ({reason: int((~keep).sum())} if not keep.all() else {}))


def judge(table: np.ndarray, predicted: Estimate) -> np.ndarray:
    """Returns a verdict per layout. A layout near the memory limit is never dominated: the one that beats it may not fit."""
    verdict = np.where(predicted.fits >= FITS, IN, np.where(predicted.fits >= CANNOT_FIT, AT_EDGE, MEMORY))
    rows = np.flatnonzero(verdict == IN)
    groups = (table["context"][rows].astype(np.int64) * 2**20 + table["tensor"][rows]) * 2**20 + table["pipeline"][rows]
    front = pareto(groups, predicted.step_time[rows], predicted.memory_total[rows])
    verdict[rows[~front]] = DOMINATED
    return verdict


def pareto(group: np.ndarray, time: np.ndarray, memory: np.ndarray) -> np.ndarray:
    """Marks the elements that are the fastest of their group, or need less memory than all faster ones of it."""
    order = np.lexsort((memory, time, group))
    keep = np.zeros(len(order), dtype=bool)
    starts = np.flatnonzero(np.r_[True, np.diff(group[order]) != 0]) if len(order) else np.array([], dtype=int)
    for start, end in zip(starts, [*starts[1:], len(order)]):
        need = memory[order[start:end]]
        least = np.minimum.accumulate(need)
        keep[order[start:end]] = np.r_[True, need[1:] < least[:-1]]
    return keep


def world(cluster: ClusterConfig) -> str:
    """Returns a heading such as ``128 x 8 a100_80``: the device as ``hardware=`` takes it."""
    return f"{cluster.nodes} x {cluster.gpus_per_node} {typed(cluster.hardware.name)}"
