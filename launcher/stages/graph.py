"""A pipeline file as a graph: its stages, checked for their words, and an order in which each comes after what it takes. Pure but for
reading."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

from launcher.config.folders import group_folders
from launcher.config.misread import refuse_misread_in
from launcher.config.text_keys import is_text
from launcher.config.yaml_text import read_config_yaml
from launcher.stages.kinds import KINDS
from launcher.stages.stage import Stage, is_folder
from trainer.shared.records.artifacts import ArtifactKind
from trainer.shared.run.errors import ConfigError, listed, nearest

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")


def is_text_key(key: str) -> bool:
    """Tells whether ``stages.NAME.KEY``, of one training or ``over`` several, is text."""
    return is_text(key.split(".", 2)[-1].removeprefix("over."), [kind.own for kind in KINDS.values()])


def read_pipeline(name: str, changes: Mapping[str, Any], own: Path | None = None) -> list[Stage]:
    """The stages of ``pipeline=NAME``, each after those that it needs. ``changes`` are values of ``stages.NAME.KEY`` in place of the
    file's."""
    import yaml

    known = {path.stem: path for root in group_folders(own) for path in sorted((root / "pipeline").glob("*.yaml"))}
    if name not in known:
        raise ConfigError(f"pipeline={name} does not exist{nearest(name, known)}; conf/pipeline/ has {listed(known)}")
    try:
        text = known[name].read_text(encoding="utf-8")
        data = read_config_yaml(text)
        refuse_misread_in(text, str(known[name]), is_text_key)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{known[name]} is not valid YAML: {str(error).splitlines()[0]}") from None
    return parse(data, changes)


def parse(data: Any, changes: Mapping[str, Any] | None = None) -> list[Stage]:
    """The stages in the content of a pipeline file, in order. ``ConfigError``, one line, for whatever is wrong with the graph."""
    if not isinstance(data, dict) or set(data) != {"stages"} or not isinstance(data["stages"], dict) or not data["stages"]:
        raise ConfigError("a pipeline file is one mapping, 'stages:', of a name to the keys of each stage")
    tables = {str(name): _table(name, keys) for name, keys in data["stages"].items()}
    for key, value in (changes or {}).items():
        name, _, rest = key.partition(".")
        if name not in tables:
            raise ConfigError(f"stages.{key}: there is no stage {name!r}{nearest(name, tables)}; the pipeline has {listed(tables)}")
        group, _, taken = rest.partition(".")
        if group == "inputs" and taken and isinstance(tables[name].get("inputs", {}), dict):
            rest, value = group, {**tables[name].get("inputs", {}), taken: value}
        tables[name][rest] = value
    stages: dict[str, Stage] = {}
    for name, table in tables.items():
        for stage in _kind(name, table).read(name, table):
            if stage.name in stages:
                raise ConfigError(f"stages.{stage.name}: there are two of that name, for stages.{name}.over makes one; call one otherwise")
            stages[stage.name] = stage
    for stage in stages.values():
        _check_known(stage, stages)
    order = _ordered(stages)
    for stage in order:
        _check_inputs(stage, stages)
    return order


def choose(stages: Sequence[Stage], until: str | None, start: str | None, only: str | None) -> list[Stage]:
    """Those to be run: all, those up to and with one, one and those behind it, or one alone."""
    names = [stage.name for stage in stages]
    for flag, word in (("--until", until), ("--from", start), ("--only", only)):
        if word is not None and word not in names:
            raise ConfigError(f"{flag} {word}: there is no such stage{nearest(word, names)}; the pipeline has {listed(names)}")
    if only is not None and (until or start):
        raise ConfigError("--only runs one stage alone; leave out --until and --from")
    chosen = set(names) if until is None else _with_all(stages, until, before=True)
    chosen &= set(names) if start is None else _with_all(stages, start, before=False)
    if not chosen:
        raise ConfigError(f"--from {start} and --until {until} have no stage in common; leave one of them out")
    return [stage for stage in stages if stage.name in (chosen if only is None else {only})]


def _with_all(stages: Sequence[Stage], name: str, before: bool) -> set[str]:
    """A stage and all that it needs, or all that need it, directly or not."""
    found = {name}
    for stage in reversed(stages) if before else stages:
        if before and stage.name in found:
            found |= set(stage.needs)
        elif not before and found & set(stage.needs):
            found.add(stage.name)
    return found


def _table(name: Any, keys: Any) -> dict[str, Any]:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"stages.{name}: a stage's name is up to 32 small letters, digits, '_' and '-'; give it such a name")
    if not isinstance(keys, dict):
        raise ConfigError(f"stages.{name}={keys!r} is not a mapping of keys to values; give at least 'stage: {next(iter(KINDS))}'")
    return {str(key): value for key, value in keys.items()}


def _kind(name: str, table: Mapping[str, Any]) -> type[Stage]:
    verb = table.get("stage")
    if not isinstance(verb, str) or verb not in KINDS:
        raise ConfigError(f"stages.{name}.stage={verb} is not one of {listed(KINDS)}{nearest(str(verb), KINDS)}")
    return KINDS[verb]


def _check_known(stage: Stage, stages: Mapping[str, Stage]) -> None:
    for name, source in stage.inputs.items():
        if not is_folder(source) and source not in stages:
            raise ConfigError(
                f"stages.{stage.name}.inputs.{name}={source} is no stage{nearest(source, stages)}; a folder has a '/' in its name"
            )


def _check_inputs(stage: Stage, stages: Mapping[str, Stage]) -> None:
    """``ConfigError`` for inputs that are missing, too many, or of another kind."""
    takes = stage.inputs_taken()
    for name in sorted(takes.keys() ^ stage.inputs.keys()):
        if name in takes:
            raise ConfigError(
                f"stages.{stage.name}.inputs.{name} is missing: {stage.verb} takes a {_words(takes[name])}; name a stage or a folder"
            )
        raise ConfigError(f"stages.{stage.name}.inputs.{name}: {stage.verb} takes {listed(takes) or 'no inputs'}; leave it out")
    for name, source in stage.inputs.items():
        if is_folder(source):
            continue
        gives = stages[source].gives
        if gives not in takes[name]:
            raise ConfigError(
                f"stages.{stage.name}.inputs.{name}={source} gives a {gives.value}; {stage.verb} takes a {_words(takes[name])}"
            )


def _ordered(stages: Mapping[str, Stage]) -> list[Stage]:
    """Each after those that it needs, otherwise as in the file."""
    try:
        TopologicalSorter({name: stage.needs for name, stage in stages.items()}).prepare()
    except CycleError as error:
        raise ConfigError(f"stages need each other in a circle: {' <- '.join(error.args[1])}; take one of these inputs away") from None
    order: dict[str, Stage] = {}

    def visit(stage: Stage) -> None:
        for name in stage.needs:
            visit(stages[name])
        order.setdefault(stage.name, stage)

    for stage in stages.values():
        visit(stage)
    return list(order.values())


def _words(kinds: Sequence[ArtifactKind]) -> str:
    return listed(kind.value for kind in kinds)
