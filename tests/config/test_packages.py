"""Without the trainer's packages every verb that needs them says so in one line, with the command that installs them."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.cli.main import main
from launcher.config import packages


@pytest.mark.parametrize(
    "words",
    [
        ["train", "model=gpt_tiny", "data=synthetic"],
        ["search", "model=gpt_tiny", "hardware=a100_80"],
        ["search", "task=inference", "model=gpt_tiny", "hardware=a100_80", "workload.input=64", "workload.output=16"],
        ["doctor"],
        ["serve", "checkpoint"],
        ["generate", "checkpoint", "--prompt", "x"],
        ["evaluate", "checkpoint"],
        ["convert", "export", "a", "b"],
        ["prepare"],
        ["prepare", "--tasks", "prose"],
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_what_needs_torch_says_so_in_one_line(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(packages.MODULES, "train", ("not_installed_here",))
    assert main(words) == 2
    said = capfd.readouterr().err.splitlines()[-1]
    assert "needs the Python package 'not_installed_here'; run " in said and "pip install" in said
    assert not list(tmp_path.iterdir())
