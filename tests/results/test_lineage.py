"""What a box of the graph of stages says."""

from __future__ import annotations

import json
from pathlib import Path

from launcher.results.lineage import came_to
from trainer.shared.records.artifacts import METRICS_FILE, ArtifactKind, write_artifact
from trainer.shared.records.stage_run import StageRun


def scored(folder: Path, **figures: float) -> str:
    folder.mkdir()
    (folder / METRICS_FILE).write_text(json.dumps({"loss": 2.0, "perplexity": 7.4, "bits_per_byte": 3.0, **figures}))
    write_artifact(folder, ArtifactKind.METRICS, "one")
    return came_to(StageRun(id="one", folder=str(folder), gives="metrics"))


def test_a_box_shows_how_many_answers_are_right_where_that_was_asked(tmp_path: Path) -> None:
    assert scored(tmp_path / "text") == "loss 2.00, perplexity 7.40"
    assert scored(tmp_path / "answers", exact_match=0.917) == "loss 2.00, exact match 0.92"
    assert scored(tmp_path / "before", exact_match=0.0) == "loss 2.00, exact match 0.00"
