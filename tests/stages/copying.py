"""A kind of stage that Trireme does not have: what is known of it before it runs, and what its process does."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from launcher.config import Config
from launcher.stages.stage import PLACE, ArtifactKinds, PlannedStage, Stage, StagePlan
from trainer.shared.records.artifacts import MANIFEST, ArtifactKind
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.keys import key
from trainer.stages.kinds import ProcessWork


@dataclass
class CopySettings:
    """Settings of a copy."""

    note: str = key("", "text that is put beside the weights")


class CopyStage(Stage):
    """A checkpoint beside a note."""

    verb = "copy"
    takes: ClassVar[ArtifactKinds] = {"model": (ArtifactKind.CHECKPOINT,)}
    gives = ArtifactKind.CHECKPOINT
    own = CopySettings
    run_keys = PLACE
    work = "tests.stages.copying:CopyWork"

    def plan(self, config: Config, before: Mapping[str, PlannedStage]) -> StagePlan:
        planned = super().plan(config, before)
        if not planned.settings["note"]:
            raise ConfigError("note= says nothing; give a text")
        return planned


class CopyWork(ProcessWork):
    """Makes the copy."""

    def act(self) -> None:
        shutil.copytree(self.stage.sources["model"], self.folder, ignore=shutil.ignore_patterns(MANIFEST))
        (self.folder / "note.txt").write_text(self.stage.settings["note"])
