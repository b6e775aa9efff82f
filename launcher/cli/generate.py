"""``trireme generate MODEL --prompt TEXT ... [KEY=VALUE ...]``: text from a checkpoint or a Hugging Face folder. The trainer does the
work: in one process, or with keys (``layout.tensor=2``, ``cluster=slurm``) in a job under that layout."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.cli.overrides import add_folder, add_overrides
from launcher.cli.parser import VerbParser
from launcher.own_python import run
from trainer.shared.records.model_files import model_of
from trainer.shared.records.stage_run import StageRun
from trainer.shared.run.command_lines import FILES, GenerateCommand, ReadWeights, asked, generate_parser, write_completions
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.read import to_dict
from trainer.shared.run.stages import TEXT

if TYPE_CHECKING:
    from launcher.config import Config

_OVERRIDE = re.compile(r"\+{0,2}[a-z_]+([./][\w-]+)*=.*", re.DOTALL)
FLAGS = ("--json", "-h", "--help")
"""Options without a value."""


def main(argv: list[str]) -> int:
    """Exit code 0 done, 1 the job failed, 2 wrong input."""
    if {"-h", "--help"} & {*argv}:
        parser().print_help()
        return 0
    from launcher.config.packages import need

    need("train", "generating text")
    words, overrides, own = split(argv)
    if not overrides:
        return run("trainer.generate", *words)
    from launcher.config import locate_data
    from launcher.sweep.oneoff import run_job

    arguments = parsed(generate_parser(), words)
    command = asked(GenerateCommand, arguments)
    config = for_generation(command.model, overrides, own)
    copy = copier(not arguments.json and config.cluster.shares_files)  # else the growing text is not seen
    result = run_job(locate_data(config), "generate", lambda *_: None, stage=told("generate", command), watch=copy)
    if arguments.out is not None:
        write_completions(arguments.out, result["completions"])
    if arguments.json:
        print(json.dumps(result["completions"]))
    elif not config.cluster.shares_files:
        print(*(made["prompt"] + made["text"] for made in result["completions"]), sep="\n")
    return 0


def parser() -> argparse.ArgumentParser:
    """Returns the words of the command line, for help and completion."""
    made = generate_parser(VerbParser)
    add_overrides(made, "a layout, a cluster: text by ranks of a job (cluster=slurm layout.tensor=2)")
    return made


def told(verb: str, command: ReadWeights) -> StageRun:
    """Returns the ranks' command with absolute paths, and the files they must see."""
    files = {name: os.path.abspath(path) for name in FILES if (path := getattr(command, name, None))}
    return StageRun(verb=verb, sources={name.replace("_", "-"): path for name, path in files.items()}, settings=to_dict(command) | files)


def split(argv: Sequence[str]) -> tuple[list[str], list[str], Path | None]:
    """The words of the trainer's command line, the overrides among them (the value of an option is none), and ``--config-dir``."""
    words: list[str] = []
    overrides: list[str] = []
    ours = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_folder(ours)
    known, argv = ours.parse_known_args(argv)
    for word in argv:
        value = bool(words) and words[-1].startswith("-") and "=" not in words[-1] and words[-1] not in FLAGS
        (overrides if not value and _OVERRIDE.fullmatch(word) else words).append(word)
    return words, overrides, known.config_dir


def parsed(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """Parses the ranks' request from ``words``. Raises ``ConfigError`` for options of single-process runs, and invalid text."""
    for option, name in (("--dtype", "run.precision"), ("--threads", "run.threads")):
        if any(word.partition("=")[0] == option for word in words):
            raise ConfigError(f"{option} applies to single-process runs only; with overrides use {name}=...")
    if strange := [word for word in words if not word.isascii() and any("\ud800" <= letter <= "\udfff" for letter in word)]:
        raise ConfigError(f"{strange[0][:40]!r} is not UTF-8 text")
    if not words or words[0].startswith("-"):
        raise ConfigError("the first word is the model: a checkpoint, a folder of them, or a Hugging Face folder")
    return parser.parse_args(words)


def for_generation(model: str, overrides: Sequence[str], own: Path | None = None) -> Config:
    """Resolves the configuration of a job that reads the weights in ``model``. ``data`` is 1 unless it is given."""
    from launcher.config import compose
    from launcher.config.rules import generating

    if given := [word for word in overrides if word.lstrip("+").startswith(("model.", "model="))]:
        raise ConfigError(f"{given[0]}: the model is that of the weights; leave it out")
    return generating(compose(overrides, own), model_of(Path(model)))


def copier(prints: bool) -> Callable[[Path], None]:
    """Returns a function that prints a job's new text, called with its folder."""
    printed = 0

    def copy(folder: Path) -> None:
        nonlocal printed
        path = folder / TEXT
        if prints and path.is_file():
            with path.open("rb") as file:
                file.seek(printed)
                printed += sys.stdout.buffer.write(file.read())
                sys.stdout.flush()

    return copy
