"""The command lines of ``trireme generate``, ``serve`` and ``convert``, and requests, those of ``evaluate --tasks`` too, as data. The
launcher hands that to the ranks of a job; the trainer's own programs read it in one process."""

from __future__ import annotations

import argparse
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from typing import Any, Optional, TypeVar

from trainer.shared.run.errors import ConfigError
from trainer.shared.run.files import write_json
from trainer.shared.run.keys import key
from trainer.shared.run.read import from_dict
from trainer.shared.run.stages import COMPLETIONS, EvaluateSettings, GenerateSettings, Sampling

PRECISIONS = {"float32": "fp32", "float64": "fp64", "bfloat16": "bf16"}
OPTIONS = {"model": "model", "prompts": "--prompt", "prompts_file": "--prompts"}
"""Options of the fields whose names differ from them."""


@dataclass
class ReadWeights:
    """The weights to read, and the tokenizer of their model."""

    model: str = key("", "a checkpoint, a folder of them, or a Hugging Face folder")
    tokenizer: Optional[str] = key(None, "tokenizer.json, or a folder that has one (default: next to the weights)")
    task: int = key(0, "of a model with virtual tokens of several tasks: which, where a request names none")


@dataclass
class GenerateCommand(GenerateSettings, ReadWeights):
    """Text from a checkpoint or a Hugging Face folder, under any layout."""

    prompts_file: Optional[str] = key(None, "a file with a prompt on each line")
    stop: list[str] = key(list, "a text at which a completion ends")
    batch: int = key(64, "prompts under way at once in each replica")


@dataclass
class ServeCommand(ReadWeights):
    """Completions and chat over HTTP in the form of OpenAI's interface."""

    host: str = key("127.0.0.1", "address to serve on; any but this machine's own needs a token")
    port: int = key(8000, "0 = any that is free")
    token_file: Optional[str] = key(None, "file with the secret that clients send as bearer token")
    batch: int = key(32, "requests under way at once in each replica")
    queue: int = key(128, "requests that may wait; more are refused")


@dataclass
class ScoreCommand(EvaluateSettings, ReadWeights):
    """Tasks of lm-evaluation-harness."""

    batch: int = key(16, "items under way at once in each replica")


FILES = ("model", "tokenizer", "prompts_file", "token_file", "tasks_folder")
"""Fields whose values are paths."""
Command = TypeVar("Command", bound=ReadWeights)
ParserClass = type[argparse.ArgumentParser]


def generate_parser(form: ParserClass = argparse.ArgumentParser) -> argparse.ArgumentParser:
    made = _parser(form, "trireme generate", GenerateCommand)
    made.add_argument("--out", type=Path, metavar="FOLDER", help=f"also write {COMPLETIONS} there")
    made.add_argument("--json", action="store_true", help="one JSON document, with tokens and log-probabilities")
    return made


def serve_parser(form: ParserClass = argparse.ArgumentParser) -> argparse.ArgumentParser:
    return _parser(form, "trireme serve", ServeCommand)


def convert_parser(form: ParserClass = argparse.ArgumentParser) -> argparse.ArgumentParser:
    made = form(prog="trireme convert", description="Weights as a Hugging Face folder or a GGUF file, out of and into a run.")
    directions = made.add_subparsers(dest="direction", required=True)
    out = directions.add_parser("export", help="a checkpoint to a Hugging Face folder, or to one GGUF file")
    out.add_argument("source", type=Path, metavar="CHECKPOINT", help="one checkpoint, or a folder of them (the newest is taken)")
    out.add_argument("target", type=Path, metavar="FOLDER|FILE.gguf", help="what does not exist yet; its ending says the form")
    out.add_argument("--dtype", help="type of the weights: float32 (default), bfloat16, float16; GGUF: float16 (default), q8_0")
    out.add_argument("--tokenizer", type=Path, help="tokenizer.json, or a prepared corpus (default: next to the checkpoint)")
    out.add_argument("--adapter", action="store_true", help="only what LoRA added, as a folder that peft reads; without it, it is merged")
    into = directions.add_parser("import", help="a Hugging Face folder or a GGUF file to the checkpoint of step 0")
    into.add_argument(
        "source",
        type=Path,
        metavar="FOLDER|FILE.gguf",
        help="weights: a Hugging Face folder, a distributed checkpoint with a config.json, or a GGUF file",
    )
    into.add_argument("target", type=Path, metavar="CHECKPOINTS", help="the run.checkpoint.dir of the run that starts from it")
    into.add_argument("--base", type=Path, help="the source is a folder of peft with LoRA for this checkpoint; what it adds is imported")
    return made


def asked(kind: type[Command], arguments: argparse.Namespace) -> Command:
    """Returns the request of a command line. Raises ``ConfigError`` for a value out of range."""
    for name in ("tokens", "batch", "queue", "threads"):
        if getattr(arguments, name, 1) < 1:
            raise ConfigError(f"--{name}={getattr(arguments, name)} must be 1 or more")
    found = kind(**{option.name: getattr(arguments, option.name) for option in fields(kind)})
    if isinstance(found, Sampling):
        sampling_of(found)
    return found


def sampling_of(command: Sampling) -> Sampling:
    """Returns the part of a command about single tokens. Raises ``ConfigError`` for a value out of range."""
    return from_dict(Sampling, {option.name: getattr(command, option.name) for option in fields(Sampling)}, "sampling.")


def texts_of(command: GenerateCommand) -> list[str]:
    """Reads the prompts. Raises ``ConfigError`` if there are none, or the options make no sense."""
    texts = list(command.prompts)
    if command.prompts_file is not None:
        try:
            texts += [line for line in Path(command.prompts_file).read_text(encoding="utf-8-sig").split("\n") if line]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"--prompts={command.prompts_file} cannot be read as text: {error}; give a file with a prompt on each line"
            ) from None
    if not texts or "" in command.stop:
        missing = "there is no prompt; give one with --prompt TEXT, or a file of them with --prompts FILE"
        raise ConfigError(missing if not texts else "--stop= is empty; give a text, or leave it out")
    return texts


def write_completions(folder: Path, completions: list[dict[str, Any]]) -> None:
    """Writes the files of ``--out``."""
    try:
        write_json(folder / COMPLETIONS, {"completions": completions})
    except OSError as error:
        raise ConfigError(f"--out={folder} cannot be written: {error.strerror}; choose another folder") from None


def _parser(form: ParserClass, prog: str, kind: type[ReadWeights]) -> argparse.ArgumentParser:
    made = form(prog=prog, description=kind.__doc__)
    for option in fields(kind):
        _add_option(made, option)
    made.add_argument(
        "--dtype", choices=PRECISIONS, default="float32", help="type of the weights (default: %(default)s); with keys: run.precision"
    )
    made.add_argument(
        "--threads", type=int, default=1, help="CPU threads; more than cores that are free make it slow (default: %(default)s)"
    )
    return made


def _add_option(made: argparse.ArgumentParser, option: Field[Any]) -> None:
    """Adds the option of a field, with its words and default."""
    word, words = OPTIONS.get(option.name, f"--{option.name.replace('_', '-')}"), option.metadata["doc"]
    if option.name == "model":
        made.add_argument(word, metavar="MODEL", help=words)
    elif option.default_factory is not MISSING:
        made.add_argument(word, dest=option.name, action="append", default=[], metavar="TEXT", help=f"{words}; may be given several times")
    elif option.default is None:
        made.add_argument(word, dest=option.name, metavar="FILE", help=words)
    else:
        kind = type(option.default)
        made.add_argument(word, dest=option.name, type=kind, default=option.default, help=f"{words} (default: %(default)s)")
