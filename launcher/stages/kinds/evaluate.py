"""``evaluate``: the loss of a checkpoint on a text, or how it solves tasks."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from launcher.config import Config, check_ours
from launcher.stages import predicted
from launcher.stages.kinds.generate import GenerateStage
from launcher.stages.kinds.train import TuneStage
from launcher.stages.stage import MODEL, ArtifactKinds, KnownModel, PlannedStage, Stage
from launcher.stages.tasks import check_tasks
from trainer.shared.records.artifacts import ArtifactKind
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.schema import RunConfig
from trainer.shared.run.stages import EvaluateSettings


class EvaluateStage(TuneStage):
    """Figures of a text."""

    verb = "evaluate"
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

    def check_trainer(self, config: Config) -> None:
        check_ours(config, self.verb)

    def check_model(self, known: KnownModel, is_made: bool) -> None:
        if not (is_made or self.reads_examples):
            raise ConfigError(f"inputs.model={self.inputs['model']} is a folder; use 'trireme evaluate FOLDER', or name a train stage")

    def run_config(self, run: RunConfig) -> RunConfig:
        return dataclasses.replace(run, task="evaluate", warmup_steps=0)

    def seconds(self, config: Config) -> float | None:
        return predicted.fitting(config, predicted.of_evaluation(config))

    def makes(self, config: Config, before: Mapping[str, PlannedStage]) -> None:
        return None

    def checkpoints(self, item: PlannedStage) -> Path:
        return item.sources["model"]

    def placed(self, item: PlannedStage) -> Config:
        return dataclasses.replace(super().placed(item), tune=item.config.tune)


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

    def seconds(self, config: Config, settings: dict[str, Any], known: KnownModel, before: Mapping[str, PlannedStage]) -> None:
        """Tasks are not predicted."""
        fetched = self.inputs.get("tasks", "")
        check_tasks(settings["tasks"], fetched or settings["tasks_folder"], before[fetched].settings["tasks"] if fetched in before else ())
        predicted.fitting(config, predicted.of_generation(config, [" " * config.model.seq], 1))

    def files(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Those of a folder of tasks, whose path becomes absolute."""
        if not settings["tasks_folder"]:
            return {}
        folder = settings["tasks_folder"] = os.path.abspath(settings["tasks_folder"])
        return {"files": [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(Path(folder).glob("*"))]}

    def told(self, item: PlannedStage) -> dict[str, Any]:
        return super().told(item) | ({"tasks_folder": str(item.sources["tasks"])} if "tasks" in item.sources else {})
