"""Layouts as candidates of a search."""

from __future__ import annotations

import numpy as np

from launcher.cost.inputs.case import Case
from launcher.cost.memory.peak import COUNTED
from launcher.cost.model import Estimate
from launcher.cost.recomputing import plain
from launcher.cost.uncertainty import columns, coordinates
from launcher.search.surrogate import Candidates


def candidates(case: Case, predicted: Estimate) -> Candidates:
    """The layouts of ``case`` as ``predicted``."""
    parts, capacity = columns(predicted.causes, len(case.table)), min(case.budget, case.device.memory)
    return Candidates(parts, needed(case, predicted), coordinates(case.table), capacity, plain(case.table))


def needed(case: Case, predicted: Estimate) -> np.ndarray:
    """Returns the bytes that run out first: all of the device's memory, or the share counted against ``run.memory_gb``."""
    if case.budget >= case.device.memory:
        return np.asarray(predicted.memory_total)
    return np.asarray(sum(predicted.memory[name] for name in COUNTED))
