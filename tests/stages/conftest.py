"""Fixtures of the pipelines' tests: real clusters, and a small graph in a folder of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.trials.store import Record
from tests.clusters.kubernetes.fixture import kubernetes, namespace, real_node
from tests.clusters.slurm.fixture import slurm

__all__ = ["kubernetes", "namespace", "real_node", "slurm"]

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
    monkeypatch.setattr("launcher.tracking.process.MlflowMirror", Unmirrored)
    return tmp_path


class Unmirrored:
    """An observer that tells MLflow nothing: tests/tracking looks at what MLflow is told."""

    def __init__(self, *_: Any):
        """Nothing is held."""

    def begin(self) -> None:
        """Nothing to say."""

    def on_trial(self, record: Record) -> None:
        """Nothing to say."""

    def on_poll(self, records: Sequence[Record]) -> None:
        """Nothing to say."""

    def close(self) -> None:
        """Nothing to say."""

    def finish(self, patience_s: float = 0.0) -> None:
        """Nothing to wait for."""


LAUNCHER = """\
import sys
from launcher.cli.main import main
from launcher.tracking import process
from tests.stages.conftest import Unmirrored

process.MlflowMirror = Unmirrored
sys.exit(main(sys.argv[1:]))
"""
"""The command in a process of its own."""


def write(folder: Path, graph: dict[str, Any]) -> None:
    (folder / "conf" / "pipeline" / "small.yaml").write_text(yaml.safe_dump({"stages": graph}))
