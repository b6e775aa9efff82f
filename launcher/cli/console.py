"""Where tables are printed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

WIDE = 1000


def wide_console() -> Console:
    """Standard output as a console that neither folds nor cuts tables when it is a pipe or a file, which have no width."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, WIDE)
    return console
