"""Rows of a table that nobody has seen before.

``data/dlperf.csv`` has what Oneflow-Inc/DLPerf measured in 2021 with Megatron-LM and OneFlow on four nodes of eight V100 that share one 100 Gb/s port each.
No constant was fitted to it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.tables.canonical import read
from launcher.tables.validation import by_source, judge
from tests.cost.machines import HARDWARE

pytestmark = pytest.mark.slow

TABLE = Path(__file__).parent / "data" / "dlperf.csv"


@pytest.mark.parametrize(("source", "median"), [("DLPerf, Megatron-LM", 0.08), ("DLPerf, OneFlow", 0.12)])
def test_a_source_that_nobody_fitted_is_predicted(source: str, median: float) -> None:
    found = next(each for name, each in by_source(judge(read(TABLE), HARDWARE)).items() if name.startswith(source))
    assert found.time is not None and found.time.count == 16 and found.time.median < median


def test_tensor_parallelism_across_nodes_waits_for_the_port_they_share() -> None:
    """Several times what it would take with a port for each device."""
    rows = [j for j in judge(read(TABLE), HARDWARE) if j.row["tensor"] in (16, 32)]
    assert len(rows) == 4
    for j in rows:
        assert j.prediction is not None and j.prediction.step_time_s == pytest.approx(j.step_seconds, rel=0.25)


def test_rows_of_two_tables_keep_their_own_predictions() -> None:
    """Both tables number their rows from the same line."""
    mine, theirs = read(TABLE), read(Path(__file__).parents[1] / "search" / "layouts_13b.csv")[:20]
    both = judge([*mine, *theirs], HARDWARE)
    assert [j.row for j in both] == [*mine, *theirs] and all(j.case is None or j.case.row is j.row for j in both)
    apart = [*judge(mine, HARDWARE), *judge(theirs, HARDWARE)]
    assert [j.prediction and j.prediction.step_time_s for j in both] == [j.prediction and j.prediction.step_time_s for j in apart]
