"""``generate``: text after prompts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from launcher.config import Config, check_ours
from launcher.config.rules import generating
from launcher.stages import predicted
from launcher.stages.stage import MODEL, PLACE, ArtifactKinds, PlannedStage, Stage, StagePlan, check_tokenizer
from launcher.trials.identity import NEWER_THAN_STAGES, leave_out
from trainer.shared.records.artifacts import ArtifactKind
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.read import to_dict
from trainer.shared.run.stages import GenerateSettings
from trainer.shared.run.tuning import virtual_tokens


class GenerateStage(Stage):
    """Text."""

    verb = "generate"
    takes: ClassVar[ArtifactKinds] = {"model": MODEL}
    gives = ArtifactKind.TEXT
    own: ClassVar[type] = GenerateSettings
    run_keys: ClassVar[tuple[str, ...] | None] = (*PLACE, "layout.", "run.device", "run.precision", "run.threads")
    work = "trainer.stages.kinds:GenerateWork"

    def plan(self, config: Config, before: Mapping[str, PlannedStage]) -> StagePlan:
        planned = self.reading(config, before)
        prompts, tokens = planned.settings["prompts"], planned.settings["tokens"]
        if not prompts:
            raise ConfigError(f"stages.{self.name}.prompts=[] leaves nothing to continue; give at least one text")
        seq = planned.config.model.seq - virtual_tokens(self.taken(before).tune)
        if tokens >= seq:
            raise ConfigError(f"tokens={tokens} leave no room for a prompt in model.seq={seq}; ask for fewer")
        planned.predicted_s = predicted.fitting(planned.config, predicted.of_generation(planned.config, prompts, tokens))
        return planned

    def reading(self, config: Config, before: Mapping[str, PlannedStage]) -> StagePlan:
        """Plans a job that only reads a model's weights and tokenizer, on the ranks of a layout."""
        check_ours(config, self.verb)
        settings = to_dict(self.typed())
        config = generating(config, self.taken(before).model)
        check_tokenizer(self)
        content = settings | {"layout": to_dict(config.layout), "precision": config.run.precision}
        leave_out(content, [newer for newer in NEWER_THAN_STAGES if newer[0].startswith("layout")])
        return StagePlan(config=config, content=content, settings=settings)

    def told(self, item: PlannedStage) -> dict[str, Any]:
        return item.settings | {"model": str(item.sources["model"])}
