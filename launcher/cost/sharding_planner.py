"""The best {params, grads, optimizer} sharding factors for a given tensor, pipeline and data degree, under memory.

``choices`` predicts every allowed combination with the cost model: reduce-scatter and all-gather by levels, overlap with
computation, the optimizer's update. ``published_choices`` does it as AMSP does (Chen et al. 2023, arXiv 2311.00257, section IV), where
its assumptions hold: no tensor or pipeline parallelism, gradients all-reduced whole and then dropped, updated parameters
broadcast, nothing hidden. Its equations, with Phi parameters in 16 bit, M micro-batches, buckets of U bytes:

    T_p   = M (2 AG + RS)(2 Phi, s_p)                       parameters gathered forward and backward, gradients scattered
    T_os0 = 2 Phi / (U s_p)  AR(U, s_dp / s_p)              gradients, once
    T_os1 = s_os / s_p       BC(2 Phi / s_os, s_os / s_p)   updated parameters
    T_g   = (M - 1) 2 Phi / (U s_p)  AR(U, s_g / s_p)       gradients kept sharded further than parameters

AMSP's times are profiled; here they come from the cost model's collectives. ``best`` picks, among the choices that surely fit and
are as fast as the fastest within ``TIE``, the one that needs least memory.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from launcher.config.schema import ClusterConfig
from launcher.cost import collectives, stages
from launcher.cost.case import Case
from launcher.cost.framework import TRIREME, Framework
from launcher.cost.layouts import to_table
from launcher.cost.model import GATHER, REDUCE, estimate, fits
from launcher.cost.prediction import case_of
from launcher.cost.shape import Number
from trainer.config import ConfigError, LayoutConfig, ModelConfig, RunConfig, ShardingConfig
from trainer.config.errors import divisors

SURE = 0.9
"""A run of weeks is planned only where it fits with at least this probability."""
TIE = 0.01
"""Step times closer than this are not told apart."""
BUCKET = 512e6
"""Bytes of a gradient bucket in AMSP's equations."""


@dataclass(frozen=True)
class Choice:
    """One combination of sharding factors."""

    sharding: ShardingConfig
    step_time_s: float
    communication_s: float  # part of it that is spent on data parallelism
    memory_bytes: float
    fits: float

    @property
    def factors(self) -> tuple[int, int, int]:
        return (self.sharding.params, self.sharding.grads, self.sharding.optimizer)


def sharding_chains(data: int, factors: Sequence[int] | None = None) -> list[tuple[int, int, int]]:
    """(params, grads, optimizer) with params | grads | optimizer | data, from all divisors of ``data`` or from ``factors``."""
    allowed = factors or divisors(data)
    return [(p, g, o) for o in allowed for g in allowed if o % g == 0 for p in allowed if g % p == 0]


def node_levels(data: int, replicas_in_node: int) -> list[int]:
    """1, the replicas of one node, all replicas: only the node's boundary changes what a collective costs per byte."""
    return sorted({1, math.gcd(data, replicas_in_node), data})


def choices(
    model: ModelConfig, layout: LayoutConfig, run: RunConfig, cluster: ClusterConfig, framework: Framework = TRIREME
) -> list[Choice]:
    """Every sharding of ``layout`` (whose ``data`` degree is known) by the cost model, fastest first."""
    case = _case(model, layout, run, cluster, framework, sharding_chains(layout.data or 1))
    found = estimate(case)
    return _sorted(case, found.step_time, found.time[GATHER] + found.time[REDUCE], found.memory_total)


