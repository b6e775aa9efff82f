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

from launcher.cli.overrides import add_folder
from launcher.config.packages import need
from launcher.own_python import run
from trainer.shared.records.model_files import model_of
from trainer.shared.records.stage_run import StageRun
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.stages import TEXT

if TYPE_CHECKING:
    from launcher.config import Config

_OVERRIDE = re.compile(r"\+{0,2}[a-z_]+([./][a-z_]+)*=.*", re.DOTALL)
FLAGS = ("--json", "-h", "--help")
"""Options without a value."""
FILES = ("--prompts", "--tokenizer", "--tasks-folder", "--token-file", "--out")
"""Options whose value is a path."""


def main(argv: list[str]) -> int:
    """Exit code 0 done, 1 the job failed, 2 wrong input."""
    need("train", "generating text")
    words, overrides, own = split(argv)
    if not overrides:
        return run("trainer.generate", *words)
    from launcher.config import locate_data
    from launcher.sweep.oneoff import JobError, run_job

    config, as_json = for_generation(words, overrides, own), "--json" in words
    copy = copier(not as_json and config.cluster.shares_files)  # else what is written is not seen while it grows
    try:
        result = run_job(locate_data(config), "generate", lambda *_: None, stage=command("generate", words), watch=copy)
    except JobError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if as_json:
        print(json.dumps(result["completions"]))
    elif not config.cluster.shares_files:
        print(*(made["prompt"] + made["text"] for made in result["completions"]), sep="\n")
    return 0


def command(verb: str, words: Sequence[str]) -> StageRun:
    """What the ranks are told: ``words`` with absolute paths, and which of them must be seen where they run."""
    told, sources = [os.path.abspath(words[0])], {"model": os.path.abspath(words[0])}
    for word in words[1:]:
        option, equals, value = word.partition("=")
        if option in FILES and equals:
            told, word = [*told, option], value
        if told[-1] in FILES:
            word = sources[told[-1].lstrip("-")] = os.path.abspath(word)
        told.append(word)
    return StageRun(verb=verb, command=told, sources=sources)


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


def for_generation(words: Sequence[str], overrides: list[str], own: Path | None = None) -> Config:
    """The resolved configuration of a job that generates with the model that ``words`` name first. ``data`` is 1 unless it is given."""
    from launcher.config import compose
    from launcher.config.rules import generating

    if given := [word for word in overrides if word.lstrip("+").startswith(("model.", "model="))]:
        raise ConfigError(f"{given[0]}: the model is that of the weights; leave it out")
    for option, name in (("--dtype", "run.precision"), ("--threads", "run.threads")):
        if any(word.partition("=")[0] == option for word in words):
            raise ConfigError(f"{option} is of one process alone, and keys start ranks; give {name}=...")
    if strange := [word for word in words if not word.isascii() and any("\ud800" <= letter <= "\udfff" for letter in word)]:
        raise ConfigError(f"{strange[0][:40]!r} is no text in UTF-8")
    if not words or words[0].startswith("-"):
        raise ConfigError("the first word is the model: a checkpoint, a folder of them, or a Hugging Face folder")
    return generating(compose(overrides, own), model_of(Path(words[0])))


def copier(prints: bool) -> Callable[[Path], None]:
    """Prints what is new in the text of a job, each time it is called with the job's folder."""
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
