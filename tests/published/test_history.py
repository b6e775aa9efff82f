"""The figures in the documentation are those of the newest record, and the record is of tables that can be found again."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from benchmarks.history.figures import MARKS, PAGE, block, figures_of, newest, with_block

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "benchmarks" / "published" / "data"


def test_the_figures_in_the_documentation_are_those_of_the_newest_record() -> None:
    text = PAGE.read_text()
    assert all(mark in text for mark in MARKS) and with_block(text, newest()) == text


@pytest.mark.parametrize("path", sorted(DATA.glob("*.csv")), ids=lambda path: path.name)
def test_the_newest_record_has_every_shipped_table_as_it_is(path: Path) -> None:
    assert hashlib.sha256(path.read_bytes()).hexdigest() in {table["sha256"] for table in newest()["tables"]}


def test_a_record_is_what_the_cost_model_says_of_its_table() -> None:
    """The smallest table, taken again: whoever moves a figure records the figures again."""
    again = figures_of(DATA / "dlperf.csv")
    recorded = next(table for table in newest()["tables"] if table["sha256"] == again["sha256"])
    for key in ("timed", "median", "p90", "bias"):
        assert recorded["all"][key] == pytest.approx(again["all"][key], abs=1e-4)


def test_a_changed_figure_changes_the_table() -> None:
    record = newest()
    record["tables"][0]["all"]["median"] += 0.01
    assert block(record) != block(newest())


def test_a_table_has_a_second_row_only_where_it_has_runs_of_other_than_dense_models() -> None:
    rows = [line for line in block(newest()).split("\n\n")[0].splitlines()[2:] if "dense" in line]
    assert [row.split("`")[1] for row in rows] == [
        table["table"] for table in newest()["tables"] if table["dense"]["timed"] < table["all"]["timed"]
    ]
