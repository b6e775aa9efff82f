"""What a pipeline would run: every stage resolved and checked before the first is started, with its identity and what it is predicted to
take.

A stage's id is a hash of its resolved configuration and of the identities of its inputs: the id of the stage that makes one, the digest
of a folder. So it is known before anything runs; what has that id and is whole is not made again. Where a stage runs (cluster, tracking)
is not part of it.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from launcher.config import Config, check_launchable, check_ours, compose, resolve
from launcher.config.rules import check_answers, generating, with_paths
from launcher.config.trainers import OWN as OWN_TRAINER
from launcher.config.trainers import profile
from launcher.stages import predicted
from launcher.stages.graph import Stage, is_folder, settings_of
from launcher.stages.tasks import check_tasks
from launcher.trials.identity import digest
from launcher.trials.store import Point
from trainer.shared.corpora.examples import check_examples
from trainer.shared.corpora.index import TOKENIZER, check_corpus
from trainer.shared.corpora.sources import open_source
from trainer.shared.records.artifacts import (
    CHECKPOINTS,
    GGUF_FILE,
    Artifact,
    ArtifactKind,
    checkpoint_facts,
    find_artifact,
    newest_checkpoint,
)
from trainer.shared.records.model_files import model_of, to_import
from trainer.shared.records.stage_run import StageRun
from trainer.shared.run.errors import ConfigError, listed
from trainer.shared.run.read import from_record, to_dict
from trainer.shared.run.rules import world_size_of
from trainer.shared.run.schema import DataConfig, LayoutConfig, ModelConfig, TuneConfig
from trainer.shared.run.stages import FORMATS, TRAININGS
from trainer.shared.run.tuning import MERGED, virtual_tokens

OWN = ("data.path", "tune.base", "run.task", "run.checkpoint.dir", "run.checkpoint.resume", "sweep.name", "dry_run")
"""Keys that the pipeline itself gives to a stage."""

BYTES_ONLY = 257
"""A vocabulary of up to so many tokens is that of the bytes and the end token, whatever the text."""


@dataclass
class PlannedStage:
    """A stage with everything that is known of it beforehand."""

    stage: Stage
    id: str
    folder: Path  # runs/stages/ID
    inputs: dict[str, str]  # identity of each
    sources: dict[str, Path]  # folder of each
    config: Config  # resolved, with the folders that it works in
    needs: tuple[str, ...] = ()  # ids of stages
    settings: dict[str, Any] = field(default_factory=dict)
    predicted_s: float | None = None
    source_bytes: int = 0  # of the text that it prepares

    @property
    def artifact_folder(self) -> Path:
        return self.folder / "artifact"

    @property
    def made(self) -> Artifact | None:
        """The artifact, if it is there and whole, and of this stage."""
        return self.run.made

    @property
    def ranks(self) -> int:
        return world_size_of(self.config.layout)

    @property
    def run(self) -> StageRun:
        """What its ranks are told."""
        sources = {name: str(path) for name, path in self.sources.items()}
        made_by = {name: source for name, source in self.stage.inputs.items() if not is_folder(source)}
        gives, command = self.stage.gives.value, _command(self)
        return StageRun(self.stage.name, self.stage.verb, self.id, str(self.artifact_folder), gives, self.inputs, sources, made_by, command)

    @property
    def point(self) -> Point:
        """The trial that makes it."""
        return Point(tuple(self.stage.overrides), self.config, stage=self.run, needs=self.needs, any_need=self.stage.verb == "choose")


def plan(stages: Sequence[Stage], overrides: Sequence[str], own: Path | None = None) -> list[PlannedStage]:
    """Every stage in order. ``overrides`` concern all stages. ``ConfigError`` with the stage's name for what is wrong."""
    planned: dict[str, PlannedStage] = {}
    composed = cache(lambda *words: compose(words, own))  # stages often say the same
    root = Path(os.path.abspath(composed(*overrides).sweep.dir)) / "stages"
    for stage in stages:
        try:
            planned[stage.name] = _plan(stage, planned, root, lambda stage: composed(*_words(stage), *overrides))
        except ConfigError as error:
            raise ConfigError(f"stage {stage.name}: {error}") from None
    _check_clashes(list(planned.values()))
    return list(planned.values())


@dataclass
class Work:
    """What a stage does, before it is known where: ``content`` decides its identity, ``settings`` are its own."""

    config: Config
    content: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    predicted_s: float | None = None
    source_bytes: int = 0


