"""``evaluate``: the loss of a checkpoint on a text, or how it solves tasks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from launcher.config import Config, check_ours
from launcher.stages import predicted
from launcher.stages.kinds.generate import GenerateStage
from launcher.stages.kinds.train import RunStage
from launcher.stages.stage import MODEL, ArtifactKinds, PlannedStage, Stage, StagePlan
from launcher.stages.tasks import check_tasks
from trainer.shared.records.artifacts import ArtifactKind
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.stages import EvaluateSettings


class EvaluateStage(RunStage):
    """Figures of a text."""

    verb = "evaluate"
    takes: ClassVar[ArtifactKinds] = {"model": (ArtifactKind.CHECKPOINT,), "data": (ArtifactKind.CORPUS,)}
    gives = ArtifactKind.METRICS
    own = EvaluateSettings
    work = "trainer.stages.kinds:EvaluateWork"

    @classmethod
    def variant(cls, settings: Mapping[str, Any]) -> type[Stage]:
        return ScoreStage if settings.get("tasks") else cls

    def typed(self) -> EvaluateSettings:
        found: EvaluateSettings = super().typed()
        if extra := [key for key in ("tasks_folder", "limit") if self.settings.get(key)]:
            raise ConfigError(
                f"stages.{self.name}.{extra[0]}={self.settings[extra[0]]} is for tasks; name some with tasks, or leave it out"
            )
        return found

    def plan(self, config: Config, before: Mapping[str, PlannedStage]) -> StagePlan:
        check_ours(config, self.verb)
        if not self.reads_examples and self.inputs["model"] not in before:
            raise ConfigError(f"inputs.model={self.inputs['model']} is a folder; use 'trireme evaluate FOLDER', or name a train stage")
        config = self.resolved(config, before, task="evaluate", warmup_steps=0)
        seconds = predicted.fitting(config, predicted.of_evaluation(config))
        return StagePlan(config=config, content=self.content(config), predicted_s=seconds)

    def placed(self, item: PlannedStage) -> Config:
        return self.in_folders(item, item.sources["model"])


class ScoreStage(GenerateStage):
    """Figures of tasks, whose data another stage may have fetched."""

    verb = "evaluate"
    takes: ClassVar[ArtifactKinds] = {"model": MODEL, "tasks": (ArtifactKind.TASKS,)}
    gives = ArtifactKind.METRICS
    own = EvaluateSettings
    run_keys = None
    work = "trainer.stages.kinds:EvaluateWork"

    def inputs_taken(self) -> ArtifactKinds:
        return {name: kinds for name, kinds in self.takes.items() if name == "model" or name in self.inputs}

    def plan(self, config: Config, before: Mapping[str, PlannedStage]) -> StagePlan:
        """Predicts nothing of tasks. A folder of them is told apart by the state of its files."""
        planned, fetched = self.reading(config, before), self.inputs.get("tasks", "")
        settings = planned.settings
        check_tasks(settings["tasks"], fetched or settings["tasks_folder"], before[fetched].settings["tasks"] if fetched in before else ())
        predicted.fitting(planned.config, predicted.of_generation(planned.config, [" " * planned.config.model.seq], 1))
        if settings["tasks_folder"]:
            folder = settings["tasks_folder"] = os.path.abspath(settings["tasks_folder"])
            files = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(Path(folder).glob("*"))]
            planned.content |= {"tasks_folder": folder, "files": files}
        return planned

    def told(self, item: PlannedStage) -> dict[str, Any]:
        return super().told(item) | ({"tasks_folder": str(item.sources["tasks"])} if "tasks" in item.sources else {})
