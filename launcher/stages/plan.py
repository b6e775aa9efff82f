"""What a pipeline would run: every stage resolved and checked before the first is started, with its identity and what it is predicted to
take.

A stage's id is a hash of its resolved configuration and of the identities of its inputs: the id of the stage that makes one, the digest
of a folder. So it is known before anything runs; what has that id and is whole is not made again. Where a stage runs (cluster, tracking)
is not part of it.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.config import Config, check_launchable, compose, resolve
from launcher.cost import predict
from launcher.cost.thresholds import CANNOT_FIT
from launcher.stages.graph import Stage, is_folder, settings_of
from launcher.trials.identity import digest
from trainer.spec import ConfigError, to_dict, world_size_of
from trainer.spec.artifacts import Artifact, find_artifact, read_artifact
from trainer.spec.sources import open_source

OWN = ("data.path", "run.task", "run.checkpoint.dir", "run.checkpoint.resume", "sweep.name", "dry_run")
"""Keys that the pipeline itself gives to a stage."""


@dataclass
class PlannedStage:
    """A stage with everything that is known of it beforehand."""

    stage: Stage
    id: str
    folder: Path  # runs/stages/ID
    inputs: dict[str, str]  # identity of each
    sources: dict[str, Path]  # folder of each
    config: Config | None = None  # of stages that are composed; resolved where they run on ranks
    settings: dict[str, Any] = field(default_factory=dict)
    predicted_s: float | None = None

    @property
    def artifact_folder(self) -> Path:
        return self.folder / "artifact"

    @property
    def made(self) -> Artifact | None:
        """The artifact, if it is there and whole, and of this stage."""
        artifact = read_artifact(self.artifact_folder)
        return artifact if artifact is not None and artifact.made_by == self.id and artifact.kind is self.stage.kind.gives else None

    @property
    def ranks(self) -> int:
        return world_size_of(self.config.layout) if self.config is not None and self.stage.verb in ("train", "evaluate") else 1


def plan(stages: Sequence[Stage], overrides: Sequence[str], own: Path | None = None) -> list[PlannedStage]:
    """Every stage in order. ``overrides`` concern all stages that are composed. ``ConfigError`` with the stage's name for what is wrong."""
    planned: dict[str, PlannedStage] = {}
    root = Path(os.path.abspath(compose(overrides, own).sweep.dir)) / "stages"
    for stage in stages:
        try:
            planned[stage.name] = _plan(stage, planned, root, list(overrides), own)
        except ConfigError as error:
            raise ConfigError(f"stage {stage.name}: {error}") from None
    _check_clashes(list(planned.values()))
    return list(planned.values())


def _plan(stage: Stage, before: dict[str, PlannedStage], root: Path, overrides: list[str], own: Path | None) -> PlannedStage:
    identities, sources = {}, {}
    for name, source in stage.inputs.items():
        made = before[source] if not is_folder(source) else None
        identities[name] = made.id if made is not None else _folder_digest(stage, name, source)
        sources[name] = made.artifact_folder if made is not None else Path(os.path.abspath(source))
    if stage.kind.settings is not None:
        settings = settings_of(stage.typed())
        _check_prompts(stage, settings)
        return _identified(stage, root, identities, sources, None, settings)
    config = _composed(stage, overrides, own)
    if stage.verb == "prepare":
        return _identified(stage, root, identities, sources, config, _prepare_content(config))
    config = _run_config(stage, config, before)
    return _identified(stage, root, identities, sources, config, _run_content(config), _predicted(config))


def _identified(
    stage: Stage,
    root: Path,
    identities: dict[str, str],
    sources: dict[str, Path],
    config: Config | None,
    content: dict[str, Any],
    predicted_s: float | None = None,
) -> PlannedStage:
    identifier = digest({"stage": stage.verb, "content": content, "inputs": identities})
    return PlannedStage(stage, identifier, root / identifier, identities, sources, config, content, predicted_s)


def _composed(stage: Stage, overrides: list[str], own: Path | None) -> Config:
    given = [key for key in stage.overrides if key.partition("=")[0] in OWN]
    if given:
        raise ConfigError(f"{given[0]} is decided by the pipeline; leave it out")
    config = compose([*stage.overrides, *overrides], own)
    if config.cluster.backend != "local":
        raise ConfigError(f"cluster.backend={config.cluster.backend} runs single trials and sweeps; pipelines run with cluster=local")
    return config


