"""What tests, benchmarks, documentation and examples take from the product is there: no type checker reads them."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parent.parent
OWN = ("launcher", "trainer", "hydra_plugins", "tests", "benchmarks")


def taken(path: Path) -> Iterator[tuple[str, str]]:
    """(module, name) of each ``from module import name`` of ours."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in OWN:
            yield from ((str(node.module), alias.name) for alias in node.names)


def exists(module: str, name: str) -> bool:
    if hasattr(importlib.import_module(module), name):
        return True
    try:
        importlib.import_module(f"{module}.{name}")
    except ModuleNotFoundError:
        return False
    return True


@pytest.mark.parametrize("folder", ["tests", "benchmarks", "docs", "examples"])
def test_every_name_that_is_imported_exists(folder: str) -> None:
    wanted = {(pair, path) for path in sorted((ROOT / folder).rglob("*.py")) for pair in taken(path)}
    assert wanted or folder in ("docs", "examples")
    known = {pair: exists(*pair) for pair in {pair for pair, _ in wanted}}
    assert [f"{path.relative_to(ROOT)}: {'.'.join(pair)}" for pair, path in sorted(wanted) if not known[pair]] == []


def test_a_name_that_does_not_exist_is_found() -> None:
    assert exists("trainer.shared", "records") and exists("trainer.shared.run.errors", "ConfigError")
    assert not exists("trainer.shared", "nothing")
