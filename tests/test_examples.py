"""What users copy from ``examples/`` works as its page says."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from launcher.cli.main import main
from tests.warm import forked

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
        assert main(words) == 0, command


@pytest.mark.parametrize("command", DOCUMENTED)
def test_every_documented_layout_is_one_of_its_plan(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(command)[1:]) == 0


def test_some_layout_is_documented() -> None:
    assert DOCUMENTED
