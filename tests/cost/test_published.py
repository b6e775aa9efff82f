"""The cost model against published measurements: figures that must not get worse, and the verb that prints them.

``data/training.csv`` has 453 rows of papers and documentation, each with its source: whole layout sweeps and single runs of 13 sources.
"""

from __future__ import annotations

import csv
import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.cli.validate import main
from launcher.config.hardware import hardware_files
from launcher.tables.canonical import COLUMNS, MeasuredRun, read, write
from launcher.tables.validation import PredictedRun, Summary, by_source, judge, summary
from trainer.shared.run.errors import ConfigError

pytestmark = pytest.mark.slow

TABLE = Path(__file__).parent / "data" / "training.csv"
MEDIANS = {  # greatest median error of the step time, by source
    "Korthikanti": 0.08, "Megatron-LM SC21": 0.06, "Efficient Parallelization Layouts": 0.06, "MosaicML llm-foundry": 0.05, "AMSP": 0.07,
    "NVIDIA Megatron-Bridge": 0.06, "NeMo Framework Launcher CI": 0.11, "BigScience BLOOM": 0.15, "BigScience GPT2 V100": 0.18, "MT-NLG": 0.19,
}  # fmt: skip


@pytest.fixture(scope="module")
def judged() -> list[PredictedRun]:
    return judge(read(str(TABLE)), hardware_files())


@pytest.fixture(scope="module")
def figures(judged: list[PredictedRun]) -> Summary:
    return summary(judged)


def test_step_times(figures: Summary) -> None:
    assert figures.time is not None and figures.time.count > 350
    assert figures.time.median < 0.057 and 0.92 < figures.time.bias < 1.08


@pytest.mark.parametrize("source", MEDIANS)
def test_step_times_of_each_source(source: str, judged: list[PredictedRun]) -> None:
    found = next(each for name, each in by_source(judged).items() if name.startswith(source))
    assert found.time is not None and found.time.median < MEDIANS[source]


def test_what_is_documented_of_deepspeed_of_2021_explains_half_of_its_time(judged: list[PredictedRun]) -> None:
    """Narayanan et al. 2021, table 2: sharded parameters over hundreds of devices. Nothing known explains the rest."""
    rows = [j for j in judged if "SC21" in j.row["source"] and j.row["shard_params"] != 1 and j.step_seconds]
    assert len(rows) == 3
    for j in rows:
        assert j.prediction is not None and 0.4 * j.step_seconds < j.prediction.step_time_s < j.step_seconds


def test_sweeps_are_ranked_and_their_best_is_nearly_found(figures: Summary) -> None:
    assert figures.correlation is not None and figures.correlation > 0.84
    assert figures.regret is not None and figures.regret < 0.035


def test_shortage_of_memory_is_foreseen(figures: Summary) -> None:
    assert figures.verdicts is not None
    assert (figures.verdicts.f1 or 0) > 0.9 and (figures.verdicts.auc_of_shares or 0) > 0.98
    assert figures.memory is not None and figures.memory.median < 0.075


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
    lines[1]["hardware"], lines[2]["global_batch"] = "abacus", "unknown"
    table = tmp_path / "mine.csv"
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)
    assert main([str(table)]) == 0
    printed = capsys.readouterr().out
    assert "1 row not predicted: no hardware file abacus" in printed and "1 row not predicted: global_batch is not known" in printed


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
    judged: list[PredictedRun], figures: Summary, capsys: pytest.CaptureFixture[str]
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


