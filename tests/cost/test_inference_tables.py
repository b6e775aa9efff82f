"""The cost of inference against published tables."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.history.inference import MARKS, PAGE, TABLES, UNSEEN, figures, newest, with_block
from benchmarks.published.convert import converted
from benchmarks.published.inference import of_batches
from benchmarks.published.raw import RawRow
from launcher.cli import console
from launcher.cli.validate import main
from launcher.config.hardware import shipped_hardware
from launcher.tables.canonical import MeasuredRun, write, written
from launcher.tables.inference import COLUMNS, is_inference, judge, read, shape_of, summary, weighted_median
from trainer.shared.run.errors import ConfigError

pytestmark = pytest.mark.slow

DATA = Path(__file__).parents[2] / "benchmarks" / "published" / "inference_data"


@pytest.mark.parametrize(("table", "error"), [("inference.csv", 0.06), ("serving.csv", 0.07)])
def test_published_latencies_are_predicted(tmp_path: Path, table: str, error: float) -> None:
    rows, columns = converted(DATA / table)
    write(tmp_path / table, rows, columns)
    found = summary(judge(read(tmp_path / table), shipped_hardware()))
    assert found.median is not None and found.median <= error
    assert found.verdicts is None or found.verdicts.f1 is None or found.verdicts.f1 > 0.9


def test_no_figure_is_cut_in_a_terminal_of_80_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "t.csv", *converted(DATA.parent / "inference_unseen" / "served.csv"))
    monkeypatch.setattr(console, "wide_console", lambda: Console(width=80))
    assert main([str(tmp_path / "t.csv")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split()[:1] == ["MiniMax-M2.5"] for line in lines)
    assert not any("…" in line or len(line) > 80 for line in lines)


def test_every_model_weighs_the_same_in_the_median() -> None:
    assert weighted_median([0.1] * 9 + [0.3, 0.5], ["many"] * 9 + ["few", "few"]) == pytest.approx(0.1)
    assert weighted_median([0.1] * 9 + [0.3, 0.5], ["many"] * 9 + ["one", "other"]) == pytest.approx(0.3)


RATE = {
    "source": "TensorRT-LLM (v1.0)",
    "model": "Llama 3.1 8B",
    "gpu": "H100-80GB-SXM",
    "tp": "2",
    "pp": "1",
    "input_len": "128",
    "output_len": "100",
}


def canonical_row(cells: dict[str, Any]) -> MeasuredRun:
    return MeasuredRun(1, {name: column.read(written(cells[name])) for name, column in COLUMNS.items()})


def cells_of(**cells: str) -> dict[str, Any]:
    return of_batches(RawRow(1, {**RATE, **cells}))


@pytest.mark.parametrize(
    ("unit", "seconds"), [("output tokens/s", 32), ("tok/s per GPU", 16), ("out tokens per second (per GPU)", 16), ("requests/s", None)]
)
def test_a_rate_of_generated_tokens_is_a_latency_of_its_batch(unit: str, seconds: float | None) -> None:
    cells = cells_of(batch="8", throughput="25", unit=unit, notes="fp8")
    assert cells["latency_ms"] == (seconds and pytest.approx(1e3 * seconds)) and cells["mode"] == "static"
    assert (cells["weights"], cells["kv"], cells["kv_heads"], cells["engine"]) == ("fp8", "fp8", 8, "tensorrt_llm")
    assert ("latency_ms (batch and length over the rate)" in cells["assumed"]) == (seconds is not None)


def test_a_printed_latency_comes_before_a_rate() -> None:
    assert cells_of(batch="8", throughput="25", unit="output tokens/s", latency_ms="7")["latency_ms"] == 7


@pytest.mark.parametrize("taken", [{}, {"notes": "inconsistent"}])
def test_a_rate_without_a_batch_is_that_of_as_many_requests_as_the_engine_runs(taken: dict[str, str]) -> None:
    row = canonical_row(cells_of(throughput="9000", unit="output tokens/s", **taken))
    found = judge([row], shipped_hardware())[0]
    if taken:
        assert found.pair is None
        return
    most = judge([MeasuredRun(1, {**row.cells, "batch": 2048})], shipped_hardware())[0]
    assert found.pair is not None and found.pair == (pytest.approx(most.judged_s), pytest.approx(1 / 9000))
    less = judge([MeasuredRun(1, {**row.cells, "batch": 64})], shipped_hardware())[0]
    assert less.judged_s > found.judged_s


NAMED = (
    "Llama-3.1-8B-Instruct", "Llama 3.3 70B", "Llama 3.1 405B", "LLaMA 7B", "Llama-2-13b", "LLaMA 33B", "LLaMA 65B", "Llama-2-70B-chat",
    "Mistral-7B-v0.1", "Qwen3-32B-NVFP4", "Qwen3-14B", "Qwen3-8B", "Qwen2-72B", "Qwen2.5-32B", "Qwen2-7B", "Qwen1.5-7B", "opt-6.7b",
    "GPT-J 6B", "bloom-7b1", "BLOOM-176B", "GPT-NeoX 20B", "Falcon 40B", "Falcon 180B",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMED)
def test_a_model_has_about_as_many_parameters_as_its_name_says(name: str) -> None:
    shape = shape_of(canonical_row(cells_of(model=name)))
    billions = float(re.findall(r"([\d.]+)b", name.lower())[0])
    assert shape.parameters / 1e9 == pytest.approx(billions, rel=0.12)


MIXTURES = {
    "Mixtral-8x7B-v0.1": 46.7,
    "Mixtral-8x22B": 141,
    "Qwen3-30B-A3B": 30.5,
    "Qwen3-235B-A22B-FP8": 235,
    "MiniMax-M2.5": 229,
    "DeepSeek-R1": 671,
}


@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_of_experts_has_the_parameters_of_its_model_card(name: str) -> None:
    assert shape_of(canonical_row(cells_of(model=name))).parameters / 1e9 == pytest.approx(MIXTURES[name], rel=0.02)


def test_an_unknown_mixture_is_not_taken_for_the_plain_model_of_its_name() -> None:
    assert cells_of(model="Mistral-MoE-7B")["heads"] is None


def test_mixtures_that_no_constant_was_fitted_to_are_predicted(tmp_path: Path) -> None:
    write(tmp_path / "t.csv", *converted(DATA.parent / "inference_unseen" / "served.csv"))
    judged = judge(read(tmp_path / "t.csv"), shipped_hardware())
    found = summary(judged)
    assert found.median is not None and found.median <= 0.17 and found.inside is not None and found.inside >= 0.9
    assert {each.reason for each in judged} == {"", "tensor degree does not divide the heads"}


@pytest.mark.parametrize(
    ("source", "profile", "version"),
    [
        ("TensorRT-LLM performance.md (v0.6.1)", "tensorrt_llm", "0.6.1"),
        ("TensorRT-LLM (0.5)", "tensorrt_llm", "0.5"),
        ("TensorRT-LLM docs/source/performance.md", "tensorrt_llm", "0.6"),
        ("TensorRT-LLM docs/source/performance/perf-overview.md", "tensorrt_llm", None),
        ("TensorRT-LLM 0.11, C++ session", "tensorrt_llm", "0.11"),
        ("TRTLLM 1.2.0rc6.post1", "tensorrt_llm", "1.2.0rc6.post1"),
        ("vLLM 0.5.4.", "vllm", "0.5.4"),
        ("vLLM nightly-5b8c30d6", "vllm", None),
        ("somebody 0.5", None, None),
    ],
)
def test_an_engine_and_its_release_are_read_where_a_source_says_them(source: str, profile: str | None, version: str | None) -> None:
    cells = cells_of(source=source)
    assert (cells["engine"], cells["engine_version"]) == (profile, version)


def test_a_row_is_predicted_as_its_release_runs_and_as_one_of_today_where_it_says_none() -> None:
    row = canonical_row(cells_of(batch="8", latency_ms="250", source="TensorRT-LLM")).cells
    versions = (None, "1.0.0rc3", "0.11", "twelve")
    today, same, native, strange = judge([MeasuredRun(1, row | {"engine_version": one}) for one in versions], shipped_hardware())
    assert native.latency_s > same.latency_s == today.latency_s
    assert strange.latency_s is None and strange.reason.startswith("engine.version='twelve' is not a release")
    other = judge([MeasuredRun(1, row | {"engine": "fastertransformer", "engine_version": "5.1"})], shipped_hardware())[0]
    assert other.latency_s is not None, "a profile that tells no releases apart is that of all"


def test_a_table_of_before_rates_were_read_is_read_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    names = [name for name in COLUMNS if name != "tokens_per_s"]
    path.write_text(",".join(names) + "\n" + ",".join("unknown" for _ in names) + "\n")
    assert read(path)[0]["tokens_per_s"] is None


@pytest.mark.parametrize(
    ("column", "factor", "unit"),
    [
        ("latency_ms", 1e-3, "milliseconds"),
        ("tpot_ms", 1e-3, "milliseconds"),
        ("tpot_ms", 1e3, "milliseconds"),
        ("tokens_per_s", 1e-3, "tokens"),
    ],
)
def test_a_table_in_other_units_is_refused_and_its_predictions_are_not_written(
    tmp_path: Path, column: str, factor: float, unit: str
) -> None:
    row = canonical_row(cells_of(batch="8", throughput="900", unit="output tokens/s")).cells
    row |= {"mode": "static" if column == "latency_ms" else "closed", "latency_ms": None}
    made = judge([MeasuredRun(1, row | {"tokens_per_s": 1.0 if column == "tokens_per_s" else None})], shipped_hardware())[0]
    assert made.judged_s is not None
    true = 1 / made.judged_s if column == "tokens_per_s" else 1e3 * made.judged_s
    write(tmp_path / "right.csv", [row | {column: true}], COLUMNS)
    assert main([str(tmp_path / "right.csv"), "--out", str(tmp_path / "of_right.csv")]) == 0
    write(tmp_path / "wrong.csv", [row | {column: factor * true}], COLUMNS)
    words = f"{column} of .* are 1e\\+03 times {'less' if factor < 1 else 'more'} than predicted; convert them to {unit}"
    with pytest.raises(ConfigError, match=words):
        main([str(tmp_path / "wrong.csv"), "--out", str(tmp_path / "of_wrong.csv")])
    assert (tmp_path / "of_right.csv").exists() and not (tmp_path / "of_wrong.csv").exists()


@pytest.mark.parametrize("name", ["nope", "../engine/vllm"])
def test_a_row_of_an_engine_that_is_not_described_is_counted_with_the_reason_and_the_others_are_predicted(name: str) -> None:
    row = canonical_row(cells_of(batch="8", latency_ms="250")).cells
    strange, known = judge([MeasuredRun(1, row | {"engine": name}), MeasuredRun(2, row)], shipped_hardware())
    assert strange.reason == f"engine {name} is not described" and strange.latency_s is None and known.latency_s is not None


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
    assert {hashlib.sha256(path.read_bytes()).hexdigest() for path in (*TABLES, *UNSEEN)} == {
        table["sha256"] for table in newest()["tables"]
    }


def test_a_record_is_what_the_cost_model_says_of_its_tables() -> None:
    for recorded, again in zip(newest()["tables"], figures(leave_out=False)):
        for key in ("timed", "median", "row_median", "p90", "inside", "bias"):
            assert recorded["all"][key] == pytest.approx(again["all"][key], abs=1e-4)
