"""A pipeline file as a graph: its stages, checked for their words, and an order in which each comes after what it takes. Pure but for
reading."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

from launcher.config.folders import group_folders
from launcher.config.misread import refuse_misread_in
from launcher.config.text_keys import in_quotes, is_text
from launcher.config.yaml_text import read_config_yaml
from trainer.shared.records.artifacts import ArtifactKind
from trainer.shared.run.errors import ConfigError, listed, nearest
from trainer.shared.run.read import from_dict
from trainer.shared.run.stages import (
    TRAININGS,
    ChooseSettings,
    ConvertSettings,
    EvaluateSettings,
    GenerateSettings,
    PrepareSettings,
)

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")
_PLAIN, _NOT_TEXT = re.compile(r"[A-Za-z_/][A-Za-z0-9_./-]*"), ("null", "true", "false", "inf", "nan")
"""What Hydra reads back as the same text without quotes, but for these words."""


@dataclass(frozen=True)
class StageKind:
    """What a stage takes, by the name of the input, and what it gives. ``settings`` are keys of its own; of the keys of a run it has those
    that begin with one of ``run_keys``, or all."""

    takes: dict[str, tuple[ArtifactKind, ...]]
    gives: ArtifactKind
    settings: type | None = None
    run_keys: tuple[str, ...] | None = None

    def is_own(self, key: str) -> bool:
        """Whether a key of the file is one of ``settings``, rather than one of a run."""
        if self.settings is None or self.run_keys is None:
            return self.settings is not None and key in {f.name for f in dataclasses.fields(self.settings)}
        return not key.startswith(self.run_keys)


PLACE = ("cluster", "hardware")
"""Keys of where a stage runs."""
MODEL = (ArtifactKind.CHECKPOINT, ArtifactKind.HUGGINGFACE)
KINDS = {
    "prepare": StageKind({}, ArtifactKind.CORPUS, PrepareSettings),
    "train": StageKind({"data": (ArtifactKind.CORPUS,)}, ArtifactKind.CHECKPOINT),
    "tune": StageKind({"model": (ArtifactKind.CHECKPOINT,), "data": (ArtifactKind.CORPUS,)}, ArtifactKind.CHECKPOINT),
    "evaluate": StageKind({"model": (ArtifactKind.CHECKPOINT,), "data": (ArtifactKind.CORPUS,)}, ArtifactKind.METRICS, EvaluateSettings),
    "convert": StageKind({"model": (ArtifactKind.CHECKPOINT,)}, ArtifactKind.HUGGINGFACE, ConvertSettings, PLACE),
    "generate": StageKind(
        {"model": MODEL}, ArtifactKind.TEXT, GenerateSettings, (*PLACE, "layout.", "run.device", "run.precision", "run.threads")
    ),
}


CHOICE = StageKind({}, ArtifactKind.CHECKPOINT, ChooseSettings, PLACE)
"""The stage that a training with ``over`` becomes: it takes the trainings of all its values, and gives the best of them."""


@dataclass(frozen=True)
class Stage:
    """One stage as the file and the command line have it. ``inputs`` name other stages, or folders (with a ``/`` in them)."""

    name: str
    verb: str
    inputs: dict[str, str]
    settings: dict[str, Any]

    @property
    def kind(self) -> StageKind:
        return KINDS.get(self.verb, CHOICE)

    @property
    def takes(self) -> dict[str, tuple[ArtifactKind, ...]]:
        """The kinds that each input may be of."""
        if self.verb == "choose":
            return dict.fromkeys(self.inputs, (ArtifactKind.CHECKPOINT,))
        if self.imports:
            return {"model": (ArtifactKind.HUGGINGFACE, ArtifactKind.GGUF)}
        if self.reads_examples:
            return {"model": (ArtifactKind.CHECKPOINT,)}
        if not self.asks_tasks:
            return self.kind.takes
        takes: dict[str, tuple[ArtifactKind, ...]] = {"model": MODEL, "tasks": (ArtifactKind.TASKS,)}
        return {name: kinds for name, kinds in takes.items() if name == "model" or name in self.inputs}

    @property
    def gives(self) -> ArtifactKind:
        if self.verb == "prepare" and self.settings.get("tasks"):
            return ArtifactKind.TASKS
        return ArtifactKind(self.settings.get("format", self.kind.gives)) if self.verb == "convert" else self.kind.gives

    @property
    def imports(self) -> bool:
        """Whether it is a conversion of weights of others to a checkpoint."""
        return self.verb == "convert" and self.settings.get("format") == ArtifactKind.CHECKPOINT.value

    @property
    def runs(self) -> bool:
        """Whether it is a run on ranks with a configuration of its own, a training or the evaluation of one."""
        return self.verb in TRAININGS or (self.verb == "evaluate" and not self.asks_tasks)

    @property
    def reads_examples(self) -> bool:
        """Whether a model is tuned to examples, or asked them: its tokenizer is that of the model."""
        return self.verb in ("tune", "evaluate") and flat(self.settings).get("data.kind") == "instructions"

    @property
    def asks_tasks(self) -> bool:
        """Whether it is an evaluation by tasks, not on a corpus."""
        return self.verb == "evaluate" and bool(self.settings.get("tasks"))

    @property
    def needs(self) -> list[str]:
        """The stages that it takes something of."""
        return [source for source in self.inputs.values() if not is_folder(source)]

    @property
    def overrides(self) -> list[str]:
        """Those of its settings that are keys of a run, in Hydra's grammar."""
        return [f"{key}={_word(value)}" for key, value in flat(self.settings).items() if not self.kind.is_own(key)]

    def typed(self) -> Any:
        """Its own settings as the dataclass of its kind; ``ConfigError`` for unknown keys and wrong values."""
        assert self.kind.settings is not None
        own = {key: value for key, value in flat(self.settings).items() if self.kind.is_own(key)}
        return from_dict(self.kind.settings, own, f"stages.{self.name}.")


