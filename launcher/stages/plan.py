"""Plans a pipeline: every stage resolved and checked before the first is started."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from launcher.config import Config, compose
from launcher.stages.stage import PlannedStage, Stage, is_folder
from launcher.trials.identity import digest
from trainer.shared.records.artifacts import find_artifact
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.read import to_dict

OWN = ("data.path", "tune.base", "run.task", "run.checkpoint.dir", "run.checkpoint.resume", "sweep.name", "dry_run")
"""Keys that the pipeline itself gives to a stage."""


def plan(stages: Sequence[Stage], overrides: Sequence[str], own: Path | None = None) -> list[PlannedStage]:
    """Plans every stage in order. ``overrides`` apply to all stages. Raises ``ConfigError`` with the stage's name."""
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


def _plan(stage: Stage, before: dict[str, PlannedStage], root: Path, composed: Callable[[Stage], Config]) -> PlannedStage:
    made = {name: before[source] for name, source in stage.inputs.items() if not is_folder(source)}
    inputs = {name: made[name].id if name in made else _folder_digest(stage, name, source) for name, source in stage.inputs.items()}
    work = stage.plan(composed(stage), before)
    sources = {name: made[name].artifact_folder if name in made else Path(os.path.abspath(source)) for name, source in stage.inputs.items()}
    identifier = digest({"stage": stage.verb, "content": work.content, "inputs": inputs})
    needs = tuple(dict.fromkeys(item.id for item in made.values()))
    folder = root / identifier
    item = PlannedStage(**vars(work), stage=stage, id=identifier, folder=folder, inputs=inputs, sources=sources, needs=needs)
    placed = stage.placed(item)
    item.config = placed.cluster.located(placed, to_dict(item.run))
    return item


def _words(stage: Stage) -> list[str]:
    """Returns the words that its configuration is composed of."""
    given = [key for key in stage.overrides if key.partition("=")[0] in OWN]
    if given:
        raise ConfigError(f"{given[0]} is decided by the pipeline; leave it out")
    return stage.overrides


def _folder_digest(stage: Stage, name: str, source: str) -> str:
    found = find_artifact(Path(source))
    takes = stage.inputs_taken()[name]
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
