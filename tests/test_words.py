"""One word, one meaning: the names of the project's classes, and phrases that its comments and pages do without."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.sources import nodes

pytestmark = pytest.mark.xdist_group("sources")  # one process parses them
ROOT = Path(__file__).resolve().parent.parent
PARALLEL = ("launcher/backends/slurm", "launcher/backends/kubernetes")
"""Rooms of the same shape, in which the same names mean the same for another cluster."""
STUMBLES = {
    "for ever": re.compile(r"\bfor ever\b"),
    "in the mean": re.compile(r"\bin the mean\b"),
    "is no X, for is not an X": re.compile(r"(?<![Tt]here )\b(?:is|are) no\b(?! longer| more| less| better| worse)"),
    "mend, for fix": re.compile(r"\bmend(?:s|ed|ing)?\b"),
    "hang on, for depend on": re.compile(r"\b(?:hangs?|hung|hanging) on\b"),
}
"""Phrases that a reader of plain English stumbles over, by name."""
CLAUSES = {
    "a line that begins with a clause": re.compile(r"^\W*(?:What|Whether|Such|Likewise|Of which)\b"),
    "what is, for a noun": re.compile(r"\bwhat (?:is|are|was|were|has|have|had)\b"),
}
"""Clauses that stand where a verb or a noun belongs, by name."""
LEXEMES = re.compile(r'''"""(?:\\.|[^\\])*?"""|\'\'\'(?:\\.|[^\\])*?\'\'\'|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|#[^\n]*''', re.DOTALL)
"""Strings, and comments, which begin in none of them."""


@cache
def modules() -> list[Path]:
    """Every module of the product."""
    return [path for room in ("launcher", "trainer", "hydra_plugins") for path in sorted((ROOT / room).rglob("*.py"))]


def classes() -> list[tuple[str, str]]:
    """Every class of the product, by name, and its file. Nested and private ones count too."""
    found = []
    for path in modules():
        file = str(path.relative_to(ROOT))
        found += [(node.name, file) for node in nodes(path) if isinstance(node, ast.ClassDef)]
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


@cache
def prose(path: Path) -> list[tuple[int, str]]:
    """The prose of a file by line: all of a page; the comments and docstrings of a module, not the messages that it prints."""
    text = path.read_text()
    if path.suffix == ".md":
        return list(enumerate(text.splitlines(), 1))
    found = comments(text)
    for node in nodes(path):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            found += enumerate(node.value.value.splitlines(), node.lineno)
    return found


def comments(text: str) -> list[tuple[int, str]]:
    """The comments of a module, by line. The tokenizer finds the same at thirty times the cost."""
    return [(text.count("\n", 0, hit.start()) + 1, hit[0]) for hit in LEXEMES.finditer(text) if hit[0].startswith("#")]


def messages(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the texts of a module that are not docstrings, by line: what it prints, and parts of it."""
    docstrings = {node.value for node in nodes(path) if isinstance(node, ast.Expr)}
    for node in nodes(path):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
            yield node.lineno, node.value


def stumbles(path: Path, forms: dict[str, re.Pattern[str]] = STUMBLES) -> list[str]:
    """Lists the phrases of a file that ``forms`` names, with their lines. A phrase that a line break splits counts too."""
    lines = prose(path)
    pairs = [(number, f"{line} {after.strip()}") for (number, line), (_, after) in zip(lines, [*lines[1:], (0, "")])]
    starts = {number: len(line) for number, line in lines}
    found = [(number, name, hit) for number, text in pairs for name, form in forms.items() for hit in form.finditer(text)]
    return [f"{path}:{number}: {name}" for number, name, hit in found if hit.start() < starts[number]]


def test_comments_and_pages_do_without_phrases_that_readers_stumble_over() -> None:
    files = [*modules(), *(ROOT / "docs").rglob("*.md"), *(ROOT / "docs").rglob("*.py")]
    files += [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    assert sorted(line for path in files for line in stumbles(path)) == []


def test_messages_do_without_them_too() -> None:
    found = [
        f"{path}:{number}: {name}"
        for path in modules()
        for number, text in messages(path)
        for name, form in STUMBLES.items()
        if form.search(text)
    ]
    assert found == []


def test_modules_describe_themselves_by_verbs_and_nouns() -> None:
    assert sorted(line for path in modules() for line in stumbles(path, CLAUSES)) == []


def test_a_clause_is_found_where_a_sentence_begins(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text('def f() -> bool:\n    """Whether it runs."""\n\n\nx = 1  # of what was read, whatever\n')
    assert {line.rpartition(": ")[2] for line in stumbles(tmp_path / "a.py", CLAUSES)} == set(CLAUSES)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("# waits for ever\n", 1),
        ('def f() -> None:\n    """A name that is\n    no name."""\n', 1),
        ("x = 'is no file; mend it'\n", 0),
        ("# there is no file, and it is no longer read\n", 0),
        ("# mend what hangs on it\n", 2),
    ],
)
def test_a_phrase_is_found_in_comments_and_docstrings_alone(tmp_path: Path, text: str, found: int) -> None:
    (tmp_path / "a.py").write_text(text)
    assert len(stumbles(tmp_path / "a.py")) == found
