"""``prepare``: a text becomes a corpus, or the data of published tasks is fetched."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from launcher.config import Config
from launcher.config.rules import with_paths
from launcher.stages import predicted
from launcher.stages.stage import PlannedStage, Stage, StagePlan
from trainer.shared.corpora.index import given_tokenizer
from trainer.shared.corpora.sources import open_source
from trainer.shared.records.artifacts import ArtifactKind
from trainer.shared.records.named_tokens import tokenizer_digest
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.keys import key
from trainer.shared.run.read import to_dict


@dataclass
class PrepareSettings:
    """Data of published tasks, in place of a corpus."""

    tasks: list[str] = key(list, "names of tasks of lm-evaluation-harness whose data is fetched; none = a corpus is prepared")


class PrepareStage(Stage):
    """A corpus."""

    verb = "prepare"
    gives = ArtifactKind.CORPUS
    own = PrepareSettings
    work = "trainer.stages.kinds:PrepareWork"

    @classmethod
    def variant(cls, settings: Mapping[str, Any]) -> type[Stage]:
        return FetchStage if settings.get("tasks") else cls

    def plan(self, config: Config, before: Mapping[str, PlannedStage]) -> StagePlan:
        """Identifies it by the settings of the preparation, and which files it would read in which state."""
        if config.data.kind != "corpus":
            raise ConfigError(f"data.kind={config.data.kind} has nothing to prepare; name a source, as data: stdlib does")
        content = {name: value for name, value in to_dict(config.data).items() if name not in ("path", "held_out")}
        source, tokenizer = open_source(config.data), given_tokenizer(config.data)
        if tokenizer is None:
            del content["tokenizer"]
        else:
            content["tokenizer"] = tokenizer_digest(tokenizer)
            del content["vocab"]
        content["files"], size = source.fingerprint(), source.total_bytes
        planned, seconds = super().plan(config, before), predicted.of_preparation(size)
        return dataclasses.replace(planned, content=content, settings={}, predicted_s=seconds, source_bytes=size)

    def placed(self, item: PlannedStage) -> Config:
        data = dataclasses.replace(item.config.data, path=str(item.artifact_folder))
        return dataclasses.replace(item.config, data=with_paths(data))


class FetchStage(Stage):
    """Data of tasks."""

    verb = "prepare"
    gives = ArtifactKind.TASKS
    own = PrepareSettings
    work = "trainer.stages.kinds:FetchWork"
