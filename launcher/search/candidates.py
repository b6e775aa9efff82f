"""Layouts as candidates of a search."""

from __future__ import annotations

import numpy as np

from launcher.cost.inputs.case import Case
from launcher.cost.memory.peak import COUNTED
from launcher.cost.model import Estimate
from launcher.cost.uncertainty import columns, coordinates
from launcher.search.surrogate import Candidates
from trainer.spec.schema import RECOMPUTE


def candidates(case: Case, predicted: Estimate) -> Candidates:
    """The layouts of ``case`` as ``predicted``."""
    parts, capacity = columns(predicted.causes, len(case.table)), min(case.budget, case.device.memory)
    return Candidates(parts, needed(case, predicted), coordinates(case.table), capacity, plain(case.table))


def plain(table: np.ndarray, *others: np.ndarray) -> np.ndarray:
    """(n,) row of the same layout without recomputation; -1: there is none, or it is that itself. ``others``: (n,) columns beside the
    layout that must be the same too."""
    columns = [table[name] for name in table.dtype.names or () if not name.startswith("recompute")]
    same = np.unique(np.stack([*columns, *others], axis=1), axis=0, return_inverse=True)[1].reshape(-1)
    keeps_all = table["recompute"] == RECOMPUTE.index("none")
    row = np.full(len(table), -1)
    row[same[keeps_all]] = np.flatnonzero(keeps_all)
    return np.asarray(np.where(keeps_all, -1, row[same]))


def needed(case: Case, predicted: Estimate) -> np.ndarray:
    """Bytes of what runs out first: all of the device's memory, or what the trainer counts against ``run.memory_gb``."""
    if case.budget >= case.device.memory:
        return np.asarray(predicted.memory_total)
    return np.asarray(sum(predicted.memory[name] for name in COUNTED))
