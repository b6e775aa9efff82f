"""The fastest of many predictions is expected to take as long as it does."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from launcher.cost.selection import selection_factor, true_times

SPREAD, COMMON, SWEEPS = 0.05, 0.02, 120
TRUE: dict[str, Callable[[np.random.Generator], np.ndarray]] = {
    "a bell": lambda random: 0.1 * random.standard_normal(1500),
    "a bell as wide as the errors": lambda random: SPREAD * random.standard_normal(1500),
    "more and more slower ones": lambda random: np.sqrt(random.uniform(size=1500)),
    "few": lambda random: 0.5 * random.uniform(size=25),
}
"""Logarithms of the true times of a sweep."""


def ratios(draw: Callable[[np.random.Generator], np.ndarray]) -> np.ndarray:
    """(SWEEPS, 2) of true over expected time of the fastest, without and with the correction. All predictions of a sweep share an error."""
    random, found = np.random.default_rng(5), []
    for _ in range(SWEEPS):
        true = draw(random)
        predicted = true + SPREAD * random.standard_normal(len(true)) + COMMON * random.standard_normal()
        best = predicted.argmin()
        ratio = np.exp(true[best] - predicted[best])
        found.append((ratio, ratio / selection_factor(np.exp(predicted), SPREAD)))
    return np.array(found)


@pytest.mark.parametrize("shape", TRUE)
def test_the_corrected_expectation_of_the_fastest_is_unbiased_and_the_plain_one_too_fast(shape: str) -> None:
    plain, corrected = ratios(TRUE[shape]).mean(axis=0)
    assert plain > 1.04
    assert corrected == pytest.approx(1.0, abs=0.01)


def test_nothing_is_corrected_where_nothing_was_picked_or_no_error_is_a_layouts_own() -> None:
    assert selection_factor(np.array([3.0]), 0.05) == 1.0 == selection_factor(np.array([3.0, 4.0]), 0.0)
    assert selection_factor(np.array([1.0, 9.0]), 0.05) == pytest.approx(1.0, abs=0.005)


def test_more_rivals_and_larger_errors_correct_more() -> None:
    logs = 0.1 * np.random.default_rng(1).standard_normal(1000)
    few, many, rough = (selection_factor(np.exp(x), s) for x, s in ((logs[:20], 0.05), (logs, 0.05), (logs, 0.1)))
    assert 1.0 < few < many < rough


def test_true_times_are_as_far_apart_as_the_errors_leave_of_the_predicted_ones() -> None:
    logs = np.hypot(0.1, 0.05) * np.random.default_rng(2).standard_normal(4000)
    assert true_times(logs, 0.05).std() == pytest.approx(0.1, rel=0.05)
