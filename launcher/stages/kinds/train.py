"""``train`` and ``tune``: a model learns a text, or goes on learning another one or answers to examples. A training with ``over`` is one
stage for each combination of values, and one that chooses among them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from launcher.config import Config, check_launchable, resolve
from launcher.config.rules import check_answers, with_paths
from launcher.config.trainers import OWN
from launcher.stages import predicted
from launcher.stages.stage import PLACE, ArtifactKinds, KnownModel, PlannedStage, Stage, StagePlan, check_tokenizer
from launcher.trials.identity import NEWER_THAN_STAGES, leave_out, model_content
from trainer.shared.corpora.examples import check_examples
from trainer.shared.corpora.index import TOKENIZER, check_corpus, check_sentinels, given_tokenizer, size_of, words_of
from trainer.shared.records.artifacts import CHECKPOINTS, ArtifactKind
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.keys import key
from trainer.shared.run.read import flatten, to_dict

BYTES_ONLY = 257
"""A vocabulary of up to so many tokens is that of the bytes and the end token, whatever the text."""


class RunStage(Stage):
    """A run on ranks with a configuration of its own, on a text or, of a model that it takes, on examples in the words of that model."""

    @property
    def reads_examples(self) -> bool:
        return "model" in self.takes and flatten(self.settings).get("data.kind") == "instructions"

    def inputs_taken(self) -> ArtifactKinds:
        return {name: kinds for name, kinds in self.takes.items() if name != "data" or not self.reads_examples}

    def resolved(self, config: Config, before: Mapping[str, PlannedStage], **run: Any) -> Config:
        """Resolves the run with these keys of section ``run``; its folders are filled in when it starts."""
        check_launchable(config)
        if config.data.kind == "synthetic":
            raise ConfigError(f"data.kind={config.data.kind} takes no corpus; leave it out")
        if "model" in self.takes:
            config = self._with_model(config, before)
        config = resolve(dataclasses.replace(config, run=dataclasses.replace(config.run, **run)))
        if not self.reads_examples:
            _check_corpus(self.inputs["data"], config, before)
        return config

    def trained(self, config: Config, before: Mapping[str, PlannedStage]) -> StagePlan:
        """Plans a training. It ends with an artifact, and only our trainer knows how to take and to write one."""
        if config.trainer.foreign:
            raise ConfigError(
                f"trainer={config.trainer.name} is not told what a stage takes ({', '.join(self.inputs_taken())}), and makes no checkpoint "
                f"that other stages could take; use trainer={OWN}, or run it outside of pipelines: trireme train"
            )
        checkpoint = dataclasses.replace(config.run.checkpoint, every=config.run.checkpoint.every or config.run.steps)
        config = self.resolved(config, before, task="train", checkpoint=checkpoint)
        seconds = predicted.fitting(config, predicted.of_training(config), "layout.tensor, layout.pipeline or layout.sharding")
        return StagePlan(config=config, content=self.content(config), predicted_s=seconds)

    def content(self, config: Config) -> dict[str, Any]:
        """Returns the settings that decide a run's result, without folders and without where and how it is watched."""
        content = to_dict(config.train_config())
        content["model"] = model_content(content["model"])
        leave_out(content, NEWER_THAN_STAGES)
        del content["tracking"], content["requests"]
        for name in ("path", "source", "pattern", "text_key", "vocab", "tokenizer"):
            del content["data"][name]
        del content["run"]["checkpoint"]["dir"], content["tune"]["base"]
        if config.data.kind == "instructions":
            content["data"]["examples"] = check_examples(config.data, config.tune if config.run.task == "train" else None)
        return content

    def in_folders(self, item: PlannedStage, checkpoints: Path) -> Config:
        """Returns its configuration with the folder of its checkpoints, and with those that it takes."""
        run, data = item.config.run, item.config.data
        run = dataclasses.replace(run, checkpoint=dataclasses.replace(run.checkpoint, dir=str(checkpoints)))
        data = with_paths(dataclasses.replace(data, path=str(item.sources["model" if self.reads_examples else "data"])))
        config = dataclasses.replace(item.config, run=run, data=data)
        if self.reads_examples and item.made is None and Path(data.path, TOKENIZER).is_file():  # else its stage will make it
            check_answers(config)
        return config

    def _with_model(self, config: Config, before: Mapping[str, PlannedStage]) -> Config:
        """Returns ``config`` with the model that the stage takes, whose words its text must have, and rows of the stage's length."""
        given = {key.partition("=")[0]: key for key in self.overrides}
        if other := [given[name] for name in given if name.split(".")[0] == "model" and name != "model.seq"]:
            raise ConfigError(f"{other[0]}: the model is the checkpoint's; leave it out")
        known = self.taken(before)
        if self.reads_examples:
            check_tokenizer(self)
        elif self.inputs["model"] in before:
            _check_spelling(self.inputs["model"], self.inputs["data"], known.text, before)
        seq, longest = config.model.seq if "model.seq" in given else known.rows, known.model.seq
        if seq > longest:
            raise ConfigError(f"model.seq={seq} is longer than the {longest} positions that the model was made for; use {longest} or less")
        return dataclasses.replace(config, model=dataclasses.replace(known.model, seq=seq))


