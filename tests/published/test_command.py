"""``python -m benchmarks.published``: what was published is never lost."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import published
from benchmarks.published.__main__ import main
from benchmarks.published.convert import converted
from benchmarks.published.inference import BATCHES, of_served
from benchmarks.published.raw import NUMBERS, RawRow

pytestmark = pytest.mark.slow

ROW = dict(zip(BATCHES, ("GPT-1.3B", "24", "2048", "A100-80GB", "1", "1", "8", "60", "20", "250")))
RAW = f"{','.join(ROW)}\n{','.join(ROW.values())}\n"


def itself(raw: Path) -> Path:
    return raw


def a_symbolic_link(raw: Path) -> Path:
    (link := raw.with_name("link.csv")).symlink_to(raw)
    return link


def a_hard_link(raw: Path) -> Path:
    os.link(raw, link := raw.with_name("hard.csv"))
    return link


@pytest.mark.parametrize("named", [itself, a_symbolic_link, a_hard_link])
def test_a_raw_table_is_not_overwritten_by_what_becomes_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], named: Callable[[Path], Path]
) -> None:
    (raw := tmp_path / "raw.csv").write_text(RAW)
    out = named(raw)
    assert main([str(raw), str(out)]) == 2
    assert raw.read_text() == RAW
    assert capsys.readouterr().err == f"error: CANONICAL.csv={out} is the raw table {raw} itself, which would be lost; name another file\n"


def test_a_table_becomes_another_file(tmp_path: Path) -> None:
    (raw := tmp_path / "raw.csv").write_text(RAW)
    (out := tmp_path / "out.csv").write_text("of an earlier time")
    assert main([str(raw), str(out)]) == 0
    assert raw.read_text() == RAW and out.read_text().startswith("source,model,family")


@pytest.mark.parametrize("cell", ["abc", "-5", "x", "nan", "inf", "1_000", "1 000"])
@pytest.mark.parametrize("column", ["layers", "batch", "latency_ms"])
def test_what_is_no_number_in_a_column_of_numbers_is_an_error_with_row_and_column(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], column: str, cell: str
) -> None:
    (raw := tmp_path / "raw.csv").write_text(RAW + ",".join((ROW | {column: cell}).values()) + "\n")
    assert main([str(raw), str(tmp_path / "out.csv")]) == 2
    assert capsys.readouterr().err == f"error: row 2 of {raw} has {column}={cell}; give a number above 0, or leave the cell blank\n"
    assert not (tmp_path / "out.csv").exists()


@pytest.mark.parametrize("cell", ["", "64-256", "8.0", "1e1", "0"])
def test_a_blank_a_range_and_a_number_are_taken(tmp_path: Path, cell: str) -> None:
    (raw := tmp_path / "raw.csv").write_text(RAW + ",".join((ROW | {"batch": cell}).values()) + "\n")
    assert main([str(raw), str(tmp_path / "out.csv")]) == 0


def test_a_row_of_more_cells_than_columns_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (raw := tmp_path / "raw.csv").write_text(RAW.rstrip() + ",5\n")
    assert main([str(raw), str(tmp_path / "out.csv")]) == 2
    assert "row 1 of" in capsys.readouterr().err


@pytest.mark.parametrize("rows", [50, pytest.param(1_000_000, marks=pytest.mark.campaign("words"))])
def test_every_table_that_ships_is_taken_and_no_column_that_is_read_as_a_number_is_left_out(rows: int, tmp_path: Path) -> None:
    folder = Path(published.__file__).parent
    tables = list(folder.rglob("*.csv"))
    for number, path in enumerate(tables):
        with path.open() as whole, (part := tmp_path / f"{number}.csv").open("w") as file:
            file.writelines(itertools.islice(whole, rows))
        assert converted(part)[0], path
    assert len(tables) > 10
    code = "".join(path.read_text() for path in folder.glob("*.py"))
    assert set(re.findall(r"\.(?:number_of|whole)\(\"(\w+)\"\)", code)) - {"year"} <= set(NUMBERS)


@pytest.mark.parametrize(
    ("backend", "products", "kv"),
    [
        ("trtllm", "fp8", "fp8"),
        ("trtllm", "nvfp4", "fp8"),
        ("trtllm", "fp8_block", "bf16"),
        ("trtllm", "", "bf16"),
        ("vllm", "fp8", "bf16"),
    ],
)
def test_quantised_checkpoints_of_served_load_hold_what_is_written_by_default(backend: str, products: str, kv: str) -> None:
    """Model Optimizer writes 8-bit keys and values, TensorRT-LLM follows the checkpoint; of all others nothing is known."""
    served = {"model_path": "Qwen3-32B", "system": "b200_sxm", "precision": "fp8", "backend": backend}
    served |= {"isl": "1024", "osl": "128", "batch_size": "8", "tp_size": "2", "gemm_quant_mode": products, "silicon_tpot_ms": "9"}
    assert of_served(RawRow(1, served))["kv"] == kv
