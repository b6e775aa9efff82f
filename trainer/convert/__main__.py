"""``python -m trainer.convert export CHECKPOINT FOLDER`` and ``... import FOLDER CHECKPOINTS``."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

from trainer.spec import ConfigError, ModelConfig


def main(argv: list[str] | None = None) -> int:
    """Exit code 0 done, 2 wrong input (one line on stderr)."""
    arguments = _parser().parse_args(argv)
    import torch

    from trainer.convert.huggingface import export_weights, import_weights

    try:
        if arguments.direction == "export":
            export_weights(arguments.source, arguments.target, getattr(torch, arguments.dtype), arguments.tokenizer)
            print(f"exported {arguments.source} to {arguments.target}")
        else:
            model = import_weights(arguments.source, arguments.target)
            print(f"imported {arguments.source}; continue training with: run.checkpoint.dir={arguments.target} {overrides(model)}")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return ConfigError.exit_code
    return 0


def overrides(model: ModelConfig) -> str:
    """The overrides that describe ``model`` on a command line."""
    default = asdict(ModelConfig())
    return " ".join(f"model.{name}={value}".lower() for name, value in asdict(model).items() if value != default[name])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m trainer.convert", description="Weights in the Hugging Face layout, out of and into a run."
    )
    directions = parser.add_subparsers(dest="direction", required=True)
    out = directions.add_parser("export", help="a checkpoint to a Hugging Face folder")
    out.add_argument("source", type=Path, metavar="CHECKPOINT", help="one checkpoint, or a folder of them (the newest is taken)")
    out.add_argument("target", type=Path, metavar="FOLDER", help="a folder that does not exist yet")
    out.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="type of the weights")
    out.add_argument("--tokenizer", type=Path, help="tokenizer.json to include (from a prepared corpus)")
    into = directions.add_parser("import", help="a Hugging Face folder to the checkpoint of step 0")
    into.add_argument("source", type=Path, metavar="FOLDER", help="config.json and .safetensors files of a GPT-2, LLaMA or BLOOM model")
    into.add_argument("target", type=Path, metavar="CHECKPOINTS", help="the run.checkpoint.dir of the run that starts from it")
    return parser


if __name__ == "__main__":
    sys.exit(main())
