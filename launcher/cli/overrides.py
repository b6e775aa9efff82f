"""Overrides on the command line of verbs that compose a configuration; those of layout keys may say which layouts are looked at."""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.shared.run.errors import ConfigError

if TYPE_CHECKING:
    from launcher.config import Config
    from launcher.goals.goal import Goal, Wanted


SET = "--set"


def add_overrides(parser: argparse.ArgumentParser, meaning: str = "what differs from conf/config.yaml, in Hydra's grammar") -> None:
    add_keys(parser, meaning)
    add_folder(parser)


def add_keys(parser: argparse.ArgumentParser, meaning: str = "what differs from conf/config.yaml, in Hydra's grammar") -> None:
    """Adds overrides to a parser, and where its help says which there are."""
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=meaning)
    add_set(parser)
    parser.epilog = "'trireme train --keys [WORD]' explains every KEY; 'trireme train --help' lists the groups."


def add_set(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(SET, nargs=2, metavar=("KEY", "TEXT"), help="KEY=TEXT, the text taken as it is")


def with_texts(words: Sequence[str]) -> list[str]:
    """Returns a command line with the overrides that every ``--set KEY TEXT`` stands for."""
    from launcher.config.text_keys import set_texts

    rest, pairs = list[str](), list[tuple[str, str]]()
    left = iter(words)
    for word in left:
        if word != SET:
            rest.append(word)
            continue
        pair = [*itertools.islice(left, 2)]
        if len(pair) < 2:
            raise ConfigError("--set takes a KEY and a TEXT, as in --set sweep.name 'a,b'")
        pairs.append((pair[0], pair[1]))
    of_stages = [f"{key}={json.dumps(text)}" for key, text in pairs if key.startswith("stages.")]  # which are read as YAML
    return [*rest, *of_stages, *set_texts([pair for pair in pairs if not pair[0].startswith("stages.")])]


def add_folder(
    parser: argparse.ArgumentParser, meaning: str = "folder of config groups of your own, such as DIR/trainer/NAME.yaml"
) -> None:
    parser.add_argument("--config-dir", action=PathOption, metavar="DIR", help=meaning)


class NamedOption(argparse.Action):
    """Refuses an empty value, as from a script's unset variable: ``search --replay "$TABLE"`` would start jobs."""

    convert: Callable[[str], Any] = str

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        if not values:
            raise ConfigError(f"{option}= is empty (unset shell variable?); give a value or drop it")
        setattr(namespace, self.dest, self.convert(values))


class PathOption(NamedOption):
    """Refuses an empty file or folder option."""

    convert = Path


def key_of(override: str) -> str:
    """The key or config group that an override is about."""
    return override.lstrip("+~").partition("=")[0].partition("@")[0]


def layouts_asked(overrides: Sequence[str]) -> tuple[dict[str, list[Any]], list[str]]:
    """Splits overrides into layout values, by column, and all others. Raises ``ConfigError`` for wrong ones."""
    from hydra.core.override_parser.types import ChoiceSweep, RangeSweep

    from launcher.config.compose import parse_override, plain_errors
    from launcher.planning.layout_filter import columns_wanted

    words = [word for word in overrides if word.lstrip("+").startswith("layout.")]
    if whole := [word for word in overrides if word.lstrip("+").startswith("layout=")]:
        raise ConfigError(
            f"{whole[0]} selects a single layout, but this command enumerates all; restrict it with individual keys, as in "
            f"layout.tensor=2,4"
        )
    with plain_errors():
        parsed = [parse_override(word) for word in words]
        if endless := [o for o in parsed if o.is_sweep_override() and not isinstance(o.value(), (ChoiceSweep, RangeSweep))]:
            raise ConfigError(f"{endless[0].input_line} does not list its values; write them out, as in {endless[0].key_or_group}=2,4")
        asked = {o.key_or_group: list(o.sweep_iterator()) if o.is_sweep_override() else [o.value()] for o in parsed}
        typed_values = {key: [typed(value) for value in values] for key, values in asked.items()}
    return columns_wanted(typed_values), [word for word in overrides if word not in words]


def typed(value: Any) -> Any:
    """A value as Python has it: a sweep's are words of Hydra's grammar."""
    import yaml

    return yaml.safe_load(value) if isinstance(value, str) else value


def goal_asked(overrides: Sequence[str], config_dir: Path | None) -> tuple[Goal, Config, Wanted]:
    """Returns goal, configuration and kept layout values. Raises ``ConfigError`` for a key without meaning for the goal."""
    from launcher.config import Config, compose
    from launcher.goals.goal import goal_of

    wanted, others = layouts_asked(overrides)
    config = compose(others, config_dir)
    goal = goal_of(config.task, config.goal)
    asked = f"task={config.task}" if config.goal == Config().goal else f"goal={config.goal}"
    for word in overrides:
        if remedy := next((r for name, r in goal.foreign.items() if key_of(word) == name or key_of(word).startswith(name + ".")), None):
            raise ConfigError(f"{word} has no meaning for {asked}; {remedy}")
    return goal, config, wanted
