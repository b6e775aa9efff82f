"""Layouts as candidates of a search: what is predicted of them, and where they lie in the space of layouts."""

from __future__ import annotations

import numpy as np

from launcher.cost.inputs.case import Case
from launcher.cost.memory.peak import COUNTED
from launcher.cost.model import Estimate
from launcher.cost.parts import Parts
from launcher.search.surrogate import Candidates
from trainer.spec.schema import RECOMPUTE, SCHEDULES

KIND = 1.5
"""Distance between two kinds of recomputation or schedules, in doublings of a degree."""


def candidates(case: Case, predicted: Estimate) -> Candidates:
    """The layouts of ``case`` as ``predicted``."""
    return Candidates(
        columns(predicted.time, len(case.table)), needed(case, predicted), coordinates(case.table), min(case.budget, case.device.memory)
    )


def needed(case: Case, predicted: Estimate) -> np.ndarray:
    """Bytes of what runs out first: all of the device's memory, or what the trainer counts against ``run.memory_gb``."""
    if case.budget >= case.device.memory:
        return np.asarray(predicted.memory_total)
    return np.asarray(sum(predicted.memory[name] for name in COUNTED))


def columns(parts: Parts, count: int) -> np.ndarray:
    """Time parts as a matrix (layouts, parts). A part that is never negative but for rounding stays so."""
    return np.maximum(np.stack([np.broadcast_to(seconds, (count,)) for seconds in parts.values()], axis=1), 0.0)


def coordinates(table: np.ndarray) -> np.ndarray:
    """Where layouts lie, so that what no part of the time explains is learnt for similar ones: doublings of degrees, kinds apart."""
    log = {name: np.log2(table[name]) for name in ("tensor", "pipeline", "virtual_pipeline", "micro_batch")}
    log |= {name: np.log2(table[name]) / 4 for name in ("params", "grads", "optimizer")}
    kinds = [KIND * (table["recompute"] == i) / np.maximum(table["recompute_every"], 1) for i in range(1, len(RECOMPUTE))]
    kinds += [KIND * (table["schedule"] == i) for i in range(len(SCHEDULES))]
    return np.stack([*log.values(), *kinds, table["sequence_parallel"].astype(float)], axis=1)
