"""Prints lines for the person at the terminal, apart from results, to standard error."""

from __future__ import annotations

from rich.console import Console


def say(text: str) -> None:
    """One line to the person."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(text, markup=False, emoji=False)
