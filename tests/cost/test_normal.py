"""The normal distribution without SciPy is SciPy's."""

from __future__ import annotations

import numpy as np
import pytest
import scipy

from launcher.cost import normal
from launcher.cost.normal import ndtr, ndtri, normal_pdf


@pytest.mark.parametrize("many", [0, 2000])
@pytest.mark.parametrize("count", [0, 1, 999])
def test_probabilities_are_those_of_scipy_however_many_are_asked(count: int, many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(normal, "MANY", many)
    monkeypatch.setattr(normal, "_asked", 0)
    z = np.random.default_rng(count).normal(0, 4, (count, 1))
    for _ in range(3):  # the last of 999 is of SciPy
        assert ndtr(z) == pytest.approx(scipy.special.ndtr(z), rel=1e-12, abs=1e-300)


def test_quantiles_are_those_of_scipy_and_infinite_at_the_ends() -> None:
    probability = np.array([[0.0, 1e-12, 0.1], [0.5, 0.9, 1.0]])
    assert ndtri(probability) == pytest.approx(scipy.special.ndtri(probability), rel=1e-9, abs=1e-12)
    assert float(ndtri(np.array(0.9))) == pytest.approx(1.2815515655446004)


def test_the_density_is_the_slope_of_the_probability() -> None:
    z, step = np.linspace(-6, 6, 41), 1e-5
    assert normal_pdf(z) == pytest.approx((ndtr(z + step) - ndtr(z - step)) / (2 * step), abs=1e-9)
