"""``python -m trainer.convert export CHECKPOINT FOLDER|FILE.gguf`` and ``... import FOLDER|FILE.gguf CHECKPOINTS``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from trainer.shared.corpora.index import TOKENIZER
from trainer.shared.records.artifacts import GGUF
from trainer.shared.records.model_files import nested
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.read import flatten, from_dict
from trainer.shared.run.rules import resolve_model
from trainer.shared.run.schema import ModelConfig
from trainer.shared.run.stages import FORMATS


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0 done, 2 wrong input (one line on stderr)."""
    arguments = _parser().parse_args(argv)
    from trainer.convert import export, export_adapter, import_adapter, import_weights

    try:
        if arguments.direction == "export" and arguments.adapter:
            export_adapter(arguments.source, arguments.target)
            print(f"exported what LoRA added in {arguments.source} to {arguments.target}")
        elif arguments.direction == "export":
            export(arguments.source, arguments.target, _dtype(arguments), _tokenizer(arguments.tokenizer))
        elif arguments.base is not None:
            import_adapter(arguments.source, arguments.target, arguments.base)
            print(f"imported what {arguments.source} adds to {arguments.base}; use it as any checkpoint: {arguments.target}")
        else:
            model = import_weights(arguments.source, arguments.target)
            print(f"imported {arguments.source}; continue training with: run.checkpoint.dir={arguments.target} {overrides(model)}")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return ConfigError.exit_code
    return 0


def _dtype(arguments: argparse.Namespace) -> str:
    """Returns the type of the weights; ``ConfigError`` if the target's format does not have it."""
    allowed = FORMATS["gguf" if arguments.target.suffix == GGUF else "huggingface"]
    if arguments.dtype not in (None, *allowed):
        raise ConfigError(
            f"--dtype={arguments.dtype} is not one of {', '.join(allowed)}, which {arguments.target.name} may have; use one of these"
        )
    return str(arguments.dtype or allowed[0])


def _tokenizer(path: Path | None) -> Path | None:
    file = path / TOKENIZER if path is not None and path.is_dir() else path
    if file is not None and not file.is_file():
        raise ConfigError(f"--tokenizer={path} is not a tokenizer.json and holds none; give one, or a prepared corpus")
    return file


def overrides(model: ModelConfig) -> str:
    """Returns the overrides that describe ``model`` on a command line, without those that follow from the others."""
    default, wanted = flatten(ModelConfig()), resolve_model(model)
    needed = {name: value for name, value in flatten(model).items() if value != default[name]}
    for name in reversed([*needed]):
        fewer = {key: value for key, value in needed.items() if key != name}
        if resolve_model(from_dict(ModelConfig, nested(fewer))) == wanted:
            needed = fewer
    return " ".join(f"model.{name}={_word(value)}" for name, value in needed.items())


def _word(value: object) -> str:
    """Renders a value as in an override, without blanks."""
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":")).replace('"', "")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="trireme convert", description="Weights as a Hugging Face folder or a GGUF file, out of and into a run."
    )
    directions = parser.add_subparsers(dest="direction", required=True)
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
    return parser


if __name__ == "__main__":
    sys.exit(main())
