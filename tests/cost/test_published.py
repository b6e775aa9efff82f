"""The cost model against published measurements: figures that must not get worse, and the verb that prints them.

``data/training.csv`` has 453 rows of papers and documentation, each with its source: whole layout sweeps and single runs of 13 sources.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from launcher.cli.validate import main
from launcher.config.hardware import hardware_files
from launcher.results.published import read
from launcher.results.validation import Judged, Summary, by_source, judge, summary
from trainer.config import ConfigError

TABLE = Path(__file__).parent / "data" / "training.csv"
MEDIANS = {  # greatest median error of the step time, by source
    "Korthikanti": 0.05, "Megatron-LM SC21": 0.05, "Efficient Parallelization Layouts": 0.045, "MosaicML llm-foundry": 0.05, "AMSP": 0.07,
    "NVIDIA Megatron-Bridge": 0.055, "NeMo Framework Launcher CI": 0.06, "BigScience BLOOM": 0.15, "BigScience GPT2 V100": 0.1, "MT-NLG": 0.17,
}  # fmt: skip


@pytest.fixture(scope="module")
def judged() -> list[Judged]:
    return judge(read(str(TABLE)), hardware_files())


@pytest.fixture(scope="module")
def figures(judged: list[Judged]) -> Summary:
    return summary(judged)


def test_step_times(figures: Summary) -> None:
    assert figures.time is not None and figures.time.count > 350
    assert figures.time.median < 0.052 and 0.92 < figures.time.bias < 1.08


@pytest.mark.parametrize("source", MEDIANS)
def test_step_times_of_each_source(source: str, judged: list[Judged]) -> None:
    found = next(each for name, each in by_source(judged).items() if name.startswith(source))
    assert found.time is not None and found.time.median < MEDIANS[source]


def test_deepspeed_of_2021_is_slow_and_as_slow_as_measured(judged: list[Judged]) -> None:
    """Narayanan et al. 2021, table 2: sharded parameters against the pipeline, on the same cluster."""
    rows = [j for j in judged if "SC21" in j.row.source and "ZeRO-3" in j.row.text("zero_stage_or_sharding") and j.step_seconds]
    assert len(rows) == 3
    for j in rows:
        assert j.answer is not None and j.answer.step_time_s == pytest.approx(j.step_seconds, rel=0.1)


def test_sweeps_are_ranked_and_their_best_is_nearly_found(figures: Summary) -> None:
    assert figures.correlation is not None and figures.correlation > 0.88
    assert figures.regret is not None and figures.regret < 0.02


def test_shortage_of_memory_is_foreseen(figures: Summary) -> None:
    assert figures.verdicts is not None
    assert (figures.verdicts.f1 or 0) > 0.9 and (figures.verdicts.auc_of_shares or 0) > 0.98
    assert figures.memory is not None and figures.memory.median < 0.075


def test_shortage_is_foreseen_on_the_devices_that_public_models_were_scored_on(judged: list[Judged]) -> None:
    """Bytes are comparable there: every device of those rows but a few has 80 GB."""
    found = summary([j for j in judged if j.comparable]).verdicts
    assert found is not None and (found.auc or 0) > 0.98 and (found.f1 or 0) > 0.9


def test_validate_writes_a_line_for_every_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "predictions.csv"
    assert main([str(TABLE), "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["all"]["rows"] == 453
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["row"] for row in rows] == [str(i) for i in range(1, 454)]
    assert set(rows[0]) == {"row", "step_time_s", "peak_mem_gb", "oom", "reason"}
    assert all(float(row["step_time_s"]) > 0 and row["oom"] in ("yes", "no") for row in rows if not row["reason"])


def test_rows_that_say_too_little_are_counted_with_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = list(csv.DictReader(TABLE.open()))[:3]
    lines[1]["gpu"], lines[2]["gbs"] = "Abacus", ""
    table = tmp_path / "mine.csv"
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)
    assert main([str(table)]) == 0
    printed = capsys.readouterr().out
    assert "1 rows not predicted: GPU not known" in printed and "1 rows not predicted: global batch not given" in printed


@pytest.mark.parametrize(
    ("text", "message"),
    [("a,b\n1,2\n", "column"), ("", "empty|column"), (None, "cannot read|no such|not found")],
)
def test_a_table_that_is_none_is_refused_in_plain_words(text: str | None, message: str, tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    if text is not None:
        table.write_text(text)
    with pytest.raises(ConfigError, match=f"(?i){message}"):
        main([str(table)])
