"""A pipeline schedule is one function and its name: what is added so is validated, planned and trained."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.shared import new_schedule

pytestmark = pytest.mark.slow  # runs programs

ROOT = Path(__file__).resolve().parents[2]


def checked(copy: Path, *words: str) -> str:
    """Adds the schedule to a copy of the project; returns the output of the checks there."""
    for place in ("launcher", "trainer", "hydra_plugins", "conf", "recipes"):
        shutil.copytree(ROOT / place, copy / place)
    assert new_schedule.add(copy) <= 8  # as CONTRIBUTING.md says
    environment = os.environ | {"PYTHONPATH": f"{copy}{os.pathsep}{ROOT}"}
    program = [sys.executable, str(ROOT / "tests/shared/new_schedule.py"), *words]
    done = subprocess.run(program, cwd=copy, env=environment, capture_output=True, text=True, timeout=900)
    return done.stdout if done.returncode == 0 else done.stdout + done.stderr


def test_one_new_function_is_a_schedule_that_is_validated_and_planned(tmp_path: Path) -> None:
    assert checked(tmp_path).endswith("all holds\n")


@pytest.mark.campaign("layouts")
def test_one_new_function_is_a_schedule_that_is_trained(tmp_path: Path) -> None:
    assert checked(tmp_path, str(tmp_path / "runs")).endswith("all holds\n")