MIXTURE = {"family": "llama", "experts": "8", "experts_active": "2", "experts_ffn": "4096", "dense_layers": "0"}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layers": "24", "pipeline": "48", "gpus": "48", "tensor": "1", "data": "1"}, "more stages than layers"),
        ({"heads": "16", "tensor": "3", "pipeline": "1", "gpus": "3", "data": "1", "assumed": "none"}, "tensor degree does not divide"),
        ({"heads": "8", "kv_heads": "16"}, "kv_heads do not divide the heads"),
        ({"gpus": "7"}, "degrees do not multiply"),
        (MIXTURE | {"dense_layers": "1000"}, "more dense layers than layers"),
        (MIXTURE | {"experts_active": "9"}, "tokens visit more experts than there are, or none"),
        (MIXTURE | {"experts_active": "0"}, "tokens visit more experts than there are, or none"),
        ({"text": "100000"}, "texts are longer than the sequence"),
        ({"shard_params": "1000000"}, "do not divide each other"),
        ({"shard_grads": "2", "shard_optimizer": "1"}, "do not divide each other"),
    ],
)
def test_what_no_trainer_could_run_is_not_predicted(changes: dict[str, str], reason: str, tmp_path: Path) -> None:
    assert all(reason in j.reason for j in judge(read(table_of(tmp_path, **changes)), hardware_files()))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpus": "1e10"}, "gpus=1e10; give a whole number of 1 or more, below 1e+09, or unknown"), ({"layers": "nan"}, "layers=nan; give a whole"),
        ({"micro_batch": "0.5"}, "micro_batch=0.5"), ({"step_time_s": "-1"}, "step_time_s=-1; give a number above 0, below 1e+18"),
        ({"peak_memory_gb": "inf"}, "peak_memory_gb=inf"), ({"oom": "perhaps"}, "oom=perhaps; give yes or no"), ({"schedule": ""}, "no schedule; give gpipe"),
        ({"recompute": "some"}, "recompute=some; give none, selective or full"), ({"trainer": "megatron_cor"}, "did you mean 'megatron_core'"),
        ({"trainer_changes": "overlap.tensr=all"}, "unknown key trainer_changes: trainer.overlap.tensr"),
        ({"adapter_targets": "qkv value"}, "adapter_targets=qkv value; give none, or some of qkv, output, up, down with blanks between"),
    ],
)  # fmt: skip
def test_a_cell_that_its_column_does_not_allow_is_a_plain_error(changes: dict[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        judge(read(table_of(tmp_path, **changes)), hardware_files())


def test_a_table_that_is_written_is_read_back_equal(tmp_path: Path) -> None:
    rows = read(TABLE)
    write(tmp_path / "again.csv", [row.cells for row in rows])
    assert read(tmp_path / "again.csv") == rows


def test_a_table_without_the_columns_of_tuning_is_one_of_whole_sequences_and_no_adapters(tmp_path: Path) -> None:
    new = ("adapter_rank", "adapter_targets", "text")
    write(tmp_path / "before.csv", [row.cells for row in read(TABLE)], {n: c for n, c in COLUMNS.items() if n not in new})
    assert read(tmp_path / "before.csv") == [
        MeasuredRun(row.number, row.cells | {"adapter_rank": 0, "adapter_targets": (), "text": 0}) for row in read(TABLE)
    ]


def test_a_table_as_it_was_published_is_refused_with_the_command_that_turns_it_into_a_canonical_one(tmp_path: Path) -> None:
    raw = tmp_path / "raw.csv"
    raw.write_text("source,model,layers,hidden,seq,gpu,gpus,tp,pp,mbs,gbs,step_time_s\nme,7B,32,4096,2048,A100,64,2,1,1,256,5\n")
    with pytest.raises(
        ConfigError,
        match=r"has no column family, heads, kv_heads and \d+ more .*; .* python -m benchmarks.published TABLE.csv CANONICAL.csv",
    ):
        main([str(raw)])


@pytest.mark.parametrize("changes", [{"step_time_s": "200000"}, {"step_time_s": "unknown", "peak_memory_gb": "500000"}])
def test_measurements_in_other_units_are_refused(changes: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="times more than predicted; convert them to"):
        main([str(table_of(tmp_path, oom="no", **changes))])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "column"), ("", "empty|column"), (None, "cannot read|no such|not found"), ("model;layers\nx;1\n", "semicolons"),
        ("model,layers,layers\nx,1,1\n", "layers more than once"), ("sorce,model\nx,1\n", "no column source.*did you mean 'sorce'"),
    ],
)  # fmt: skip
def test_a_table_that_is_none_is_refused_in_plain_words(text: str | None, message: str, tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    if text is not None:
        table.write_text(text)
    with pytest.raises(ConfigError, match=f"(?i){message}"):
        main([str(table)])


@pytest.mark.parametrize("pack", [gzip.compress, lambda raw: raw.decode().encode("utf-16")])
def test_a_table_that_is_no_utf8_is_refused_in_plain_words(pack: Callable[[bytes], bytes], tmp_path: Path) -> None:
    table = table_of(tmp_path)
    table.write_bytes(pack(table.read_bytes()))
    with pytest.raises(ConfigError, match=r"it is not UTF-8; unpack it, or save it as CSV in UTF-8"):
        read(table)


def test_a_row_with_more_cells_than_columns_is_refused(tmp_path: Path) -> None:
    """A decimal comma in the last column would be a smaller number, one before it shifts all that follows. Empty cells are no harm."""
    table = table_of(tmp_path)
    whole = table.read_text()
    table.write_text(whole.rstrip() + ",,\n")
    assert len(read(table)) == 3
    table.write_text(whole.rstrip() + ",5\n")
    with pytest.raises(ConfigError, match=r"row 3 of .* has more cells than there are columns; write 1.5, not 1,5"):
        read(table)


@pytest.mark.parametrize("column", ["step_time_s", "peak_memory_gb", "gpus"])
@pytest.mark.parametrize("value", ["1e308", "-1e308", "1e-320", "nan", "1" + "0" * 400])
def test_a_cell_that_nobody_can_have_measured_is_refused(column: str, value: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"has {column}="):
        read(table_of(tmp_path, **{column: value}))
