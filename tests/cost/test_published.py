"""The cost model against published measurements: figures that must not get worse, and the verb that prints them.

``data/training.csv`` has 453 rows of papers and documentation, each with its source: whole layout sweeps and single runs of 13 sources.
"""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest

from launcher.cli.validate import main
from launcher.config.hardware import hardware_files
from launcher.tables.published import Row, read
from launcher.tables.validation import Judged, Summary, by_source, judge, summary
from trainer.config import ConfigError

TABLE = Path(__file__).parent / "data" / "training.csv"
MEDIANS = {  # greatest median error of the step time, by source
    "Korthikanti": 0.05, "Megatron-LM SC21": 0.05, "Efficient Parallelization Layouts": 0.06, "MosaicML llm-foundry": 0.05, "AMSP": 0.07,
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
    assert figures.time.median < 0.057 and 0.92 < figures.time.bias < 1.08


@pytest.mark.parametrize("source", MEDIANS)
def test_step_times_of_each_source(source: str, judged: list[Judged]) -> None:
    found = next(each for name, each in by_source(judged).items() if name.startswith(source))
    assert found.time is not None and found.time.median < MEDIANS[source]


def test_deepspeed_of_2021_is_slow_and_as_slow_as_measured(judged: list[Judged]) -> None:
    """Narayanan et al. 2021, table 2: sharded parameters against the pipeline, on the same cluster."""
    rows = [j for j in judged if "SC21" in j.row.source and "ZeRO-3" in j.row.text("zero_stage_or_sharding") and j.step_seconds]
    assert len(rows) == 3
    for j in rows:
        assert j.answer is not None and j.answer.step_time_s == pytest.approx(j.step_seconds, rel=0.2)


def test_sweeps_are_ranked_and_their_best_is_nearly_found(figures: Summary) -> None:
    assert figures.correlation is not None and figures.correlation > 0.84
    assert figures.regret is not None and figures.regret < 0.03


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
    assert "1 row not predicted: GPU Abacus not known" in printed and "1 row not predicted: global batch not given" in printed


def table_of(folder: Path, **changes: str) -> Path:
    """The first three rows of the table, with these cells changed in all of them."""
    lines = [line | changes for line in list(csv.DictReader(TABLE.open()))[:3]]
    path = folder / "mine.csv"
    with path.open("w", newline="", encoding="utf-8-sig") as file:  # as spreadsheets write it
        writer = csv.DictWriter(file, list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)
    return path


def test_every_figure_stands_under_its_heading_and_is_whole_in_a_pipe(
    judged: list[Judged], figures: Summary, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(TABLE)]) == 0
    times, memory = re.split(r"(?m)^memory *$", capsys.readouterr().out)
    whole = next(line for line in memory.splitlines() if line.strip().startswith("all")).split()
    assert figures.verdicts is not None and figures.memory is not None and figures.time is not None
    assert whole[-5:-2] == [f"{figures.verdicts.auc:.3f}", f"{figures.verdicts.auc_of_shares:.3f}", str(figures.memory.count)]
    heads = [line for line in memory.splitlines() if line.strip()][:3]
    at = memory.splitlines()[next(i for i, line in enumerate(memory.splitlines()) if line.strip().startswith("all"))]
    for head, cell in (("peaks", f" {figures.memory.count} "), ("recall", f"{100 * figures.verdicts.recall:.1f} %")):  # type: ignore[operator]
        row = next(line for line in heads if head in line)
        assert row.index(head) + len(head) == at.index(cell) + len(cell.rstrip())
    assert "…" not in times + memory


def test_the_table_itself_is_never_overwritten(tmp_path: Path) -> None:
    table = table_of(tmp_path)
    before = table.read_bytes()
    with pytest.raises(ConfigError, match="is the table itself"):
        main([str(table), "--out", str(table)])
    assert table.read_bytes() == before


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"gpus": "1e10"}, "gpus is no positive"), ({"layers": "1e300"}, "layers is no positive"), ({"mbs": "-4"}, "mbs is no positive"),
        ({"mbs": "0.5"}, "mbs is no positive"), ({"layers": "24", "pp": "48", "gpus": "48", "tp": "1"}, "more stages than layers"),
        ({"heads": "16", "tp": "3", "pp": "1", "gpus": "3"}, "tensor degree does not divide"), ({"heads": "8", "kv_heads": "16"}, "kv_heads do not divide"),
    ],
)  # fmt: skip
def test_what_no_trainer_could_run_is_not_predicted(changes: dict[str, str], reason: str, tmp_path: Path) -> None:
    assert all(reason in j.reason for j in judge(read(table_of(tmp_path, **changes)), hardware_files()))


@pytest.mark.parametrize(
    "changes", [{"step_time_s": "-1"}, {"step_time_s": "0"}, {"peak_mem_gb": "-3"}, {"samples_per_s": "-1", "step_time_s": ""}]
)
def test_a_measurement_that_cannot_be_is_none(changes: dict[str, str], tmp_path: Path) -> None:
    blank = dict.fromkeys(
        ("step_time_s", "tokens_per_s_total", "tokens_per_s_per_gpu", "samples_per_s", "peak_mem_gb", "tflops_per_gpu", "mfu_pct"), ""
    )
    found = judge(read(table_of(tmp_path, **blank | changes)), hardware_files())
    assert all(j.step_seconds is None and j.peak_bytes is None for j in found)


@pytest.mark.parametrize("changes", [{"step_time_s": "200000"}, {"step_time_s": "", "peak_mem_gb": "500000"}])
def test_measurements_in_other_units_are_refused(changes: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="times more than predicted; convert them to"):
        main([str(table_of(tmp_path, oom="no", **changes))])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "column"), ("", "empty|column"), (None, "cannot read|no such|not found"), ("model;layers\nx;1\n", "semicolons"),
        ("model,layers,layers\nx,1,1\n", "layers more than once"), ("model,step_time_ms\nx,1\n", "read from step_time_s, in seconds"),
        ("model,peak_mem_mib\nx,1\n", "read from peak_mem_gb, in 1e9 bytes"), ("model,step time (ms)\nx,1\n", "column"),
    ],
)  # fmt: skip
def test_a_table_that_is_none_is_refused_in_plain_words(text: str | None, message: str, tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    if text is not None:
        table.write_text(text)
    with pytest.raises(ConfigError, match=f"(?i){message}"):
        main([str(table)])


@pytest.mark.parametrize("column", ["step_time_s", "peak_mem_gb"])
@pytest.mark.parametrize("value", ["1e308", "-1e308", "1e-320", "nan", "1" + "0" * 400])
def test_a_cell_that_nobody_can_have_measured_is_no_measurement(column: str, value: str) -> None:
    row = Row(1, {column: value})
    assert row.number_of(column) is None
