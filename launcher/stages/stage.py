"""One stage of a pipeline before it runs. A kind of stage is a subclass (``launcher.stages.kinds``).

A stage's id is a hash of its resolved configuration and the identities of its inputs (the id of the stage that makes one, the digest of a
folder), so it is known before anything runs; a complete artifact of that id is reused. The place of execution (cluster, tracking) is
excluded.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from launcher.config import Config, resolve
from launcher.config.text_keys import in_quotes
from launcher.config.trainers import OWN as OWN_TRAINER
from launcher.config.trainers import profile
from launcher.trials.store import Point
from trainer.shared.corpora.index import TOKENIZER
from trainer.shared.records.artifacts import Artifact, ArtifactKind, checkpoint_facts, newest_checkpoint
from trainer.shared.records.model_files import model_of
from trainer.shared.records.stage_run import StageRun
from trainer.shared.run.derived import world_size_of
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.read import flatten, from_dict, from_record, to_dict
from trainer.shared.run.schema import DataConfig, LayoutConfig, ModelConfig, TuneConfig

PLACE = ("cluster", "hardware")
"""Keys of where a stage runs."""
ArtifactKinds = Mapping[str, tuple[ArtifactKind, ...]]
"""The kinds that each input may have."""
MODEL = (ArtifactKind.CHECKPOINT, ArtifactKind.HUGGINGFACE)
"""The kinds from which weights are read."""
_PLAIN, _NOT_TEXT = re.compile(r"[A-Za-z_/][A-Za-z0-9_./-]*"), ("null", "true", "false", "inf", "nan")
"""Text that Hydra reads back unchanged without quotes, except for these words."""


@dataclass
class NoSettings:
    """Own settings of a stage that has keys of a run alone."""


@dataclass(frozen=True)
class Stage:
    """One stage as the file and the command line have it. ``inputs`` name other stages, or folders (with a ``/`` in them).

    ``takes`` are the kinds that each input may be of. ``own`` are keys of its own; of the keys of a run it has those that begin with one of
    ``run_keys``, or all. ``work`` is the rank's half, as MODULE:CLASS. With ``any_input`` one of its inputs is enough.
    """

    name: str
    inputs: dict[str, str]
    settings: dict[str, Any]

    verb: ClassVar[str]
    takes: ClassVar[ArtifactKinds] = {}
    gives: ClassVar[ArtifactKind]
    own: ClassVar[type] = NoSettings
    run_keys: ClassVar[tuple[str, ...] | None] = None
    work: ClassVar[str]
    any_input: ClassVar[bool] = False

    @classmethod
    def read(cls, name: str, table: Mapping[str, Any]) -> list[Stage]:
        """Reads the stages that an entry of a pipeline file stands for, mostly one. ``ConfigError`` for wrong keys of their own."""
        inputs = table.get("inputs") or {}
        if not isinstance(inputs, dict) or not all(isinstance(source, str) for source in inputs.values()):
            raise ConfigError(f"stages.{name}.inputs={inputs!r} is not a mapping of an input to a stage or a folder")
        settings = {key: value for key, value in table.items() if key not in ("stage", "inputs")}
        stage = cls.variant(settings)(name, inputs, settings)
        stage.typed()
        return [stage]

    @classmethod
    def variant(cls, settings: Mapping[str, Any]) -> type[Stage]:
        """Returns the class of a stage with these settings: some kinds take or give something else then."""
        return cls

    @classmethod
    def is_own(cls, key: str) -> bool:
        """Tells whether a key of the file is one of ``own``, rather than one of a run."""
        return key in {f.name for f in dataclasses.fields(cls.own)} if cls.run_keys is None else not key.startswith(cls.run_keys)

    @property
    def needs(self) -> list[str]:
        """Returns the stages that it takes something of."""
        return [source for source in self.inputs.values() if not is_folder(source)]

    @property
    def overrides(self) -> list[str]:
        """Returns those of its settings that are keys of a run, in Hydra's grammar."""
        return [f"{key}={as_override(value)}" for key, value in flatten(self.settings).items() if not self.is_own(key)]

    def typed(self) -> Any:
        """Returns its own settings as ``own``; ``ConfigError`` for unknown keys and wrong values."""
        own = {key: value for key, value in flatten(self.settings).items() if self.is_own(key)}
        return from_dict(self.own, own, f"stages.{self.name}.")

    def inputs_taken(self) -> ArtifactKinds:
        """Returns ``takes``, of the inputs that this stage has to have."""
        return self.takes

    def plan(self, config: Config, before: Mapping[str, PlannedStage]) -> StagePlan:
        """Plans its job from the composed ``config``, after the stages ``before``; by default for one process. Raises ``ConfigError``."""
        settings, makes = to_dict(self.typed()), self.known(before)
        config = one_process(config, makes.model if makes else config.model)
        return StagePlan(config=config, content=settings, settings=settings, makes=makes)

    def known(self, before: Mapping[str, PlannedStage]) -> KnownModel | None:
        """Returns the model that it hands on: that which it takes, where it takes one."""
        return self.taken(before) if "model" in self.inputs else None

    def taken(self, before: Mapping[str, PlannedStage]) -> KnownModel:
        """Returns the model that it takes. ``ConfigError`` if a folder's cannot be read."""
        made, folder = before.get(self.inputs["model"]), Path(self.inputs["model"])
        if made is not None and made.makes is not None:
            return made.makes
        tune = {} if newest_checkpoint(folder) is None else checkpoint_facts(folder)[1].get("tune") or {}
        model = self.model_in(folder)
        return KnownModel(model, from_record(TuneConfig, tune), model.seq)

    @staticmethod
    def model_in(folder: Path) -> ModelConfig:
        """Reads the model of weights in a folder."""
        return model_of(folder)

    def placed(self, item: PlannedStage) -> Config:
        """Returns its configuration with the folders that it works in."""
        return dataclasses.replace(item.config, data=DataConfig(kind="synthetic"))

    def told(self, item: PlannedStage) -> dict[str, Any]:
        """Returns the settings that its ranks are told."""
        return item.settings


