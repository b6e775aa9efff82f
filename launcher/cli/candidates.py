"""Candidates for the end of a command line that is being typed: verbs, options, keys, groups, values, and names of sweeps and trials.

Imports neither Hydra nor torch, since a person waits for it at every Tab.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path

from launcher.cli.main import VERBS

_WORD = re.compile(r"(?:'[^']*'?|\"(?:\\.|[^\"])*\"?|\\.|[^\s'\"\\])+")
_OVERRIDES = "KEY=VALUE"


def candidates(line: str) -> list[str]:
    """Returns what the last word of ``line`` can become, in order: whole words, or beginnings that end in ``.`` or ``=``. Empty where files
    are meant. Raises whatever reading the files that the line names raises."""
    words = [re.sub(r"['\"\\]", "", word) for word in _WORD.findall(line)]
    if not words or line[-1].isspace():
        words.append("")
    *before, last = words[1:] or [""]
    found = [*VERBS, "--help", "--version"] if not before else _of_verb(before[0], before[1:], last) if before[0] in VERBS else []
    return list(dict.fromkeys(word for word in found if word.startswith(last) and (last or not word.startswith("-"))))


def _of_verb(verb: str, before: Sequence[str], last: str) -> list[str]:
    """Returns candidates for ``last`` by the verb's own parser."""
    parser: argparse.ArgumentParser = import_module(f"launcher.cli.{verb}").parser()
    options = {option: action for action in parser._actions for option in action.option_strings}
    positional = [action for action in parser._actions if not action.option_strings]
    own, dir_ = _value_of("--config-dir", before) or _value_of("-cd", before), _value_of("--dir", before) or _sweep_dir(before)
    previous = before[-1] if before else ""
    if previous == "--set":
        return [word.removesuffix("=") for word in _keys(last, before, own) if "/" not in word]
    if (asked := options.get(previous)) is not None and asked.nargs != 0 and not last.startswith("-"):
        return _values(asked, dir_)
    if last.startswith("-"):
        name, equals, _ = last.partition("=")
        if equals and name in options:
            return [f"{name}={value}" for value in _values(options[name], dir_)]
        return [option for option in options if option.startswith("--")] + [o for o in options if not o.startswith("--")]
    given, skip = 0, False
    for word in before:
        action = options.get(word)
        given += not skip and action is None and not word.startswith("-")
        skip = action is not None and action.nargs is None
    at = positional[min(given, len(positional) - 1)] if positional else None
    if at is None or (given >= len(positional) and at.nargs not in ("*", "+")):
        return []
    found = _values(at, dir_)
    return [*found, *_overrides(verb, last, before, own)] if at.metavar == _OVERRIDES else found


def _values(action: argparse.Action, folder: str) -> list[str]:
    """Returns the values of an option or a positional argument: its choices, or the names that its metavar stands for."""
    if action.choices is not None:
        return [str(choice) for choice in action.choices]
    parts = action.metavar.split("|") if isinstance(action.metavar, str) else []
    return [word for part in parts for word in ([part] if part.islower() else _names(part, folder, bool(action.option_strings)))]


def _names(part: str, folder: str, option: bool) -> Iterable[str]:
    from launcher.config.folders import files_of
    from launcher.trials.store import Store

    if part in ("SWEEP", "A", "B"):
        return Store(folder).names()
    if part == "TRIAL":
        return Store(folder).identifiers()
    if part == "STAGE":
        return Store(folder).stages()
    return files_of("trainer") if part == "NAME" and not option else []


def _overrides(verb: str, last: str, before: Sequence[str], own: str) -> list[str]:
    """Returns keys and groups, or the values of one."""
    name, equals, value = last.partition("=")
    if not equals:
        return [*(["pipeline="] if verb == "run" else []), *_keys(last, before, own)]
    start = last[: len(last) - len(value.rpartition(",")[2])]
    return [start + word for word in _values_of_key(name.lstrip("+~"), before, own)]


def _keys(last: str, before: Sequence[str], own: str) -> list[str]:
    """Returns groups and keys that begin as ``last`` does, each up to its next dot."""
    from launcher.config.compose import MODEL_FROM, config_groups, known_keys

    mark = last[: len(last) - len(last.lstrip("+~"))]
    groups = [f"{mark}{group}=" for group in config_groups(Path(own) if own else None)]
    dotted = [mark + key for key in (*known_keys(_backend(before, own)), MODEL_FROM)]
    sections = {key.rpartition(".")[0] for key in dotted}
    ends = [f"{key}." if key in sections else f"{key}=" for key in dotted if key.startswith(last)]
    return groups + [end[: end.find(".", len(last)) + 1] or end for end in ends]


def _values_of_key(name: str, before: Sequence[str], own: str) -> Iterator[str]:
    from launcher.config.compose import config_groups
    from launcher.config.folders import files_of
    from launcher.config.text_keys import type_of_key

    folder = Path(own) if own else None
    if name == "pipeline":
        yield from files_of(name, folder)
    elif name in (groups := config_groups(folder)):
        yield from (option for option in groups[name] if not option.rpartition("/")[2].startswith("_"))
    else:
        kind, metadata = type_of_key(name, _backend(before, own))
        yield from (str(choice) for choice in metadata.get("choices") or () if choice is not None)
        yield from ("true", "false") if kind.base is bool else ()


def _backend(before: Sequence[str], own: str) -> str:
    from launcher.config.compose import backend_of

    chosen = [word.partition("=")[2] for word in before if word.startswith("cluster=")]
    return backend_of(chosen[-1] if chosen else "local", Path(own) if own else None)


def _sweep_dir(before: Sequence[str]) -> str:
    return next((word.partition("=")[2] for word in before if word.startswith("sweep.dir=")), "runs")


def _value_of(option: str, before: Sequence[str]) -> str:
    """Returns the value of an option, given as ``--dir X`` or ``--dir=X``; empty without it."""
    for word, following in zip(before, [*before[1:], ""]):
        if word == option:
            return following
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
    return ""
