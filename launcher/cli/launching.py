"""Shared options of the verbs that start trials: the first word, and going on in the background."""

from __future__ import annotations

import argparse
import sys

from trainer.shared.run.errors import ConfigError

DETACH = "--detach"
DETACH_HELP = "go on in the background; watch with trireme attach"


def add_detach(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(DETACH, action="store_true", help=DETACH_HELP)


def first_word() -> None:
    """Says at a terminal, before any library is imported, that work has begun."""
    if sys.stderr.isatty():
        print("composing and checking the configuration ...", file=sys.stderr, flush=True)


def check_detach(detach: bool, **others: object) -> None:
    """Raises ``ConfigError`` where ``--detach`` stands with an option that starts nothing, or that prints for whoever waits."""
    given = [f"--{name.replace('_', '-')}" for name, value in others.items() if value]
    if detach and given:
        raise ConfigError(f"{DETACH} stands without {given[0]}, which prints and leaves nothing to go on; leave one of them out")
