"""The standard normal distribution. SciPy has it; importing SciPy takes longer than the standard library takes for what a plan asks."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np

MANY = 3_000_000
"""Values of one process from which on SciPy pays: its import takes as long as the standard library for so many."""

_asked = 0
_erfc = np.frompyfunc(math.erfc, 1, 1)
_inverse = np.vectorize(NormalDist().inv_cdf, otypes=[float])


def normal_pdf(z: np.ndarray) -> np.ndarray:
    """Density."""
    return np.exp(-0.5 * z * z) / np.sqrt(2 * np.pi)


def ndtr(z: np.ndarray) -> np.ndarray:
    """Probability below each ``z``."""
    global _asked
    _asked += z.size
    if _asked < MANY:
        return 0.5 * np.asarray(_erfc(-z / math.sqrt(2)), dtype=float)
    from scipy.special import ndtr as of_many

    return np.asarray(of_many(z))


def ndtri(probability: np.ndarray) -> np.ndarray:
    """Quantiles of the standard normal distribution, one for each ``probability``; infinite for 0 and 1."""
    found = np.where(probability < 0.5, -np.inf, np.inf)
    inside = (probability > 0) & (probability < 1)
    found[inside] = _inverse(probability[inside])
    return found