@dataclass(frozen=True)
class KnownModel:
    """A model before it is made: its tuning, row length, and the source of its tokenizer (None where unknown here)."""

    model: ModelConfig
    tune: TuneConfig
    rows: int
    text: str | None = None


@dataclass(kw_only=True)
class StagePlan:
    """The work of a stage before it is known where it runs: ``content`` decides its identity, ``settings`` are its own."""

    config: Config  # resolved
    content: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    predicted_s: float | None = None
    source_bytes: int = 0  # of the text that it prepares
    makes: KnownModel | None = None


@dataclass(kw_only=True)
class PlannedStage(StagePlan):
    """A stage with everything that is known of it beforehand; its ``config`` has the folders that it works in."""

    stage: Stage
    id: str
    folder: Path  # runs/stages/ID
    inputs: dict[str, str]  # identity of each
    sources: dict[str, Path]  # folder of each
    needs: tuple[str, ...] = ()  # ids of stages

    @property
    def artifact_folder(self) -> Path:
        return self.folder / "artifact"

    @property
    def made(self) -> Artifact | None:
        """Reads the artifact, if it is there and whole, and of this stage."""
        return self.run.made

    @property
    def ranks(self) -> int:
        return world_size_of(self.config.layout)

    @property
    def run(self) -> StageRun:
        """Returns the ranks' settings."""
        stage, folder = self.stage, str(self.artifact_folder)
        sources = {name: str(path) for name, path in self.sources.items()}
        made_by = {name: source for name, source in stage.inputs.items() if not is_folder(source)}
        content = (stage.work, stage.told(self))
        return StageRun(stage.name, stage.verb, self.id, folder, stage.gives.value, self.inputs, sources, made_by, *content)

    @property
    def point(self) -> Point:
        """Returns the trial that makes it."""
        return Point(tuple(self.stage.overrides), self.config, stage=self.run, needs=self.needs, any_need=self.stage.any_input)


def is_folder(source: str) -> bool:
    return "/" in source


def check_tokenizer(stage: Stage) -> None:
    """Raises ``ConfigError`` if a folder of weights that the stage takes has no words."""
    source = Path(stage.inputs["model"])
    if is_folder(stage.inputs["model"]) and not any((place / TOKENIZER).is_file() for place in (source, source.parent)):
        raise ConfigError(f"inputs.model={source} has no {TOKENIZER} next to its weights; put the one it was trained with there")


def one_process(config: Config, model: ModelConfig) -> Config:
    """Resolves the configuration of one process: its place, and the model or corpus; no trainer."""
    run = dataclasses.replace(config.run, global_batch=1, checkpoint=dataclasses.replace(config.run.checkpoint, every=0, dir=None))
    cluster = config.cluster
    if cluster.runs_here:  # how much room this machine has is said by those that are runs on ranks
        cluster = dataclasses.replace(cluster, gpus_per_node=1)
    trainer = profile(OWN_TRAINER)
    return resolve(dataclasses.replace(config, model=model, layout=LayoutConfig(data=1), run=run, cluster=cluster, trainer=trainer))


def as_override(value: Any) -> str:
    """Returns a value in Hydra's grammar."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return "[" + ",".join(map(as_override, value)) + "]"
    if isinstance(value, (int, float)):
        return repr(value)
    text = str(value)
    plain = _PLAIN.fullmatch(text) and text.lower() not in _NOT_TEXT
    return text if plain else in_quotes(text)
