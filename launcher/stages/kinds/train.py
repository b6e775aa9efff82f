"""``train`` and ``tune``: a model learns a text, or goes on learning another one or answers to examples. A training with ``over`` is one
stage for each combination of values, and one that chooses among them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from launcher.config import Config, check_launchable, resolve
from launcher.config.rules import check_answers, with_paths
from launcher.config.trainers import OWN
from launcher.stages import predicted
from launcher.stages.stage import (
    PLACE,
    ArtifactKinds,
    KnownModel,
    PlannedStage,
    Stage,
    StagePlan,
    check_tokenizer,
    known_model,
    one_process,
)
from trainer.shared.corpora.examples import check_examples
from trainer.shared.corpora.index import TOKENIZER, check_corpus
from trainer.shared.records.artifacts import CHECKPOINTS, ArtifactKind
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.read import flatten, to_dict
from trainer.shared.run.schema import RunConfig
from trainer.shared.run.stages import ChooseSettings

BYTES_ONLY = 257
"""A vocabulary of up to so many tokens is that of the bytes and the end token, whatever the text."""


class TrainStage(Stage):
    """A run on ranks with a configuration of its own. Its defaults are those of a training."""

    verb = "train"
    takes: ClassVar[ArtifactKinds] = {"data": (ArtifactKind.CORPUS,)}
    gives = ArtifactKind.CHECKPOINT
    work = "trainer.stages.kinds:TrainWork"

    @classmethod
    def read(cls, name: str, table: Mapping[str, Any]) -> list[Stage]:
        return _spread(name, table) if any(key.partition(".")[0] in ("over", "best") for key in table) else super().read(name, table)

    def plan(self, config: Config, before: Mapping[str, PlannedStage]) -> StagePlan:
        self.check_trainer(config)
        check_launchable(config)
        if config.data.kind == "synthetic":
            raise ConfigError(f"data.kind={config.data.kind} takes no corpus; leave it out")
        config = self.with_model(config, before)
        config = resolve(dataclasses.replace(config, run=self.run_config(config.run)))
        if "data" in self.inputs_taken():
            _check_corpus(self.inputs["data"], config, before)
        return StagePlan(config=config, content=_content(config), predicted_s=self.seconds(config), makes=self.makes(config, before))

    def check_trainer(self, config: Config) -> None:
        """``ConfigError`` for another trainer than ours: only that knows how to take and to write an artifact."""
        if config.trainer.foreign:
            raise ConfigError(
                f"trainer={config.trainer.name} is not told what a stage takes ({', '.join(self.inputs_taken())}), and makes no checkpoint "
                f"that other stages could take; use trainer={OWN}, or run it outside of pipelines: trireme train"
            )

    def with_model(self, config: Config, before: Mapping[str, PlannedStage]) -> Config:
        """``config`` with the model of the run."""
        return config

    def run_config(self, run: RunConfig) -> RunConfig:
        """Section ``run``; the folder of checkpoints is filled in when it starts."""
        every = run.checkpoint.every or run.steps
        return dataclasses.replace(run, task="train", checkpoint=dataclasses.replace(run.checkpoint, every=every))

    def seconds(self, config: Config) -> float | None:
        """What it is expected to take, where something is known. ``ConfigError`` for what cannot fit into memory."""
        return predicted.fitting(config, predicted.of_training(config), "layout.tensor, layout.pipeline or layout.sharding")

    def makes(self, config: Config, before: Mapping[str, PlannedStage]) -> KnownModel | None:
        """What is known of the model that it makes."""
        return KnownModel(config.model, config.tune, config.model.seq, self.inputs["data"])

    def checkpoints(self, item: PlannedStage) -> Path:
        """Its ``run.checkpoint.dir``."""
        return item.artifact_folder / CHECKPOINTS

    def placed(self, item: PlannedStage) -> Config:
        run, data = item.config.run, item.config.data
        run = dataclasses.replace(run, checkpoint=dataclasses.replace(run.checkpoint, dir=str(self.checkpoints(item))))
        data = with_paths(dataclasses.replace(data, path=str(item.sources.get("data") or item.sources["model"])))
        return dataclasses.replace(item.config, run=run, data=data)


class TuneStage(TrainStage):
    """A checkpoint, of all weights or of what was added to those of the base; or what else takes a model and a text, or examples in the
    words of the model."""

    verb = "tune"
    takes: ClassVar[ArtifactKinds] = {"model": (ArtifactKind.CHECKPOINT,), "data": (ArtifactKind.CORPUS,)}

    @classmethod
    def read(cls, name: str, table: Mapping[str, Any]) -> list[Stage]:
        return super(TrainStage, cls).read(name, table)  # ``over`` is of trainings alone

    @property
    def reads_examples(self) -> bool:
        """Whether a model is tuned to examples, or asked them: its tokenizer is that of the model."""
        return flatten(self.settings).get("data.kind") == "instructions"

    def inputs_taken(self) -> ArtifactKinds:
        return {name: kinds for name, kinds in self.takes.items() if name != "data" or not self.reads_examples}

    def with_model(self, config: Config, before: Mapping[str, PlannedStage]) -> Config:
        """The model is that of the checkpoint, whose words its text must have, and rows are of the stage's length."""
        given = {key.partition("=")[0]: key for key in self.overrides}
        if other := [given[name] for name in given if name.split(".")[0] == "model" and name != "model.seq"]:
            raise ConfigError(f"{other[0]}: the model is the checkpoint's; leave it out")
        known, is_made = known_model(self, before), self.inputs["model"] in before
        if self.reads_examples:
            check_tokenizer(self)
        self.check_model(known, is_made)
        if is_made and not self.reads_examples:
            _check_spelling(self.inputs["model"], self.inputs["data"], known.text, before)
        seq, longest = config.model.seq if "model.seq" in given else known.rows, known.model.seq
        if seq > longest:
            raise ConfigError(f"model.seq={seq} is longer than the {longest} positions that the model was made for; use {longest} or less")
        return dataclasses.replace(config, model=dataclasses.replace(known.model, seq=seq))

    def check_model(self, known: KnownModel, is_made: bool) -> None:
        """``ConfigError`` for a model that it cannot take; ``is_made`` by another stage."""
        if known.tune.method != "full":
            raise ConfigError(
                f"inputs.model={self.inputs['model']} gives {known.tune.method} weights alone, which are no base; "
                "tune what it was tuned from"
            )

    def makes(self, config: Config, before: Mapping[str, PlannedStage]) -> KnownModel | None:
        base = known_model(self, before)
        return KnownModel(base.model, config.tune, config.model.seq, self.inputs.get("data") or base.text)

    def placed(self, item: PlannedStage) -> Config:
        config = super().placed(item)
        if self.reads_examples and item.made is None and Path(config.data.path, TOKENIZER).is_file():  # else its stage will make it
            check_answers(config)
        return dataclasses.replace(config, tune=dataclasses.replace(config.tune, base=str(item.sources["model"])))


