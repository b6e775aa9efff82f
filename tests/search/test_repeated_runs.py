"""A layout that is measured again is known better; it tells no more of the others than one run with less noise."""

from __future__ import annotations

import math

import numpy as np
import pytest

from launcher.config.uncertainty import Widths
from launcher.cost.uncertainty import TimeSurrogate, Traits

WIDTHS = Widths(
    *(0.3, 0.2, 0.5, 0.4, 0.3, 0.08, 0.2, 1.2, 1e-9),
    chip=0.2, constant=0.2, seen=2.5, memory=0.1, memory_layout=0.06, noise=0.01, transfer=0.04,
)  # fmt: skip


def test_two_runs_of_one_layout_are_one_run_with_less_noise() -> None:
    draw = np.random.default_rng(3)
    parts = draw.uniform(0.05, 1.0, (6, 4))
    seconds, shares = parts.sum(axis=1), parts / parts.sum(axis=1)[:, None]
    twice, once = (TimeSurrogate(seconds, Traits(shares, np.zeros((6, 1))), WIDTHS) for _ in range(2))
    for _ in range(2):
        twice.observe(0, parts[0], 1.3 * seconds[0], noise=0.04)
    once.observe(0, parts[0], 1.3 * seconds[0], noise=0.04 / math.sqrt(2))
    assert twice.posterior().mean == pytest.approx(once.posterior().mean, rel=1e-6)
    assert twice.posterior().spread == pytest.approx(once.posterior().spread, rel=1e-6)