def _prepare_content(config: Config) -> dict[str, Any]:
    """The settings of a preparation, and which files it would read in which state."""
    if config.data.kind != "corpus":
        raise ConfigError(f"data.kind={config.data.kind} has nothing to prepare; name a source, as data: stdlib does")
    content = {name: value for name, value in to_dict(config.data).items() if name not in ("path", "held_out")}
    return content | {"files": open_source(config.data).fingerprint()}


def _run_config(stage: Stage, config: Config, before: dict[str, PlannedStage]) -> Config:
    """The resolved run of a train or evaluate stage; its folders are filled in when it starts."""
    check_launchable(config)
    if config.data.kind != "corpus":
        raise ConfigError(f"data.kind={config.data.kind} takes no corpus; leave it out")
    run = dataclasses.replace(config.run, task="train")
    if stage.verb == "evaluate":
        if given := [key for key in stage.overrides if key.partition("=")[0].split(".")[0] == "model"]:
            raise ConfigError(f"{given[0]}: the model is the checkpoint's; leave it out")
        model = before.get(stage.inputs["model"])
        if model is None or model.config is None:
            raise ConfigError(f"inputs.model={stage.inputs['model']} is a folder; use 'trireme evaluate FOLDER', or name a train stage")
        config = dataclasses.replace(config, model=model.config.model)
        run = dataclasses.replace(run, task="evaluate", warmup_steps=0)
    elif not run.checkpoint.every:
        run = dataclasses.replace(run, checkpoint=dataclasses.replace(run.checkpoint, every=run.steps))
    config = resolve(dataclasses.replace(config, run=run))
    _check_corpus(stage, config, before)
    return config


def _check_corpus(stage: Stage, config: Config, before: dict[str, PlannedStage]) -> None:
    """What is known of a corpus before it is made: its tokenizer, and at most a token for each byte and document of its source."""
    made = before.get(stage.inputs["data"])
    if made is None or made.config is None:
        return
    data, model = made.config.data, config.model
    if data.vocab > model.vocab:
        raise ConfigError(
            f"model.vocab={model.vocab} is smaller than data.vocab={data.vocab} of stage {made.stage.name}; set one of them to the other"
        )
    source = open_source(data)
    if 2 * source.total_bytes < model.seq + 1:
        raise ConfigError(f"data.source={data.source} has {source.total_bytes} bytes, fewer than a sequence of model.seq={model.seq} needs")


def _run_content(config: Config) -> dict[str, Any]:
    """What decides the result of a run, without folders and without where and how it is watched."""
    content = to_dict(config.train_config())
    del content["tracking"]
    for name in ("path", "source", "pattern", "text_key", "vocab"):
        del content["data"][name]
    del content["run"]["checkpoint"]["dir"]
    return content


def _predicted(config: Config) -> float | None:
    """Seconds of all steps of a training; None where the hardware is not known. ``ConfigError`` for what cannot fit into memory."""
    if config.run.task != "train" or not config.cluster.hardware.peak_tflops.get(config.run.precision):
        return None
    prediction = predict(config.model, config.layout, config.run, config.cluster, config.trainer)
    if prediction.fits < CANNOT_FIT and not config.sweep.ignore_memory:
        raise ConfigError(
            f"the layout needs about {prediction.memory_bytes / 1e9:.1f} GB on its fullest rank, and {config.cluster.hardware.name} has "
            f"{prediction.capacity / 1e9:.1f}; raise layout.tensor, layout.pipeline or layout.sharding, or set sweep.ignore_memory=true"
        )
    return float(prediction.step_time_s) * config.run.steps


def _folder_digest(stage: Stage, name: str, source: str) -> str:
    found = find_artifact(Path(source))
    takes = stage.kind.takes[name]
    if found is None or found.kind not in takes:
        holds = "holds nothing that is known" if found is None else f"is a {found.kind.value}"
        raise ConfigError(f"inputs.{name}={source} {holds}; {stage.verb} takes a {' or a '.join(kind.value for kind in takes)}")
    return found.digest


def _check_prompts(stage: Stage, settings: dict[str, Any]) -> None:
    if stage.verb == "generate" and not settings["prompts"]:
        raise ConfigError(f"stages.{stage.name}.prompts=[] leaves nothing to continue; give at least one text")


def _check_clashes(planned: Sequence[PlannedStage]) -> None:
    """Two stages that are the same would write the same folder."""
    seen: dict[str, str] = {}
    for item in planned:
        if item.id in seen:
            raise ConfigError(f"stages {seen[item.id]} and {item.stage.name} are the same and would write one folder; leave one out")
        seen[item.id] = item.stage.name
