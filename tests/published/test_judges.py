"""Sources that judge the cost model have no part in its constants, only in rates of chips that no other source has run on."""

from __future__ import annotations

import dataclasses
from functools import cache

import numpy as np
import pytest

from benchmarks.fit import Fit, FitProblem, fit, judges, solve, timed_cases
from benchmarks.history.__main__ import SHIPPED
from benchmarks.history.figures import rows_of
from benchmarks.spreads import LeftOut
from launcher.cost.parts import WIDTH_OF_PART
from launcher.tables.canonical import MeasuredRun

pytestmark = pytest.mark.slow

JUDGE, OTHER = sorted(judges())[:2]
RATES = {"CDNA 3 16 bit", "CDNA 4 16 bit"}


def as_judge(source: str, hardware: str, rows: list[MeasuredRun]) -> list[MeasuredRun]:
    return [MeasuredRun(row.number, {**row.cells, "source": source, "hardware": hardware}) for row in rows]


@cache
def rows() -> list[MeasuredRun]:
    """Runs of a source that is fitted to, and the same as if judges had measured them on chips of their own."""
    plain = rows_of(SHIPPED / "fsdp.csv")
    return [*plain, *as_judge(JUDGE, "mi300x", plain[:4]), *as_judge(OTHER, "mi355x", plain[4:8])]


@cache
def fitted() -> tuple[FitProblem, Fit]:
    problem = FitProblem.of_rows(rows())
    return problem, fit(problem)


def test_what_judges_measured_moves_no_constant() -> None:
    problem, whole = fitted()
    before, after = (
        solve(problem, dataclasses.replace(whole, errors=np.where(problem.judging, error, whole.errors))) for error in (0.0, -0.1)
    )
    assert {name for name in before if after[name] != pytest.approx(before[name], rel=1e-9)} == RATES
    assert all(after[name] < before[name] for name in RATES)


def test_a_rate_is_fitted_to_no_run_of_the_source_that_is_left_out() -> None:
    problem, whole = fitted()
    without = solve(problem, whole, JUDGE)
    assert without["CDNA 3 16 bit"] == pytest.approx(problem.defaults["CDNA 3 16 bit"])
    assert without["CDNA 4 16 bit"] == pytest.approx(solve(problem, whole)["CDNA 4 16 bit"])


@pytest.mark.parametrize(("of_the_other", "alone"), [("mi300x", False), ("mi355x", True)])
def test_a_chip_that_one_source_alone_has_run_on_counts_as_assumed_where_it_is_left_out(of_the_other: str, alone: bool) -> None:
    some = rows_of(SHIPPED / "fsdp.csv")[:4]
    cases, measured = timed_cases([*as_judge(JUDGE, "mi300x", some), *as_judge(OTHER, of_the_other, some)])
    seconds = np.tile(np.array(measured)[:, None], (1, len(WIDTH_OF_PART)))
    missed = LeftOut(cases, seconds, seconds, np.array(measured), {}).missed()
    assert [each.assumed.tolist() for each in missed] == [[alone] * 4] * 2