def _plan(stage: Stage, before: dict[str, PlannedStage], root: Path, composed: Callable[[Stage], Config]) -> PlannedStage:
    made = {name: before[source] for name, source in stage.inputs.items() if not is_folder(source)}
    inputs = {name: made[name].id if name in made else _folder_digest(stage, name, source) for name, source in stage.inputs.items()}
    work = _work(stage, composed(stage), before)
    sources = {name: made[name].artifact_folder if name in made else Path(os.path.abspath(source)) for name, source in stage.inputs.items()}
    identifier = digest({"stage": stage.verb, "content": work.content, "inputs": inputs})
    needs = tuple(dict.fromkeys(item.id for item in made.values()))
    told = (work.settings, work.predicted_s, work.source_bytes)
    item = PlannedStage(stage, identifier, root / identifier, inputs, sources, work.config, needs, *told)
    item.config = _placed(item)
    return item


def _work(stage: Stage, config: Config, before: dict[str, PlannedStage]) -> Work:
    if stage.gives is ArtifactKind.TASKS:
        settings = settings_of(stage.typed())
        return Work(_one_process(config, config.model), settings, settings)
    if stage.verb == "prepare":
        content, size = _prepare_content(config)
        return Work(_one_process(config, config.model), content, {}, predicted.of_preparation(size), size)
    if stage.verb in (*TRAININGS, "evaluate", "generate"):
        _check_trainer(stage, config)
    if stage.runs:
        config = _run_config(stage, config, before)
        known = _predicted(config) if stage.verb in TRAININGS else _fitting(config, predicted.of_evaluation(config))
        return Work(config, _run_content(config), {}, known)
    settings, model = settings_of(stage.typed()), _model_of(stage, before)
    if stage.verb in ("evaluate", "generate"):
        config = generating(config, model)
        known = _reading(stage, config, settings, before)
        own = {"layout": to_dict(config.layout), "precision": config.run.precision, **_fetched(settings)}
        return Work(config, settings | own, settings, known)
    if stage.verb == "convert":
        _check_merged(stage, before)
        settings |= {"dtype": _dtype(stage, settings)}
    known = predicted.of_conversion(model) if stage.verb == "convert" else 0.0
    return Work(_one_process(config, model), settings, settings, known)


def _words(stage: Stage) -> list[str]:
    """What its configuration is composed of."""
    given = [key for key in stage.overrides if key.partition("=")[0] in OWN]
    if given:
        raise ConfigError(f"{given[0]} is decided by the pipeline; leave it out")
    return stage.overrides


def _check_trainer(stage: Stage, config: Config) -> None:
    """``ConfigError`` for another trainer than ours: a stage ends with an artifact, and only ours knows how to take and to write one."""
    if not config.trainer.foreign:
        return
    name = config.trainer.name
    if stage.verb not in TRAININGS:
        check_ours(config, stage.verb)
    raise ConfigError(
        f"trainer={name} is not told what a stage takes ({', '.join(stage.takes)}), and makes no checkpoint that other stages could take; "
        f"use trainer={OWN_TRAINER}, or run it outside of pipelines: trireme train"
    )


def _one_process(config: Config, model: ModelConfig) -> Config:
    """Of a stage that is no run on ranks, only where it runs matters, and what it prepares or which model it carries; not the trainer."""
    run = dataclasses.replace(config.run, global_batch=1, checkpoint=dataclasses.replace(config.run.checkpoint, every=0, dir=None))
    cluster = config.cluster
    if cluster.runs_here:  # how much room this machine has is said by those that are runs on ranks
        cluster = dataclasses.replace(cluster, gpus_per_node=1)
    trainer = profile(OWN_TRAINER)
    return resolve(dataclasses.replace(config, model=model, layout=LayoutConfig(data=1), run=run, cluster=cluster, trainer=trainer))


def _placed(item: PlannedStage) -> Config:
    """The stage's configuration with the folders that it works in. ``ConfigError`` if the nodes could not have them."""
    config, verb = item.config, item.stage.verb
    run, data = config.run, config.data
    if item.stage.runs:
        folder = item.artifact_folder / CHECKPOINTS if verb in TRAININGS else item.sources["model"]
        run = dataclasses.replace(run, checkpoint=dataclasses.replace(run.checkpoint, dir=str(folder)))
        data = with_paths(dataclasses.replace(data, path=str(item.sources["model" if item.stage.reads_examples else "data"])))
        if item.stage.reads_examples and item.made is None and Path(data.path, TOKENIZER).is_file():  # else its stage will make it
            check_answers(dataclasses.replace(config, data=data))
        if verb == "tune":
            config = dataclasses.replace(config, tune=dataclasses.replace(config.tune, base=str(item.sources["model"])))
    elif item.stage.gives is ArtifactKind.CORPUS:
        data = with_paths(dataclasses.replace(data, path=str(item.artifact_folder)))
    else:
        data = DataConfig(kind="synthetic")
    config = dataclasses.replace(config, run=run, data=data)
    item.config = config
    return config.cluster.located(config, to_dict(item.run))


