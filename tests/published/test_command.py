"""``python -m benchmarks.published``: what was published is never lost."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.published.__main__ import main
from benchmarks.published.inference import BATCHES

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
