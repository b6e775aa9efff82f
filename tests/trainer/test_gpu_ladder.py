"""The check of a machine with GPUs, on one without."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_ladder import Check
from tests.farm import Farm

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@pytest.mark.campaign("layouts")
def test_the_same_program_runs_on_a_machine_without_a_gpu(tmp_path: Path) -> None:
    words = [sys.executable, "benchmarks/gpu_ladder.py", "--device", "cpu", "--parts", "correctness", "--out", str(tmp_path / "out")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("  good  ") == 2 and "no comparisons failed" in done.stdout
    assert json.loads((tmp_path / "out" / "report.json").read_text())["failed"] == 0


def test_a_comparison_that_fails_is_counted_and_said(farm: Farm, capsys: Any) -> None:
    check = Check(farm, "cpu", 1, 1, None)
    check.compare("a", lambda: [1.0, 2.0], [1.0, 2.1], 1e-3)
    check.compare("b", lambda: check.losses("cpu", "fp32", {"tensor": 3}), [1.0], 1e-3)
    said = capsys.readouterr().out
    assert check.failed == 2 and "FAILED   a: losses differ by 4.8e-02" in said
    assert "FAILED   b: " in said and "tensor" in said, "the reason of a run that failed"