def _command(item: PlannedStage) -> list[str]:
    """The words that say what to do; of a conversion, which is no run on ranks, behind the module of the trainer."""
    settings, verb = item.settings, item.stage.verb
    if verb == "choose":
        return [settings["best"]]
    if item.stage.gives is ArtifactKind.TASKS:
        return ["trainer.generate.harness", ",".join(settings["tasks"]), str(item.artifact_folder)]
    if verb == "prepare" or item.stage.runs:
        return []
    model = str(item.sources["model"])
    if verb == "convert":
        if item.stage.imports:
            return ["trainer.convert.__main__", "import", model, str(item.artifact_folder)]
        target = item.artifact_folder / (GGUF_FILE if settings["format"] == "gguf" else "")
        return ["trainer.convert.__main__", "export", model, str(target), "--dtype", settings["dtype"]]
    if verb == "evaluate":
        folder = item.sources.get("tasks", settings["tasks_folder"])
        options = {"--tasks": ",".join(settings["tasks"]), "--tasks-folder": folder, "--limit": settings["limit"]}
        return [model, *(word for name, value in options.items() if value is not None for word in (name, str(value)))]
    words = [word for name, value in settings.items() if name != "prompts" for word in (f"--{name.replace('_', '-')}", json.dumps(value))]
    return [model, *(f"--prompt={text}" for text in settings["prompts"]), *words]


def _prepare_content(config: Config) -> tuple[dict[str, Any], int]:
    """The settings of a preparation and which files it would read in which state; how many bytes these have."""
    if config.data.kind != "corpus":
        raise ConfigError(f"data.kind={config.data.kind} has nothing to prepare; name a source, as data: stdlib does")
    content = {name: value for name, value in to_dict(config.data).items() if name not in ("path", "held_out")}
    source = open_source(config.data)
    return content | {"files": source.fingerprint()}, source.total_bytes


def _run_config(stage: Stage, config: Config, before: dict[str, PlannedStage]) -> Config:
    """The resolved run of a train, tune or evaluate stage; its folders are filled in when it starts."""
    check_launchable(config)
    if config.data.kind == "synthetic":
        raise ConfigError(f"data.kind={config.data.kind} takes no corpus; leave it out")
    run = dataclasses.replace(config.run, task="train")
    if stage.verb in ("evaluate", "tune"):
        config = _with_model(stage, config, before)
    if stage.verb == "evaluate":
        run = dataclasses.replace(run, task="evaluate", warmup_steps=0)
    elif not run.checkpoint.every:
        run = dataclasses.replace(run, checkpoint=dataclasses.replace(run.checkpoint, every=run.steps))
    config = resolve(dataclasses.replace(config, run=run))
    _check_corpus(stage, config, before)
    return config


def _with_model(stage: Stage, config: Config, before: dict[str, PlannedStage]) -> Config:
    """``config`` with the model of the checkpoint that the stage takes, whose words its text must have, and rows of the stage's length."""
    given = {key.partition("=")[0]: key for key in stage.overrides}
    if other := [given[name] for name in given if name.split(".")[0] == "model" and name != "model.seq"]:
        raise ConfigError(f"{other[0]}: the model is the checkpoint's; leave it out")
    source, tune = stage.inputs["model"], _tune_of(stage, before)
    if stage.reads_examples:
        _check_tokenizer(stage)
    elif stage.verb == "evaluate" and source not in before:
        raise ConfigError(f"inputs.model={source} is a folder; use 'trireme evaluate FOLDER', or name a train stage")
    if stage.verb == "tune" and tune.method != "full":
        raise ConfigError(f"inputs.model={source} gives {tune.method} weights alone, which are no base; tune what it was tuned from")
    if source in before and not stage.reads_examples:
        _check_spelling(stage, before[source], before)
    model = _model_of(stage, before)
    if "model.seq" in given:
        seq = config.model.seq
    else:  # as long as those that it was trained in
        seq = _maker(source, before).config.model.seq if source in before else model.seq
    if seq > model.seq:
        raise ConfigError(f"model.seq={seq} is longer than the {model.seq} positions that the model was made for; use {model.seq} or less")
    return dataclasses.replace(config, model=dataclasses.replace(model, seq=seq))


