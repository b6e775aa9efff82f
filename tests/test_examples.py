"""What users copy from ``examples/`` works as its page says."""

from __future__ import annotations

import ast
import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from launcher.cli.main import main
from tests.tracking.fixtures import at_work
from tests.warm import forked, python

__all__ = ["forked"]

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parents[1] / "examples"
COMMANDS = re.findall(r"`(trireme [^`]+)`", (EXAMPLES / "README.md").read_text())
DOCUMENTED = [
    line
    for page in (EXAMPLES.parent / "README.md", *sorted((EXAMPLES.parent / "docs").rglob("*.md")))
    for line in re.findall(r"^trireme plan .*--explain.*$", page.read_text(), re.MULTILINE)
    if "[" not in line
]
"""Layouts have names that are true of one cluster alone."""


def test_every_command_of_the_examples_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    assert len(COMMANDS) == 5
    for command in COMMANDS:
        words = shlex.split(command)[1:]
        if words[0] == "train" and "--dry-run" not in words:
            words += ["run.steps=3", "cluster.gpus_per_node=1"]
        if words[0] == "trainers":
            words += [f"trainer.launch.python={python()}"]  # which has imported torch
        assert main(words) == 0, command


def test_every_cell_of_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The value of a cell's last line is what a notebook shows."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    cells = json.loads((EXAMPLES / "verbs.ipynb").read_text())["cells"]
    known: dict[str, Any] = {}
    with at_work(tmp_path / "runs"):
        for *lines, last in (ast.parse("".join(cell["source"])).body for cell in cells if cell["cell_type"] == "code"):
            exec(compile(ast.Module(lines, []), "cell", "exec"), known)
            if isinstance(last, ast.Expr):
                shown = eval(compile(ast.Expression(last.value), "cell", "eval"), known)
                assert len(getattr(shown, "data", shown)), ast.unparse(last)
            else:
                exec(compile(ast.Module([last], []), "cell", "exec"), known)
    assert set(known["measured"]["status"]) == {"done"} and list(known["measured"]["place"]) == [1, 2]
    assert known["ranked"].equals(known["measured"])


@pytest.mark.parametrize("command", DOCUMENTED)
def test_every_documented_layout_is_one_of_its_plan(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(command)[1:]) == 0


def test_some_layout_is_documented() -> None:
    assert DOCUMENTED
