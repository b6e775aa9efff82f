"""``convert``: a checkpoint becomes a Hugging Face folder or a GGUF file, or one of these a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Optional

from launcher.config import Config
from launcher.stages import predicted
from launcher.stages.stage import PLACE, ArtifactKinds, KnownModel, PlannedStage, Stage, StagePlan
from trainer.shared.records.artifacts import ArtifactKind
from trainer.shared.records.model_files import to_import
from trainer.shared.run.errors import ConfigError, listed
from trainer.shared.run.keys import key
from trainer.shared.run.schema import ModelConfig
from trainer.shared.run.stages import FORMATS
from trainer.shared.run.tuning import MERGED

DTYPES = tuple(dict.fromkeys(dtype for allowed in FORMATS.values() for dtype in allowed))


@dataclass
class ConvertSettings:
    """A checkpoint to a Hugging Face folder or to one GGUF file, or one of these to a checkpoint."""

    format: str = key(ArtifactKind.HUGGINGFACE.value, "what it becomes", choices=tuple(FORMATS))
    dtype: Optional[str] = key(None, "type of the weights; null = float32, of a GGUF file float16", choices=DTYPES)


class ConvertStage(Stage):
    """A Hugging Face folder."""

    verb = "convert"
    takes: ClassVar[ArtifactKinds] = {"model": (ArtifactKind.CHECKPOINT,)}
    gives = ArtifactKind.HUGGINGFACE
    own = ConvertSettings
    run_keys = PLACE
    work = "trainer.stages.kinds:ConvertWork"

    @classmethod
    def variant(cls, settings: Mapping[str, Any]) -> type[Stage]:
        return next((kind for kind in (GgufStage, ImportStage) if settings.get("format") == kind.gives.value), cls)

    def plan(self, config: Config, before: Mapping[str, PlannedStage]) -> StagePlan:
        planned = super().plan(config, before)
        if planned.makes and planned.makes.tune.method not in (*MERGED, "full"):
            raise ConfigError(
                f"inputs.model={self.inputs['model']} gives {planned.makes.tune.method} weights, which cannot be merged into those of the "
                f"base; use a method that can: {listed(MERGED)}"
            )
        planned.settings["dtype"] = self._dtype(planned.settings)
        model = planned.config.model
        planned.makes, planned.predicted_s = KnownModel(model, planned.config.tune, model.seq), predicted.of_conversion(model)
        return planned

    def _dtype(self, settings: dict[str, Any]) -> str:
        """Returns the type of the weights. ``ConfigError`` if their form does not have it."""
        dtype, allowed = settings["dtype"], FORMATS[settings["format"]]
        if dtype not in (None, *allowed):
            raise ConfigError(f"stages.{self.name}.dtype={dtype} is not a type of format={settings['format']}; use {listed(allowed)}")
        return str(dtype or allowed[0])


class GgufStage(ConvertStage):
    """One GGUF file."""

    gives = ArtifactKind.GGUF


class ImportStage(ConvertStage):
    """A checkpoint of weights of others."""

    takes: ClassVar[ArtifactKinds] = {"model": (ArtifactKind.HUGGINGFACE, ArtifactKind.GGUF)}
    gives = ArtifactKind.CHECKPOINT

    @staticmethod
    def model_in(folder: Path) -> ModelConfig:
        return to_import(folder)[1]
