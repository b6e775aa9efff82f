"""What varies from family to family is said in one file each, and nowhere else."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.shared import new_family
from trainer.shared.families.registry import FAMILIES

pytestmark = pytest.mark.slow  # imports torch

ROOT = Path(__file__).resolve().parents[2]
ROOM = "trainer/shared/families"


def told_apart(source: str) -> list[int]:
    """Lines of a program that name a family, or compare a model's family with something."""
    tree = ast.parse(source)
    texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    named = [n.lineno for n in ast.walk(tree) if isinstance(n, ast.Constant) and n.value in (*FAMILIES,) and id(n) not in texts]
    compared = [n.lineno for n in ast.walk(tree) if isinstance(n, ast.Compare) for side in (n.left, *n.comparators) if _is_family(side)]
    return sorted({*named, *compared})


def _is_family(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "family"


def test_no_other_file_tells_families_apart() -> None:
    paths = [path for place in ("launcher", "trainer", "hydra_plugins") for path in sorted((ROOT / place).rglob("*.py"))]
    others = [path.relative_to(ROOT) for path in paths if not path.is_relative_to(ROOT / ROOM)]
    assert {str(path): lines for path in others if (lines := told_apart((ROOT / path).read_text()))} == {}


@pytest.mark.parametrize(
    "line", ['tied = model.family != "llama"', 'TABLES = {"gpt": 1}', "if c.family in known: pass", 'match f:\n case "bloom": pass']
)
def test_a_file_that_tells_families_apart_is_found(line: str) -> None:
    assert told_apart(line) != [] and told_apart('"""gpt"""\nfamily = FAMILIES[model.family]') == []


def test_each_file_is_one_family_of_its_name_and_the_default_comes_first() -> None:
    files = {path.stem for path in (ROOT / ROOM).glob("*.py")} - {"__init__", "block", "family", "gguf", "parts", "registry"}
    assert files == {*FAMILIES} and list(FAMILIES)[:3] == ["gpt", "llama", "bloom"]


@pytest.mark.slow
def test_one_new_file_is_a_family_that_is_trained_planned_and_converted(tmp_path: Path) -> None:
    for place in ("launcher", "trainer", "hydra_plugins", "conf", "recipes"):
        shutil.copytree(ROOT / place, tmp_path / place)
    (tmp_path / ROOM / "osprey.py").write_text(new_family.FILE)
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    program = [sys.executable, str(ROOT / "tests/shared/new_family.py"), str(tmp_path / "weights")]
    done = subprocess.run(program, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900)
    assert done.stdout.endswith("all holds\n"), done.stdout + done.stderr