class TrainStage(RunStage):
    """A checkpoint."""

    verb = "train"
    takes: ClassVar[ArtifactKinds] = {"data": (ArtifactKind.CORPUS,)}
    gives = ArtifactKind.CHECKPOINT
    work = "trainer.stages.kinds:TrainWork"

    @classmethod
    def read(cls, name: str, table: Mapping[str, Any]) -> list[Stage]:
        return _spread(name, table) if any(key.partition(".")[0] in ("over", "best") for key in table) else super().read(name, table)

    def plan(self, config: Config, before: Mapping[str, PlannedStage]) -> StagePlan:
        planned = self.trained(config, before)
        planned.makes = KnownModel(planned.config.model, planned.config.tune, planned.config.model.seq, self.inputs["data"])
        return planned

    def placed(self, item: PlannedStage) -> Config:
        return self.in_folders(item, item.artifact_folder / CHECKPOINTS)


class TuneStage(RunStage):
    """A checkpoint, of all weights or of tuned parts alone."""

    verb = "tune"
    takes: ClassVar[ArtifactKinds] = {"model": (ArtifactKind.CHECKPOINT,), "data": (ArtifactKind.CORPUS,)}
    gives = ArtifactKind.CHECKPOINT
    work = "trainer.stages.kinds:TrainWork"

    def plan(self, config: Config, before: Mapping[str, PlannedStage]) -> StagePlan:
        source, base = self.inputs["model"], self.taken(before)
        if base.tune.method != "full":
            raise ConfigError(
                f"inputs.model={source} gives {base.tune.method} weights alone, which cannot be tuned; use the base, or merge first"
            )
        planned = self.trained(config, before)
        planned.makes = KnownModel(base.model, planned.config.tune, planned.config.model.seq, self.inputs.get("data") or base.text)
        return planned

    def placed(self, item: PlannedStage) -> Config:
        config = self.in_folders(item, item.artifact_folder / CHECKPOINTS)
        return dataclasses.replace(config, tune=dataclasses.replace(config.tune, base=str(item.sources["model"])))


@dataclass
class ChooseSettings:
    """One of several trainings."""

    best: str = key(
        "step_time_s", "which one is kept: that of the shortest median step, or of the lowest last loss", choices=("step_time_s", "loss")
    )


class ChooseStage(Stage):
    """The choice of a training with ``over``: it takes the trainings of all its values, and gives the best of them."""

    verb = "choose"
    gives = ArtifactKind.CHECKPOINT
    own = ChooseSettings
    run_keys = PLACE
    work = "trainer.stages.kinds:ChooseWork"
    any_input = True

    def inputs_taken(self) -> ArtifactKinds:
        return dict.fromkeys(self.inputs, (ArtifactKind.CHECKPOINT,))

    def plan(self, config: Config, before: Mapping[str, PlannedStage]) -> StagePlan:
        return dataclasses.replace(super().plan(config, before), predicted_s=0.0)

    def known(self, before: Mapping[str, PlannedStage]) -> KnownModel | None:
        return before[self.needs[0]].makes


def _spread(name: str, table: Mapping[str, Any]) -> list[Stage]:
    """Returns a training for each combination of the values of ``over``, and the choice among them."""
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
    """Checks a corpus before it is made: its tokenizer, and at most a token for each byte and document of its source."""
    made = before.get(source)
    if made is None:
        check_corpus(dataclasses.replace(config.data, path=source), config.model)
        return
    data, model = made.config.data, config.model
    if (tokenizer := given_tokenizer(data)) is not None:
        words = size_of(words_of(tokenizer) or {})
        if words > model.vocab:
            raise ConfigError(
                f"model.vocab={model.vocab} is smaller than the {words} tokens of data.tokenizer={data.tokenizer} of stage "
                f"{made.stage.name}; set model.vocab={words} or more"
            )
        check_sentinels(tokenizer, words, model)
    elif data.vocab > model.vocab:
        raise ConfigError(
            f"model.vocab={model.vocab} is smaller than data.vocab={data.vocab} of stage {made.stage.name}; set one of them to the other"
        )
    if 2 * made.source_bytes < model.seq + 1:
        raise ConfigError(f"data.source={data.source} has {made.source_bytes} bytes, fewer than a sequence of model.seq={model.seq} needs")


def _check_spelling(model: str, text: str, trained: str | None, before: Mapping[str, PlannedStage]) -> None:
    """Raises ``ConfigError`` if ``text`` has another tokenizer than ``model`` was trained with: its numbers would be other words."""
    if trained is None:
        raise ConfigError(f"inputs.model={model} was trained on another text than this; evaluate it by tasks, as tasks: [prose]")
    made = [before.get(name) for name in (trained, text)]
    files = [_tokenizer(name, item) for name, item in zip((trained, text), made)]
    known = [file.read_bytes() for file in files if file.is_file()]
    if trained == text or (len(known) == 2 and known[0] == known[1]) or all(map(_spells_bytes, made)):
        return
    raise ConfigError(
        f"inputs.data={text} has not the tokenizer of {trained}, with which {model} is trained; evaluate on {trained}, "
        "with data.held_out, or prepare both texts together"
    )


def _tokenizer(name: str, item: PlannedStage | None) -> Path:
    """Returns the tokenizer of a corpus: where it will be made, or the one that it is given."""
    if item is None:
        return Path(name, TOKENIZER)
    return given_tokenizer(item.config.data) or item.artifact_folder / TOKENIZER


def _spells_bytes(item: PlannedStage | None) -> bool:
    return item is not None and item.config.data.tokenizer is None and item.config.data.vocab <= BYTES_ONLY
