"""``trireme trainers [check]``: lists trainer profiles and their options; ``check`` runs two steps of one."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.cli.overrides import add_overrides
from launcher.cli.parser import VerbParser
from launcher.labels import shown
from trainer.shared.run.errors import ConfigError, nearest
from trainer.shared.run.read import flatten

if TYPE_CHECKING:
    from launcher.config.trainer import LaunchProfile, TrainerProfile


DESCRIPTION = """\
Lists every trainer profile, and the keys that it can be told; of one, by its name, also what it keeps and overlaps. With 'check' and the
overrides of a run: two steps of that run on its cluster, and what was read from the trainer's log, or which of its options the trainer
refused.

examples:
  trireme trainers
  trireme trainers megatron_core
  trireme trainers check trainer=deepspeed trainer.launch.script=train.py model=gpt_tiny
"""
STEPS = 2
"""The first step of a trainer compiles and allocates: the second one has a time worth printing."""


def main(argv: list[str]) -> int:
    """0 when it is listed, or when the trainer ran and was understood; 1 when it did not; 2 for wrong input."""
    arguments = parser().parse_intermixed_args(argv)
    if arguments.action == "check":
        return check(arguments.overrides, arguments.config_dir, arguments.json)
    if arguments.overrides or "=" in (arguments.action or ""):
        raise ConfigError(f"{[arguments.action, *arguments.overrides][-1]} is of a run; to run two steps of it: trireme trainers check ...")
    return show(arguments.action, arguments.config_dir, arguments.json)


def parser() -> VerbParser:
    made = VerbParser("trireme trainers", DESCRIPTION)
    made.add_argument("action", nargs="?", metavar="NAME|check", help="one profile; or check: run two steps of a trainer")
    add_overrides(made)
    made.add_argument("--json", action="store_true", help="one JSON document")
    return made


def show(wanted: str | None, own: Path | None, as_json: bool) -> int:
    """Prints all profiles, or all of one."""
    from launcher.config.trainers import profile, profile_names

    names = profile_names(own)
    if wanted is not None and wanted not in names:
        raise ConfigError(f"no trainer is called {wanted!r}{nearest(wanted, names)} ('trireme trainers' lists them)")
    found = {name: told(profile(name, own)) for name in ([wanted] if wanted else names)}
    if wanted:
        found[wanted] |= {"profile": without_launch(profile(wanted, own))}
    if as_json:
        print(json.dumps(found, indent=1))
        return 0
    for name, one in found.items():
        use = "this project" if one["program"] == "embedded" else "for predictions" if one["told"] is None else ""
        print(shown(f"{name:30}{one['name']}: {use}".rstrip(": ")))
        for key, values in (one["told"] or {}).items():
            print(f"    {key}" + (f" = {', '.join(values)}" if values else ""))
        if wanted:
            print("predictions assume, where it differs from the default:")
            print(*(shown(f"    {key} = {value}") for key, value in one["profile"].items()), sep="\n")
    return 0


def without_launch(trainer: TrainerProfile) -> dict[str, Any]:
    """Returns the keys of a profile that predictions read and that differ from the defaults."""
    from launcher.config.trainer import TrainerProfile

    default = flatten(TrainerProfile())
    return {key: value for key, value in flatten(trainer).items() if not key.startswith(("launch.", "name")) and value != default.get(key)}


def told(trainer: TrainerProfile) -> dict[str, Any]:
    """Name, program, and the layout keys that it can be told with their values (null: any); null where it cannot be launched."""
    from launcher.config.command import mentioned

    keys = mentioned(trainer.launch) if trainer.foreign else None
    told = {name: values for name, values in sorted((keys or {}).items()) if name.startswith("layout.") or name == "zero"}
    words = {name: sorted(values) if values is not None else None for name, values in told.items()}
    return {"name": trainer.name, "program": trainer.launch.program, "told": None if keys is None else words}


def check(overrides: list[str], own: Path | None, as_json: bool) -> int:
    """Runs ``STEPS`` steps of the configuration that ``overrides`` compose."""
    from launcher.config import check_launchable, compose, locate_data, resolve
    from launcher.config.command import command_of
    from launcher.sweep.oneoff import JobError, run_job

    config = compose(overrides, own)
    check_launchable(config)
    short = dataclasses.replace(config.run, steps=STEPS, warmup_steps=STEPS - 1)
    config = locate_data(resolve(dataclasses.replace(config, run=short)))
    command = command_of(config)
    if command is not None:
        print(f"command: {shlex.join(command.words)}", file=sys.stderr)
        for name, text in command.files.items():
            print(f"{name}:\n{text}", file=sys.stderr)
    try:
        result = run_job(config, "check", lambda *_: None)
    except JobError as error:
        print(f"error: {error}", file=sys.stderr)
        for word in refused(command.words if command else [], str(error)):
            print(f"refused: {word}, told by {teller(config.trainer.launch, word)}; correct it there", file=sys.stderr)
        return error.exit_code
    print(json.dumps(result) if as_json else sentence(config.trainer.name, result))
    return 0


def refused(words: Sequence[str], message: str) -> list[str]:
    """The ``words`` of a command that a trainer's ``message`` names, by their whole name or, quoted, by its last part."""
    whole = [
        (word, re.escape(word.partition("=")[0]), re.escape(flag_of(word).split(".")[-1]))
        for word in words
        if word.startswith("--") or "=" in word
    ]
    return [word for word, name, last in whole if re.search(rf"(?<![\w.-]){name}(?![\w.-])|'{last}'", message)]


def flag_of(word: str) -> str:
    """``training.steps`` of ``--training.steps=5``."""
    return word.partition("=")[0].lstrip("-+")


def teller(launch: LaunchProfile, word: str) -> str:
    """The key of the profile from which ``word`` came."""
    for name, told in launch.options.items():
        if re.search(rf"\b{re.escape(flag_of(word))}\b", json.dumps(told)):
            return f"trainer.launch.options.{name}"
    return "trainer.launch." + ("arguments" if word in launch.arguments else "command")


def sentence(name: str, result: dict[str, Any]) -> str:
    """Returns the figures read from the last step."""
    loss, memory = result["losses"][-1], result["peak_memory_bytes"]
    words = [
        f"{result['step_time_s']:.3g} s a step",
        f"loss {loss:.4f}" if loss is not None else "no loss",
        f"{memory / 1e9:.3g} GB" if memory else "no memory",
    ]
    return f"{name} ran {len(result['losses'])} steps, and its log was understood: {', '.join(words)}"
