"""How likely the misses of a source are, and the widths under which they are likeliest."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from benchmarks.spreads import FINE, LEARNT, Missed, likeliest
from launcher.config.uncertainty import shipped_widths
from launcher.cost.normal import normal_pdf
from launcher.cost.parts import WIDTH_OF_PART
from launcher.cost.uncertainty import Traits, between


def planted(source: str, count: int, size: float, seed: int) -> Missed:
    """Misses drawn from the shipped widths, of two machines, where what no part explains is ``size`` times as large."""
    draw, widths = np.random.default_rng(seed), shipped_widths()
    shares = draw.dirichlet(np.full(len(WIDTH_OF_PART), 0.3), count)
    traits = Traits(shares, draw.uniform(0, 6, (count, 4)), draw.integers(0, 2, count))
    covariance = between(widths, traits, traits, np.eye(count)).at(size**2) + widths.noise**2 * np.eye(count)
    return Missed(source, traits, np.zeros(count), draw.multivariate_normal(np.zeros(count), covariance))


def test_the_evidence_is_the_integral_over_all_sizes() -> None:
    """By the determinant and the inverse of each covariance, up to a constant."""
    missed, widths = planted("a", 12, 1.0, 0), shipped_widths()
    errors = between(widths, missed.traits, missed.traits, np.eye(12))
    weights = normal_pdf(FINE) / normal_pdf(FINE).sum()
    summed = 0.0
    for node, weight in zip(FINE, weights, strict=True):
        covariance = errors.at(np.exp(2 * widths.scale * node)) + widths.noise**2 * np.eye(12)
        quadratic = missed.ratios @ np.linalg.inv(covariance) @ missed.ratios
        summed += weight * np.exp(-0.5 * quadratic) / np.sqrt(np.linalg.det(covariance))
    assert missed.evidence(widths) == pytest.approx(np.log(summed))


def test_widths_are_learnt_from_any_start() -> None:
    missed = [planted(str(i), 16, size, i) for i, size in enumerate((0.3, 0.6, 1.0, 1.7, 3.0))]
    start = shipped_widths()
    far = dataclasses.replace(start, **{name: 3 * getattr(start, name) for name in LEARNT if name != "reach"})
    one, other = likeliest(missed, start), likeliest(missed, far)
    for name in ("common", "part", "layout", "rough", "scale"):
        assert getattr(one, name) == pytest.approx(getattr(other, name), rel=0.05)