class ChooseStage(Stage):
    """What a training with ``over`` becomes: it takes the trainings of all its values, and gives the best of them."""

    verb = "choose"
    gives = ArtifactKind.CHECKPOINT
    own = ChooseSettings
    run_keys = PLACE
    work = "trainer.stages.kinds:ChooseWork"
    any_input = True

    def inputs_taken(self) -> ArtifactKinds:
        return dict.fromkeys(self.inputs, (ArtifactKind.CHECKPOINT,))

    def plan(self, config: Config, before: Mapping[str, PlannedStage]) -> StagePlan:
        settings, known = to_dict(self.typed()), before[self.needs[0]].makes
        assert known is not None
        return StagePlan(config=one_process(config, known.model), content=settings, settings=settings, predicted_s=0.0, makes=known)


def _spread(name: str, table: Mapping[str, Any]) -> list[Stage]:
    """A training for each combination of the values of ``over``, and the choice among them."""
    more = {key.removeprefix("over."): value for key, value in table.items() if key.startswith("over.")}
    over = table.get("over", {}) | more if isinstance(table.get("over", {}), dict) else table["over"]
    [stage] = TrainStage.read(name, {key: value for key, value in table.items() if key.partition(".")[0] not in ("over", "best")})
    if not isinstance(over, dict) or not over or not all(isinstance(values, list) and len(values) > 1 for values in over.values()):
        raise ConfigError(
            f"stages.{name}.over={over!r} is not a mapping of keys to lists of two values or more, as {{layout.tensor: [1, 2]}}"
        )
    if wrong := [key for key in over if str(key).partition(".")[0] in ("model", "data")]:
        raise ConfigError(f"stages.{name}.over.{wrong[0]}: all must train the same model on the same text; make stages of their own")
    rows = [dict(zip(over, values)) for values in itertools.product(*over.values())]
    trained = [dataclasses.replace(stage, name=f"{name}-{n}", settings=stage.settings | row) for n, row in enumerate(rows, 1)]
    place = {key: value for key, value in stage.settings.items() if not ChooseStage.is_own(key)}
    best = {"best": table["best"]} if "best" in table else {}
    return [*trained, *ChooseStage.read(name, place | best | {"inputs": {each.name: each.name for each in trained}})]


def _check_corpus(source: str, config: Config, before: Mapping[str, PlannedStage]) -> None:
    """What is known of a corpus before it is made: its tokenizer, and at most a token for each byte and document of its source."""
    made = before.get(source)
    if made is None:
        check_corpus(dataclasses.replace(config.data, path=source), config.model)
        return
    data, model = made.config.data, config.model
    if data.vocab > model.vocab:
        raise ConfigError(
            f"model.vocab={model.vocab} is smaller than data.vocab={data.vocab} of stage {made.stage.name}; set one of them to the other"
        )
    if 2 * made.source_bytes < model.seq + 1:
        raise ConfigError(f"data.source={data.source} has {made.source_bytes} bytes, fewer than a sequence of model.seq={model.seq} needs")


def _check_spelling(model: str, text: str, trained: str | None, before: Mapping[str, PlannedStage]) -> None:
    """``ConfigError`` if ``text`` has another tokenizer than that which ``model`` was trained on: its numbers would be other words."""
    if trained is None:
        raise ConfigError(f"inputs.model={model} was trained on another text than this; evaluate it by tasks, as tasks: [prose]")
    made = [before.get(name) for name in (trained, text)]
    files = [(Path(name) if item is None else item.artifact_folder) / TOKENIZER for name, item in zip((trained, text), made)]
    known = [file.read_bytes() for file in files if file.is_file()]
    if trained == text or (len(known) == 2 and known[0] == known[1]) or all(i and i.config.data.vocab <= BYTES_ONLY for i in made):
        return
    raise ConfigError(
        f"inputs.data={text} has not the tokenizer of {trained}, with which {model} is trained; evaluate on {trained}, "
        "with data.held_out, or prepare both texts together"
    )


def _content(config: Config) -> dict[str, Any]:
    """What decides the result of a run, without folders and without where and how it is watched."""
    content = to_dict(config.train_config())
    del content["tracking"], content["requests"]
    for name in ("path", "source", "pattern", "text_key", "vocab"):
        del content["data"][name]
    del content["run"]["checkpoint"]["dir"], content["tune"]["base"]
    if config.data.kind == "instructions":
        content["data"]["examples"] = check_examples(config.data, config.tune if config.run.task == "train" else None)
    return content
