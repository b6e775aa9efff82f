"""A command whose output is closed, or that is interrupted as it starts, ends plainly."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PROJECT = Path(__file__).parents[2]
COMMANDS = ["plan model=gpt_tiny hardware=a100_80 --top 1", "--version"]
MORE = ["", "plan model=gpt_tiny hardware=a100_80 --json", "size --parameters 1e9 --tokens 1e9", "validate --columns"]


def shell(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(PROJECT)}
    return subprocess.run(["sh", "-c", f"{sys.executable} {command}"], cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("words", [*COMMANDS, *(pytest.param(words, marks=pytest.mark.campaign("words")) for words in MORE)])
def test_a_closed_output_is_one_that_nobody_reads(words: str, tmp_path: Path) -> None:
    done = shell(f"-m launcher {words} >&-", tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("closed", ["<&-", "2>&-", "<&- >&- 2>&-"])
def test_other_closed_streams_change_no_exit_code(closed: str, tmp_path: Path) -> None:
    assert shell(f"-m launcher --version {closed}", tmp_path).returncode == 0
    assert shell(f"-m launcher nope {closed}", tmp_path).returncode == 2


@pytest.mark.parametrize("module", ["launcher.cli.main", "trainer.shared.run.errors", "launcher.cli.plan"])
def test_a_command_that_is_interrupted_as_it_starts_says_nothing(module: str, tmp_path: Path) -> None:
    (tmp_path / "start.py").write_text(
        "import sys\n"
        "class Interrupting:\n"
        "    def find_spec(name, path=None, target=None):\n"
        f"        if name == {module!r}:\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupting)\n"
        "from launcher.__main__ import main\n"
        "sys.exit(main())\n"
    )
    done = shell("start.py plan model=gpt_tiny hardware=a100_80", tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
