"""The winner of a search of another trainer is a folder that runs without this project."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.results.report import render
from launcher.trials.store import Store
from launcher.trials.told import as_files
from tests.observe.test_whole_sweeps import sweep
from trainer.shared.run.foreign import CommandConfig
from trainer.shared.run.schema import LayoutConfig

pytestmark = pytest.mark.slow


def made(tmp_path: Path, command: CommandConfig, layout: LayoutConfig, per_node: int = 4) -> Path:
    folder = tmp_path / "a folder"
    folder.mkdir()
    for name, text in as_files(command, layout, per_node, "fast").items():
        (folder / name).write_text(text)
    return folder


def test_the_script_runs_the_same_words_with_what_torchrun_gives_its_ranks(tmp_path: Path) -> None:
    show = "import os, sys; print(sys.argv[1:], os.environ['A'], open(sys.argv[1]).read())"
    words = ["{python}", "-c", show, "{folder}/ds.json", "it's $HOME", "r{rank}of {local_rank}", "{node_rank}", "--x={y: 1}"]
    command = CommandConfig(words=words, files={"ds.json": "content"}, environment={"A": "b c"})
    folder = made(tmp_path, command, LayoutConfig(data=8))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    places = {"PATH": path, "RANK": "5", "LOCAL_RANK": "1", "GROUP_RANK": "1", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    done = subprocess.run(["sh", "command.sh"], cwd=folder, env=os.environ | places, capture_output=True, text=True)
    assert done.stdout.strip() == f"{[f'{folder}/ds.json', words[4], 'r5of 1', '1', '--x={y: 1}']} b c content", done.stderr
    assert "--nnodes=2 --nproc-per-node=4" in (folder / "command.sh").read_text()


@pytest.mark.parametrize(
    ("starts", "ranks", "words"), [("node", 8, "--nnodes=2 --nproc-per-node=1"), ("rank", 2, "--nnodes=1 --nproc-per-node=2")]
)
def test_torchrun_is_told_how_many_it_starts(starts: str, ranks: int, words: str) -> None:
    assert words in as_files(CommandConfig(words=["x"], starts=starts), LayoutConfig(tensor=ranks, data=1), 4, "")["command.sh"]


def test_the_report_shows_what_the_fastest_trial_was_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sweep("deepspeed")
    page = render(Store("runs").sweep("drill"))
    assert "own words" in page and "--deepspeed_config" in page and "train_micro_batch_size_per_gpu" in page
