"""The list of planted defects stays true: each applies to the sources as they are, and its tests are there."""

from __future__ import annotations

import ast
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tests.planted.__main__ import main, shared_out
from tests.planted.defect import Defect, DoesNotApply
from tests.planted.defects import rooms

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
ROOMS = rooms()
DEFECTS = [(room, defect) for room, defects in ROOMS.items() for defect in defects]
TRAINER = (
    *(
        "tensor",
        "context",
        "slices",
        "experts",
        "latent",
        "pairs",
        "state",
        "offload",
        "pipeline",
        "data",
        "phases",
        "checkpoint",
        "tuning",
        "generate",
    ),
    *("convert", "measure"),
)
PREDICTION = ("cost", "planning", "tables")
LAUNCHER = ("sweep", "watching", "trials", "slurm", "kubernetes", "config", "stages", "tracking", "hydra")
AT_LEAST = {TRAINER: 24, PREDICTION: 8, LAUNCHER: 20}
"""Defects of several rooms together: what a test is measured by before it leaves the gate."""


@cache
def statements(source: str) -> list[tuple[list[str], ast.stmt]]:
    """The statements at the top of a module, each with its lines."""
    lines = source.splitlines()
    return [(lines[node.lineno - 1 : node.end_lineno], node) for node in ast.parse(source).body]


def differ(source: str, changed: str) -> bool:
    """Whether two programs differ by more than their comments and line breaks."""
    pairs = list(zip(statements(source), statements(changed)))
    if len(statements(source)) != len(statements(changed)):
        return True
    edited = [(one, other) for (before, one), (after, other) in pairs if before != after]
    return any(ast.dump(one) != ast.dump(other) for one, other in edited or [(one, other) for (_, one), (_, other) in pairs])


def test_every_defect_applies_to_one_place_and_changes_a_program() -> None:
    for _, defect in DEFECTS:
        source = (ROOT / defect.file).read_text()
        changed = defect.applied(source)
        if defect.file.endswith(".py"):
            assert differ(source, changed), f"'{defect.name}' changes nothing"


def test_a_comment_and_a_line_break_are_no_defect() -> None:
    assert not differ("a = f(\n    1)  # one\nb = 2", "a = f(1)\n\nb = 2")
    assert differ("@cache\ndef f(): pass", "@other\ndef f(): pass") and differ("a = 1", "a = 1\nb = 2")


def test_the_tests_of_every_defect_are_there() -> None:
    gone = {
        defect.name: defect.tests for _, defect in DEFECTS if not defect.paths or not all((ROOT / path).exists() for path in defect.paths)
    }
    assert not gone


def test_no_two_defects_have_one_name() -> None:
    names = Counter(defect.name for _, defect in DEFECTS)
    assert not [name for name, count in names.items() if count > 1]


def test_every_room_has_defects_and_there_are_enough_of_them() -> None:
    assert {name for group in AT_LEAST for name in group} == {room for room, defects in ROOMS.items() if defects}
    assert {group: sum(len(ROOMS[room]) for room in group) >= least for group, least in AT_LEAST.items()} == dict.fromkeys(AT_LEAST, True)
    assert len(DEFECTS) >= 64


def test_a_defect_whose_text_has_gone_says_so() -> None:
    gone = Defect("sums are differences", "trainer/sum.py", "a + b", "a - b", "tests/trainer")
    with pytest.raises(DoesNotApply, match=r"'sums are differences' does not apply: trainer/sum.py has 0 times 'a \+ b', not once"):
        gone.applied("return a - b")
    with pytest.raises(DoesNotApply, match="2 times"):
        gone.applied("return a + b if c else b + a + b")


def test_each_test_runs_once_without_a_defect_and_those_of_a_file_together() -> None:
    tests = ["b.py::x", "a.py::x", "b.py::x[1]", "a.py::x", "c.py::x"]
    assert shared_out(tests, 2) == [["a.py::x", "c.py::x"], ["b.py::x", "b.py::x[1]"]]
    assert shared_out([], 3) == [[], [], []]


@pytest.mark.campaign("planted")
@pytest.mark.timeout(6 * 3600)
def test_the_gate_catches_every_defect() -> None:
    assert main(["--jobs", "2"]) == 0
