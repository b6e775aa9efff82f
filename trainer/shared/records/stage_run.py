"""The section ``stage`` of a configuration that the launcher writes: the run makes an artifact of a pipeline, or runs a command line
(``generate``, ``serve``, ``evaluate --tasks``). A run of its own has none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.shared.records.artifacts import Artifact, ArtifactKind, read_artifact
from trainer.shared.run.keys import key
from trainer.shared.run.read import SECTION, from_record, read_yaml

Finish = Callable[[Mapping[str, Any]], None]
"""Called by rank 0 of a run at the end, with the result that it writes next: a result exists only if its artifact is whole."""
RETURNED_FILE = "returned.pkl"
"""File of what a function returned, in its artifact's folder."""


@dataclass
class StageRun:
    """The inputs and the output of a stage. Its id names its output; folders are named as the ranks see them."""

    name: str = key("", "name of the stage in its pipeline")
    verb: str = key("", "the work: train, tune, evaluate, prepare, convert, generate, choose, serve")
    id: str = key("", "identity of the stage, and of what it makes")
    folder: str = key("", "folder of the artifact that it makes; empty: a command line outside any pipeline")
    gives: str = key("", "kind of that artifact", choices=("", *(kind.value for kind in ArtifactKind)))
    inputs: dict[str, str] = key(dict, "identity of each input")
    sources: dict[str, str] = key(dict, "folder of each input")
    made_by: dict[str, str] = key(dict, "of inputs that a stage makes: its name")
    work: str = key("", "class of the trainer that does it, as MODULE:CLASS; empty: what the command line of that verb asks")
    settings: dict[str, Any] = key(dict, "settings of that work")

    @property
    def made(self) -> Artifact | None:
        """Returns the artifact, if it exists, is whole, and belongs to this stage."""
        artifact = read_artifact(Path(self.folder))
        return artifact if artifact is not None and artifact.made_by == self.id and artifact.kind.value == self.gives else None


def trains(config: Mapping[str, Any]) -> bool:
    """Returns whether the configuration of a trial is a training's, not another stage's: only a training saves checkpoints."""
    run = config.get("run", {})
    return SECTION not in config or (run.get("task") == "train" and bool(run.get("checkpoint", {}).get("every")))


def stage_in(data: Mapping[str, Any]) -> StageRun | None:
    """Returns the section in the content of a configuration."""
    return from_record(StageRun, data[SECTION]) if SECTION in data else None


def load_stage(path: str | Path) -> StageRun | None:
    """Reads the section of a file. Raises ``ConfigError`` if that cannot be read."""
    data = read_yaml(path)
    return stage_in(data) if isinstance(data, dict) else None  # anything else is not a run, which ``load`` says
