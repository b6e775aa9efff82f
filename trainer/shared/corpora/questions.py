"""Questions about Python's standard library, made from the lines that define its functions and classes: examples to tune on that every
installation has."""

from __future__ import annotations

import hashlib
import json
import re

from trainer.shared.corpora.sources import open_source
from trainer.shared.run.schema import DataConfig

_DEFINED = re.compile(r"^ *(?:class \w+(?:\([\w., ]*\))?|def \w+\([\w,=. *]*\)):$", re.MULTILINE)
MOST_LETTERS = 48
"""Longest line that is asked about."""


def questions() -> bytes:
    """Returns JSONL with the fields ``context``, ``question`` and ``answer``: one question about every short line of the library that
    defines a function or class. Their order is unrelated to files and names, so that any part of them is like another."""
    lines = set()
    for path in open_source(DataConfig()).files:
        lines |= {line.strip() for line in _DEFINED.findall(path.read_text(encoding="utf-8", errors="replace"))}
    order = sorted((line for line in lines if len(line) <= MOST_LETTERS), key=lambda line: hashlib.sha256(line.encode()).digest())
    return "".join(json.dumps(_asked(line, number)) + "\n" for number, line in enumerate(order)).encode()


def _asked(line: str, number: int) -> dict[str, str]:
    """Returns the question of this number's kind: the kind of definition, the first word between the brackets, or the number of commas
    there."""
    inside = line.partition("(")[2].rpartition(")")[0]
    first = re.match(r"\w+", inside)
    kind = "class" if line.startswith("class") else "method" if first and first.group() in ("self", "cls") else "function"
    known = {
        "What is defined?": kind,
        "What comes first in the brackets?": first.group() if first else "nothing",
        "How many commas?": str(inside.count(",")),
    }
    question = list(known)[number % len(known)]
    return {"context": line, "question": question, "answer": known[question]}
