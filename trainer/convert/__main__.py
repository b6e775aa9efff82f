"""``python -m trainer.convert export CHECKPOINT FOLDER|FILE.gguf`` and ``... import FOLDER|FILE.gguf CHECKPOINTS``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from trainer.shared.corpora.index import TOKENIZER
from trainer.shared.records.artifacts import GGUF
from trainer.shared.records.model_files import nested
from trainer.shared.run.command_lines import convert_parser
from trainer.shared.run.derived import resolve_model
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.read import flatten, from_dict
from trainer.shared.run.schema import ModelConfig
from trainer.shared.run.stages import FORMATS


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0 done, 2 wrong input (one line on stderr)."""
    arguments = convert_parser().parse_args(argv)
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


if __name__ == "__main__":
    sys.exit(main())
