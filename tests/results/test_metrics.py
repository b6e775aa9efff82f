"""How good predictions are, held against the words that define each figure."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.tables.metrics import Errors, Verdicts, auc, regret

SCORES = st.lists(st.integers(0, 5).map(float), min_size=1, max_size=8)


def test_regret_is_how_much_slower_than_the_best_the_one_is_that_was_predicted_fastest() -> None:
    assert regret([1.0, 2.0, 3.0], [2.0, 1.6, 5.0]) == pytest.approx(0.25)
    assert regret([1.0, 1.0, 3.0], [2.0, 1.0, 5.0]) == pytest.approx(0.5), "the mean over what was predicted alike"
    assert regret([1.0, 2.0], [1.0, 9.0]) == 0


@given(SCORES, SCORES)
def test_the_area_under_a_curve_is_how_often_a_positive_scores_above_a_negative(positive: list[float], negative: list[float]) -> None:
    wins = [(p > n) + (p == n) / 2 for p, n in itertools.product(positive, negative)]
    assert auc(positive, negative) == pytest.approx(sum(wins) / len(wins))


def test_errors_and_verdicts_count_what_their_names_say() -> None:
    errors = Errors.of([(1.1, 1.0), (0.5, 1.0), (2.0, 1.0)])
    assert errors is not None and (errors.count, errors.median) == (3, pytest.approx(0.5))
    assert errors.mean == pytest.approx(1.6 / 3) and errors.bias == pytest.approx(1.1 ** (1 / 3))
    told = [(True, True, 9.0, 0.9), (True, True, 8.0, 0.8), (True, False, 7.0, 0.7), (False, True, 6.0, 0.6), (False, False, 5.0, 0.5)]
    verdicts = Verdicts.of(told)
    assert (verdicts.hits, verdicts.false_alarms, verdicts.missed, verdicts.rest) == (2, 1, 1, 1)
    assert verdicts.precision == verdicts.recall == verdicts.f1 == pytest.approx(2 / 3)
