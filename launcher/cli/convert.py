"""``trireme convert export CHECKPOINT FOLDER`` and ``... import FOLDER CHECKPOINTS``: Hugging Face weights. The trainer does the work."""

from __future__ import annotations

import argparse

from launcher.cli.parser import VerbParser
from launcher.own_python import run
from trainer.shared.run.command_lines import convert_parser


def main(argv: list[str]) -> int:
    """Exit code 0 done, 2 wrong input."""
    parser().parse_args(argv)  # answers --help, and refuses wrong words, before torch is imported
    from launcher.config.packages import need

    need("train", "converting weights")
    return run("trainer.convert", *argv)


def parser() -> argparse.ArgumentParser:
    """Returns the words of the command line, for help and completion."""
    return convert_parser(VerbParser)