def stage_key(key: str) -> str:
    """The key of a run that ``stages.NAME.KEY`` sets, in one training or ``over`` several."""
    return key.split(".", 2)[-1].removeprefix("over.")


def is_folder(source: str) -> bool:
    return "/" in source


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
        refuse_misread_in(text, str(known[name]), lambda key: is_text(stage_key(key)))
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
        for stage in _spread(name, table):
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


def _stage(name: str, table: Mapping[str, Any]) -> Stage:
    verb = table.get("stage")
    if not isinstance(verb, str) or verb not in KINDS:
        raise ConfigError(f"stages.{name}.stage={verb} is not one of {listed(KINDS)}{nearest(str(verb), KINDS)}")
    inputs = table.get("inputs") or {}
    if not isinstance(inputs, dict) or not all(isinstance(source, str) for source in inputs.values()):
        raise ConfigError(f"stages.{name}.inputs={inputs!r} is not a mapping of an input to a stage or a folder")
    stage = Stage(name, verb, inputs, {key: value for key, value in table.items() if key not in ("stage", "inputs")})
    if stage.kind.settings is not None:
        stage.typed()
    if extra := [key for key in ("tasks_folder", "limit") if stage.verb == "evaluate" and not stage.asks_tasks and stage.settings.get(key)]:
        raise ConfigError(f"stages.{name}.{extra[0]}={stage.settings[extra[0]]} is for tasks; name some with tasks, or leave it out")
    return stage


def _spread(name: str, table: Mapping[str, Any]) -> list[Stage]:
    """A stage; of a training with ``over`` one for each combination of its values, and one that chooses among them."""
    more = {key.removeprefix("over."): value for key, value in table.items() if key.startswith("over.")}
    over = table.get("over", {}) | more if isinstance(table.get("over", {}), dict) else table["over"]
    if table.get("stage") != "train" or not (over or "over" in table or "best" in table):
        return [_stage(name, table)]
    stage = _stage(name, {key: value for key, value in table.items() if key.partition(".")[0] not in ("over", "best")})
    if not isinstance(over, dict) or not over or not all(isinstance(values, list) and len(values) > 1 for values in over.values()):
        raise ConfigError(
            f"stages.{name}.over={over!r} is not a mapping of keys to lists of two values or more, as {{layout.tensor: [1, 2]}}"
        )
    if wrong := [key for key in over if str(key).partition(".")[0] in ("model", "data")]:
        raise ConfigError(f"stages.{name}.over.{wrong[0]}: all must train the same model on the same text; make stages of their own")
    rows = [dict(zip(over, values)) for values in itertools.product(*over.values())]
    trained = [dataclasses.replace(stage, name=f"{name}-{n}", settings=stage.settings | row) for n, row in enumerate(rows, 1)]
    place = {key: value for key, value in stage.settings.items() if not CHOICE.is_own(key)}
    best = {"best": table["best"]} if "best" in table else {}
    choice = Stage(name, "choose", {each.name: each.name for each in trained}, place | best)
    choice.typed()
    return [*trained, choice]


def _check_known(stage: Stage, stages: Mapping[str, Stage]) -> None:
    for name, source in stage.inputs.items():
        if not is_folder(source) and source not in stages:
            raise ConfigError(
                f"stages.{stage.name}.inputs.{name}={source} is no stage{nearest(source, stages)}; a folder has a '/' in its name"
            )


def _check_inputs(stage: Stage, stages: Mapping[str, Stage]) -> None:
    """``ConfigError`` for inputs that are missing, too many, or of another kind."""
    takes = stage.takes
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


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested keys as dotted ones."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def _word(value: Any) -> str:
    """A value in Hydra's grammar."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return "[" + ",".join(map(_word, value)) + "]"
    if isinstance(value, (int, float)):
        return repr(value)
    text = str(value)
    plain = _PLAIN.fullmatch(text) and text.lower() not in _NOT_TEXT
    return text if plain else in_quotes(text)


def settings_of(typed: Any) -> dict[str, Any]:
    """A dataclass of settings as plain data."""
    return dataclasses.asdict(typed)
