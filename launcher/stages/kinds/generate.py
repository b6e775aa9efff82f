"""``generate``: text after prompts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from launcher.config import Config, check_ours
from launcher.config.rules import generating
from launcher.stages import predicted
from launcher.stages.stage import MODEL, PLACE, ArtifactKinds, KnownModel, PlannedStage, Stage, StagePlan, check_tokenizer, known_model
from trainer.shared.records.artifacts import ArtifactKind
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.read import to_dict
from trainer.shared.run.stages import GenerateSettings
from trainer.shared.run.tuning import virtual_tokens


class GenerateStage(Stage):
    """Text, or what else is made by reading a model's weights and its tokenizer on the ranks of a layout."""

    verb = "generate"
    takes: ClassVar[ArtifactKinds] = {"model": MODEL}
    gives = ArtifactKind.TEXT
    own: ClassVar[type | None] = GenerateSettings
    run_keys: ClassVar[tuple[str, ...] | None] = (*PLACE, "layout.", "run.device", "run.precision", "run.threads")
    work = "trainer.stages.kinds:GenerateWork"

    def plan(self, config: Config, before: Mapping[str, PlannedStage]) -> StagePlan:
        check_ours(config, self.verb)
        settings, known = to_dict(self.typed()), known_model(self, before)
        config = generating(config, known.model)
        check_tokenizer(self)
        seconds = self.seconds(config, settings, known, before)
        place = {"layout": to_dict(config.layout), "precision": config.run.precision} | self.files(settings)
        return StagePlan(config=config, content=settings | place, settings=settings, predicted_s=seconds)

    def seconds(self, config: Config, settings: dict[str, Any], known: KnownModel, before: Mapping[str, PlannedStage]) -> float | None:
        """What it is expected to take, where that is known. ``ConfigError`` for wrong settings, and for what cannot fit into memory."""
        if not settings["prompts"]:
            raise ConfigError(f"stages.{self.name}.prompts=[] leaves nothing to continue; give at least one text")
        seq = config.model.seq - virtual_tokens(known.tune)
        if settings["tokens"] >= seq:
            raise ConfigError(f"tokens={settings['tokens']} leave no room for a prompt in model.seq={seq}; ask for fewer")
        return predicted.fitting(config, predicted.of_generation(config, settings["prompts"], settings["tokens"]))

    def files(self, settings: dict[str, Any]) -> dict[str, Any]:
        """What tells apart two states of the files that its settings name."""
        return {}

    def told(self, item: PlannedStage) -> dict[str, Any]:
        return item.settings | {"model": str(item.sources["model"])}
