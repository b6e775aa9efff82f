"""The command line of ``trireme generate``, without torch."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path

from trainer.shared.run.errors import ConfigError
from trainer.shared.run.read import from_dict
from trainer.shared.run.stages import COMPLETIONS, Sampling

PRECISIONS = {"float32": "fp32", "float64": "fp64", "bfloat16": "bf16"}


def parser() -> argparse.ArgumentParser:
    """The command line; the options of ``Sampling`` have its words and defaults."""
    made = argparse.ArgumentParser(
        prog="trireme generate", description="Text from a checkpoint or a Hugging Face folder, under any layout."
    )
    made.add_argument("model", type=Path, metavar="MODEL", help="a checkpoint, a folder of them, or a Hugging Face folder")
    made.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="a text to be continued; may be given several times")
    made.add_argument("--prompts", type=Path, metavar="FILE", help="a file with a prompt on each line")
    made.add_argument("--tokens", type=int, default=32, help="tokens to add at most (default: %(default)s)")
    made.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="a text at which a completion ends; may be given several times"
    )
    made.add_argument("--batch", type=int, default=64, help="prompts under way at once in each replica (default: %(default)s)")
    made.add_argument(
        "--tokenizer", type=Path, metavar="FILE", help="tokenizer.json, or a folder that has one (default: next to the weights)"
    )
    made.add_argument(
        "--dtype", choices=PRECISIONS, default="float32", help="type of the weights (default: %(default)s); with keys: run.precision"
    )
    made.add_argument(
        "--threads", type=int, default=1, help="CPU threads; more than cores that are free make it slow (default: %(default)s)"
    )
    made.add_argument("--out", type=Path, metavar="FOLDER", help=f"also write {COMPLETIONS} there")
    made.add_argument("--task", type=int, default=0, help="of a model with virtual tokens of several tasks: which (default: %(default)s)")
    made.add_argument("--json", action="store_true", help="one JSON document, with tokens and log-probabilities")
    for option in fields(Sampling):
        kind = type(option.default)
        name = f"--{option.name.replace('_', '-')}"
        made.add_argument(name, type=kind, default=option.default, help=f"{option.metadata['doc']} (default: %(default)s)")
    return made


def sampling_of(arguments: argparse.Namespace) -> Sampling:
    """``ConfigError`` for a value out of range."""
    return from_dict(Sampling, {f.name: getattr(arguments, f.name) for f in fields(Sampling)}, "sampling.")


def texts_of(arguments: argparse.Namespace) -> list[str]:
    """The prompts; ``ConfigError`` if there are none, or the options make no sense."""
    sampling_of(arguments)
    for name in ("tokens", "batch", "threads"):
        if getattr(arguments, name) < 1:
            raise ConfigError(f"--{name}={getattr(arguments, name)} must be 1 or more")
    texts = list(arguments.prompt)
    if arguments.prompts is not None:
        try:
            texts += [line for line in arguments.prompts.read_text(encoding="utf-8-sig").split("\n") if line]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"--prompts={arguments.prompts} cannot be read as text: {error}; give a file with a prompt on each line"
            ) from None
    if not texts or "" in arguments.stop:
        missing = "there is no prompt; give one with --prompt TEXT, or a file of them with --prompts FILE"
        raise ConfigError(missing if not texts else "--stop= is empty; give a text, or leave it out")
    return texts