def _maker(source: str, before: dict[str, PlannedStage]) -> PlannedStage:
    """The stage that makes what ``source`` gives, where that may be a choice."""
    made = before[source]
    return before[made.stage.needs[0]] if made.stage.verb == "choose" else made


def _tune_of(stage: Stage, before: dict[str, PlannedStage]) -> TuneConfig:
    """How the model that a stage takes was tuned."""
    source = stage.inputs["model"]
    if source not in before:
        return from_record(TuneConfig, checkpoint_facts(Path(source))[1].get("tune") or {})
    return _maker(source, before).config.tune


def _check_merged(stage: Stage, before: dict[str, PlannedStage]) -> None:
    source = stage.inputs["model"]
    if source not in before and newest_checkpoint(Path(source)) is None:
        return  # a model of others
    if (tune := _tune_of(stage, before)).method not in (*MERGED, "full"):
        raise ConfigError(
            f"inputs.model={source} gives {tune.method} weights, which cannot be merged into those of the base; "
            f"use a method that can: {listed(MERGED)}"
        )


def _check_corpus(stage: Stage, config: Config, before: dict[str, PlannedStage]) -> None:
    """What is known of a corpus before it is made: its tokenizer, and at most a token for each byte and document of its source."""
    if stage.reads_examples:
        return
    made = before.get(stage.inputs["data"])
    if made is None:
        check_corpus(dataclasses.replace(config.data, path=stage.inputs["data"]), config.model)
        return
    data, model = made.config.data, config.model
    if data.vocab > model.vocab:
        raise ConfigError(
            f"model.vocab={model.vocab} is smaller than data.vocab={data.vocab} of stage {made.stage.name}; set one of them to the other"
        )
    if 2 * made.source_bytes < model.seq + 1:
        raise ConfigError(f"data.source={data.source} has {made.source_bytes} bytes, fewer than a sequence of model.seq={model.seq} needs")


def _check_spelling(stage: Stage, model: PlannedStage, before: dict[str, PlannedStage]) -> None:
    """``ConfigError`` if the corpus of an evaluation has another tokenizer than that of the training: its numbers would be other words."""
    trained = _trained_on(model.stage, before)
    if trained is None:
        raise ConfigError(f"inputs.model={model.stage.name} was trained on another text than this; evaluate it by tasks, as tasks: [prose]")
    names = (trained, stage.inputs["data"])
    made = [before.get(name) for name in names]
    files = [(Path(name) if item is None else item.artifact_folder) / TOKENIZER for name, item in zip(names, made)]
    known = [file.read_bytes() for file in files if file.is_file()]
    if names[0] == names[1] or (len(known) == 2 and known[0] == known[1]) or all(i and i.config.data.vocab <= BYTES_ONLY for i in made):
        return
    raise ConfigError(
        f"inputs.data={names[1]} has not the tokenizer of {trained}, with which {model.stage.name} is trained; evaluate on {trained}, "
        "with data.held_out, or prepare both texts together"
    )


def _trained_on(stage: Stage, before: dict[str, PlannedStage]) -> str | None:
    """The text that gave a model its words; None where it is not known here."""
    if "data" in stage.inputs:
        return stage.inputs["data"]
    source = stage.needs[0] if stage.verb == "choose" else stage.inputs["model"]
    return _trained_on(before[source].stage, before) if source in before and stage.verb != "convert" else None


def _run_content(config: Config) -> dict[str, Any]:
    """What decides the result of a run, without folders and without where and how it is watched."""
    content = to_dict(config.train_config())
    del content["tracking"], content["requests"]
    for name in ("path", "source", "pattern", "text_key", "vocab"):
        del content["data"][name]
    del content["run"]["checkpoint"]["dir"], content["tune"]["base"]
    if config.data.kind == "instructions":
        content["data"]["examples"] = check_examples(config.data, config.tune if config.run.task == "train" else None)
    return content


def _model_of(stage: Stage, before: dict[str, PlannedStage]) -> ModelConfig:
    """The model that a stage takes: that of the stage which makes it, or of a folder."""
    source = stage.needs[0] if stage.verb == "choose" else stage.inputs["model"]
    if source in before:
        made = before[source]
        return _model_of(made.stage, before) if made.stage.verb == "tune" else made.config.model
    return to_import(Path(source))[1] if stage.imports else model_of(Path(source))


