"""What the pipelines' tests share: a small graph in a folder of its own, and launchers that are killed."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path
from subprocess import DEVNULL, TimeoutExpired
from typing import Any

import pytest
import yaml

from tests.warm import Process, forked

__all__ = ["forked"]

SIZE = {"model.layers": 2, "model.hidden": 32, "model.heads": 2, "model.vocab": 300, "model.seq": 16}
GRAPH: dict[str, Any] = {
    "data": {"stage": "prepare", "data.source": "text.txt", "data.vocab": 300},
    "base": {
        "stage": "train", "inputs": {"data": "data"}, "layout.tensor": 2, "cluster.gpus_per_node": 2, "run.steps": 4, "data.held_out": 0.2, **SIZE,
    },
    "score": {"stage": "evaluate", "inputs": {"model": "base", "data": "data"}, "cluster.gpus_per_node": 1, "data.held_out": 0.2},
    "hf": {"stage": "convert", "inputs": {"model": "base"}},
    "text": {"stage": "generate", "inputs": {"model": "hf"}, "prompts": ["some", "text"], "tokens": 5},
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: a text, and the pipeline ``small``."""
    (tmp_path / "text.txt").write_text("".join(f"some text {n} to learn from\n" for n in range(200)))
    (tmp_path / "conf" / "pipeline").mkdir(parents=True)
    write(tmp_path, GRAPH)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def killed_at(wanted: str, folder: Path, *words: str) -> dict[Path, int]:
    """A launcher that is killed when that stage has begun; the manifests then, and when they were written."""
    with launcher(*words) as process:
        while process.poll() is None and wanted not in begun(folder):
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    return manifests(folder)


def launcher(*words: str) -> Process:
    return Process("-m", "launcher", "run", "pipeline=small", "--config-dir", "conf", *words, stdout=DEVNULL, stderr=DEVNULL)


def manifests(folder: Path) -> dict[Path, int]:
    """When each manifest was written."""
    return {path: path.stat().st_mtime_ns for path in (folder / "runs/stages").glob("*/artifact/artifact.json")}


def kill_many(kills: int, longest: float, folder: Path, *words: str) -> None:
    """Kill that many launchers, each after a random time of up to ``longest`` seconds, of one graph after another (they share the text).
    What is whole stays as it is; at the end all graphs are, and each stage was made in one place."""
    if not kills:
        pytest.skip("starts many launchers: give --kills 17")
    draw, graph, whole = random.Random(kills), 0, dict[Path, int]()
    for _ in range(kills):
        while not _killed(draw.uniform(0.2, longest), *words, f"stages.base.run.seed={graph}"):
            graph += 1
        found = manifests(folder)
        assert whole.items() <= found.items(), "a stage that was whole is lost, or has been made again"
        whole = found
    for seed in range(graph + 1):
        with launcher(*words, f"stages.base.run.seed={seed}") as process:
            assert process.wait() == 0
    found = manifests(folder)
    assert whole.items() <= found.items() and len(found) == 1 + (graph + 1) * (len(GRAPH) - 1)
    print(f"{kills} launchers killed, {graph + 1} graphs, {len(found)} artifacts")


def _killed(after_s: float, *words: str) -> bool:
    """Whether a launcher had not come to its end before."""
    with launcher(*words) as process:
        try:
            assert process.wait(after_s) == 0
        except TimeoutExpired:
            process.kill()
            return True
    return False


def attempts(folder: Path) -> set[int]:
    """Numbers of the last attempts of all stages."""
    return {json.loads(path.read_text())["attempt"] for path in folder.glob("runs/trials/*/trial.json")}


def begun(folder: Path) -> set[str]:
    """Stages whose processes have been started."""
    records = [json.loads(path.read_text()) for path in folder.glob("runs/trials/*/trial.json")]
    return {record["config"]["stage"]["name"] for record in records if record["handle"]}


def write(folder: Path, graph: dict[str, Any]) -> None:
    (folder / "conf" / "pipeline" / "small.yaml").write_text(yaml.safe_dump({"stages": graph}))
