"""The cost of inference against published tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.published.convert import converted
from launcher.config.hardware import shipped_hardware
from launcher.tables.canonical import write
from launcher.tables.inference import judge, read, summary, weighted_median
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
