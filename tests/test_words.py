"""One word, one meaning: what the project calls its classes."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PARALLEL = ("launcher/backends/slurm", "launcher/backends/kubernetes")
"""Rooms of the same shape, in which the same names mean the same for another cluster."""


def classes() -> list[tuple[str, str]]:
    """Every class of the product, by name, and its file. Nested and private ones count too."""
    paths = [path for room in ("launcher", "trainer", "hydra_plugins") for path in sorted((ROOT / room).rglob("*.py"))]
    found = []
    for path in paths:
        file = str(path.relative_to(ROOT))
        found += [(node.name, file) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)]
    return found


def test_a_class_name_occurs_once() -> None:
    found = classes()
    counts = Counter(name for name, file in {(name, room) for name, file in found for room in [_room(file)]})
    assert {name: [file for other, file in found if other == name] for name, count in counts.items() if count > 1} == {}
    inside = Counter((name, file.rpartition("/")[0]) for name, file in found)
    assert [name for (name, _), count in inside.items() if count > 1] == []


def _room(file: str) -> str:
    """Where a name has to be unique: the project, of which the parallel rooms count as one."""
    return "a cluster's own" if file.startswith(PARALLEL) else file