def _reading(stage: Stage, config: Config, settings: dict[str, Any], before: dict[str, PlannedStage]) -> float | None:
    """Seconds of a stage that reads a model's weights and its tokenizer; tasks are not predicted. ``ConfigError`` for what cannot be."""
    _check_tokenizer(stage)
    if stage.verb == "evaluate":
        fetched = stage.inputs.get("tasks", "")
        check_tasks(settings["tasks"], fetched or settings["tasks_folder"], before[fetched].settings["tasks"] if fetched in before else ())
        _fitting(config, predicted.of_generation(config, [" " * config.model.seq], 1))
        return None
    if not settings["prompts"]:
        raise ConfigError(f"stages.{stage.name}.prompts=[] leaves nothing to continue; give at least one text")
    seq = config.model.seq - virtual_tokens(_tune_of(stage, before))
    if settings["tokens"] >= seq:
        raise ConfigError(f"tokens={settings['tokens']} leave no room for a prompt in model.seq={seq}; ask for fewer")
    return _fitting(config, predicted.of_generation(config, settings["prompts"], settings["tokens"]))


def _check_tokenizer(stage: Stage) -> None:
    source = Path(stage.inputs["model"])
    if is_folder(stage.inputs["model"]) and not any((place / TOKENIZER).is_file() for place in (source, source.parent)):
        raise ConfigError(f"inputs.model={source} has no {TOKENIZER} next to its weights; put the one it was trained with there")


def _dtype(stage: Stage, settings: dict[str, Any]) -> str:
    """The type of converted weights. ``ConfigError`` if their form does not have it."""
    dtype, allowed = settings["dtype"], FORMATS[settings["format"]]
    if dtype not in (None, *allowed):
        raise ConfigError(f"stages.{stage.name}.dtype={dtype} is no type of format={settings['format']}; use {listed(allowed)}")
    return str(dtype or allowed[0])


def _fetched(settings: dict[str, Any]) -> dict[str, Any]:
    """What tells apart two states of a folder of tasks."""
    if not settings.get("tasks_folder"):
        return {}
    settings["tasks_folder"] = os.path.abspath(settings["tasks_folder"])
    folder = Path(settings["tasks_folder"])
    return {"files": [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(folder.glob("*"))]}


def _predicted(config: Config) -> float | None:
    """Seconds of all steps of a training; None where the hardware is not known. ``ConfigError`` for what cannot fit into memory."""
    if not config.cluster.hardware.peak_tflops.get(config.run.precision) or config.cluster.network_unknown:
        return None
    from launcher.cost import predict  # numpy: only where something can be said

    found = predict(config.model, config.layout, config.run, config.cluster, config.trainer, config.tune)
    known = predicted.Expected(float(found.step_time_s) * config.run.steps, found.memory_bytes, found.capacity, found.fits)
    return _fitting(config, known, "layout.tensor, layout.pipeline or layout.sharding")


def _fitting(config: Config, known: predicted.Expected | None, raised: str = "layout.tensor or layout.pipeline") -> float | None:
    """Its seconds, where something is known. ``ConfigError`` for what cannot fit into memory."""
    if known is None:
        return None
    from launcher.cost.thresholds import CANNOT_FIT

    if known.fits < CANNOT_FIT and not config.sweep.ignore_memory:
        raise ConfigError(
            f"the layout needs about {known.memory_bytes / 1e9:.1f} GB on its fullest rank, and {config.cluster.hardware.name} has "
            f"{known.capacity / 1e9:.1f}; raise {raised}, or set sweep.ignore_memory=true"
        )
    return known.seconds


def _folder_digest(stage: Stage, name: str, source: str) -> str:
    found = find_artifact(Path(source))
    takes = stage.takes[name]
    if found is None or found.kind not in takes:
        holds = "holds nothing that is known" if found is None else f"is a {found.kind.value}"
        raise ConfigError(f"inputs.{name}={source} {holds}; {stage.verb} takes a {' or a '.join(kind.value for kind in takes)}")
    return found.digest


def _check_clashes(planned: Sequence[PlannedStage]) -> None:
    """Two stages that are the same would write the same folder."""
    seen: dict[str, str] = {}
    for item in planned:
        if item.id in seen:
            raise ConfigError(f"stages {seen[item.id]} and {item.stage.name} are the same and would write one folder; leave one out")
        seen[item.id] = item.stage.name
