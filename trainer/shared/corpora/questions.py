"""Questions about Python's standard library, made from the lines that define its functions and classes: examples to tune on that are
everywhere."""

from __future__ import annotations

import hashlib
import json
import re

from trainer.shared.corpora.sources import open_source
from trainer.shared.run.schema import DataConfig

_DEFINED = re.compile(r"^ *(?:class \w+(?:\([\w., ]*\))?|def \w+\([\w,=. *]*\)):$", re.MULTILINE)
MOST_LETTERS = 48
"""Of a line that is asked about."""


def questions() -> bytes:
    """JSONL with the fields ``context``, ``question`` and ``answer``: every short line of the library that defines something is asked about
    once. Their order has nothing to do with files and names, so that any part of them is like another."""
    lines = set()
    for path in open_source(DataConfig()).files:
        lines |= {line.strip() for line in _DEFINED.findall(path.read_text(encoding="utf-8", errors="replace"))}
    order = sorted((line for line in lines if len(line) <= MOST_LETTERS), key=lambda line: hashlib.sha256(line.encode()).digest())
    return "".join(json.dumps(_asked(line, number)) + "\n" for number, line in enumerate(order)).encode()


def _asked(line: str, number: int) -> dict[str, str]:
    """The question whose turn it is: what is defined, the first word between the brackets, how many commas stand there."""
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
