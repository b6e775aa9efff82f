"""The project's sources as trees. Most of the time of a test that reads them goes into parsing, so each is parsed once."""

from __future__ import annotations

import ast
import gc
from functools import cache
from pathlib import Path


def nodes(path: Path) -> list[ast.AST]:
    """All nodes of a module, in the order of ``ast.walk``."""
    return nodes_in(path.read_text())


@cache
def nodes_in(text: str) -> list[ast.AST]:
    """By text, since a test may change a file. Python's collector neither looks for garbage among the nodes, nor afterwards."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        found = list(ast.walk(ast.parse(text)))
        gc.freeze()
    finally:
        if collecting:
            gc.enable()
    return found
