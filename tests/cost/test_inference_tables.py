"""The cost of inference against published tables."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from benchmarks.history.inference import MARKS, PAGE, TABLES, figures, newest, with_block
from benchmarks.published.convert import converted
from launcher.config.hardware import shipped_hardware
from launcher.tables.canonical import write
from launcher.tables.inference import COLUMNS, is_inference, judge, read, summary, weighted_median
from trainer.spec import ConfigError

DATA = Path(__file__).parents[2] / "benchmarks" / "published" / "inference_data"


@pytest.mark.parametrize(("table", "error"), [("inference.csv", 0.06), ("serving.csv", 0.07)])
def test_published_latencies_are_predicted(tmp_path: Path, table: str, error: float) -> None:
    rows, columns = converted(DATA / table)
    write(tmp_path / table, rows, columns)
    found = summary(judge(read(tmp_path / table), shipped_hardware()))
    assert found.median is not None and found.median <= error
    assert found.verdicts is None or found.verdicts.f1 is None or found.verdicts.f1 > 0.9


def test_every_model_weighs_the_same_in_the_median() -> None:
    assert weighted_median([0.1] * 9 + [0.3, 0.5], ["many"] * 9 + ["few", "few"]) == pytest.approx(0.1)
    assert weighted_median([0.1] * 9 + [0.3, 0.5], ["many"] * 9 + ["one", "other"]) == pytest.approx(0.3)


def test_a_table_without_a_column_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("source,model\na,b\n")
    with pytest.raises(ConfigError, match="has no column"):
        read(path)


def test_a_table_of_inference_without_one_of_its_columns_is_told_which(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(",".join(name for name in COLUMNS if name != "tpot_ms") + "\n")
    with pytest.raises(ConfigError, match="has no column tpot_ms"):
        read(path)
    assert is_inference(path)


def test_the_figures_in_the_documentation_are_those_of_the_newest_record_of_the_shipped_tables() -> None:
    text = PAGE.read_text()
    assert all(mark in text for mark in MARKS) and with_block(text, newest()) == text
    assert {hashlib.sha256(path.read_bytes()).hexdigest() for path in TABLES} == {table["sha256"] for table in newest()["tables"]}


def test_a_record_is_what_the_cost_model_says_of_its_tables() -> None:
    for recorded, again in zip(newest()["tables"], figures(leave_out=False)):
        for key in ("timed", "median", "p90", "bias"):
            assert recorded["all"][key] == pytest.approx(again["all"][key], abs=1e-4)