def published_choices(
    model: ModelConfig, layout: LayoutConfig, run: RunConfig, cluster: ClusterConfig, framework: Framework = TRIREME
) -> list[Choice]:
    """Every sharding by AMSP's equations, on its own terms, fastest first. ``ConfigError`` with tensor or pipeline ranks.

    Its rules: factors span nodes only when they fill them, and gradients are sharded like the parameters or like the optimizer states.
    Its temporaries: a 4-byte copy of a rank's gradient shard while the optimizer runs.
    """
    if (layout.tensor, layout.pipeline) != (1, 1):
        raise ConfigError(f"AMSP's equations hold for layout.tensor=1 and layout.pipeline=1, not {layout.tensor} and {layout.pipeline}")
    node, data = cluster.gpus_per_node, layout.data or 1
    factors = [d for d in divisors(data) if node % d == 0 or d % node == 0]
    chains = [(p, g, o) for p, g, o in sharding_chains(data, factors) if g in (p, o)]
    case = _case(model, layout, run, cluster, framework, chains)
    found = estimate(case)
    communication = published_seconds(case)
    temporaries = 4 * case.shape.parameters / case.field("optimizer")
    step_time = found.step_time - found.time[GATHER] - found.time[REDUCE] + communication
    return _sorted(case, step_time, communication, found.memory_total + temporaries)


def best(found: Sequence[Choice]) -> Choice:
    """The choice to run; ``ConfigError`` when none fits."""
    sure = [c for c in found if c.fits >= SURE]
    if not sure:
        least = min(found, key=lambda c: c.memory_bytes)
        raise ConfigError(
            f"no sharding fits into memory: even {least.factors} needs {least.memory_bytes / 1e9:.1f} GB; "
            "recompute more, lower layout.micro_batch or raise layout.tensor or layout.pipeline"
        )
    limit = (1 + TIE) * min(c.step_time_s for c in sure)
    return min((c for c in sure if c.step_time_s <= limit), key=lambda c: c.memory_bytes)


def published_seconds(case: Case) -> np.ndarray:
    """T_p + T_g + T_os0 + T_os1 of AMSP, section IV; nothing overlaps."""
    weights = 2 * stages.held(case).dense.most()
    params, grads, optimizer = (case.field(name) for name in ("params", "grads", "optimizer"))
    modules = case.shape.layers
    gathers = 3 * modules * collectives.all_gather(case.device, case.constants, case.data_group(params), weights / modules)
    broadcasts = optimizer / params * _broadcast(case, case.data_group(optimizer / params, params), weights / optimizer)
    return np.asarray(
        case.micro_batches * gathers
        + _bucketed(case, case.data_group(case.data / params, params), weights / params)
        + (case.micro_batches - 1) * _bucketed(case, case.data_group(grads / params, params), weights / params)
        + broadcasts
    )


def _bucketed(case: Case, group: collectives.Group, payload: Number) -> Number:
    """All-reduce in buckets."""
    bucket = np.minimum(payload, BUCKET)
    return payload / bucket * collectives.all_reduce(case.device, case.constants, group, bucket)


def _broadcast(case: Case, group: collectives.Group, payload: Number) -> Number:
    """A pipelined broadcast passes every byte once through each rank."""
    seconds = collectives.latency(case.device, case.constants, group) + payload / collectives.bus(case.device, case.constants, group)
    return np.where(group.size > 1, seconds, 0.0)


def _case(
    model: ModelConfig,
    layout: LayoutConfig,
    run: RunConfig,
    cluster: ClusterConfig,
    framework: Framework,
    chains: Sequence[tuple[int, int, int]],
) -> Case:
    table = to_table([dataclasses.replace(layout, sharding=ShardingConfig(*chain)) for chain in chains])
    return case_of(model, table, run, cluster, framework)


def _sorted(case: Case, step_time: np.ndarray, communication: np.ndarray, memory: np.ndarray) -> list[Choice]:
    chance = fits(case, memory)
    rows = [
        Choice(
            ShardingConfig(*(int(case.table[name][i]) for name in ("params", "grads", "optimizer"))),
            float(step_time[i]),
            float(communication[i]),
            float(memory[i]),
            float(chance[i]),
        )
        for i in range(len(case.table))
    ]
    return sorted(rows, key=lambda c: c.step_time_s)
