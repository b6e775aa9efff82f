"""Five tasks without a download, made from arithmetic and the running Python: YAML and JSONL as lm-evaluation-harness reads them.

They discriminate between small models, and each has a chance level; there are no published figures to compare with.
"""

from __future__ import annotations

import builtins
import inspect
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from trainer.shared.run.stages import BUILTIN_TASKS

Item = dict[str, Any]
ITEMS = 100
MODULES = ("argparse", "collections", "csv", "datetime", "decimal", "fractions", "json", "logging", "os", "pathlib", "random", "shutil",
           "statistics", "string", "tempfile", "textwrap", "threading", "urllib.parse", "zipfile", "calendar")  # fmt: skip


def write_tasks(folder: Path) -> None:
    """Writes one YAML and one JSONL file for each of ``BUILTIN_TASKS``; the same in every process of one Python."""
    folder.mkdir(parents=True, exist_ok=True)
    makers = (addition, brackets, copying, members, prose)
    for name, make in zip(BUILTIN_TASKS, makers):
        draw = random.Random(name)
        items = [item for item, _ in zip(make(draw), range(ITEMS))]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items), encoding="utf-8")
        form = TEXT if "text" in items[0] else CHOICE
        files = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / f"{name}.jsonl")}}}
        settings = {"task": name, **files, "test_split": "test", "num_fewshot": 0, "metadata": {"version": 1}}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(settings | form), encoding="utf-8")


CHOICE = {
    "output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}",
    "target_delimiter": "",
    "metric_list": [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")],
}  # fmt: skip
TEXT = {
    "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}", "should_decontaminate": False,
    "metric_list": [{"metric": name} for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")],
}  # fmt: skip


def _question(draw: random.Random, question: str, right: str, wrong: list[str]) -> Item:
    choices = [right, *wrong]
    draw.shuffle(choices)
    return {"question": question, "choices": choices, "answer": choices.index(right)}


def addition(draw: random.Random) -> Iterator[Item]:
    """Asks for the sum of two numbers below 100, after two examples; chance 1/4."""
    while True:
        a, b, c, d, x, y = (draw.randrange(100) for _ in range(6))
        wrong = draw.sample([n for n in range(max(0, x + y - 10), x + y + 11) if n != x + y], 3)
        yield _question(draw, f"{a} + {b} = {a + b}\n{c} + {d} = {c + d}\n{x} + {y} =", f" {x + y}", [f" {n}" for n in wrong])


def brackets(draw: random.Random) -> Iterator[Item]:
    """Asks for the bracket that closes an expression; chance 1/3."""
    pairs = {"(": ")", "[": "]", "{": "}"}
    while True:
        opened = [draw.choice("([{") for _ in range(draw.randrange(2, 5))]
        closed = draw.randrange(1, len(opened))
        words = [word for bracket in opened for word in (bracket, draw.choice("abcxyz"), ",")]
        ends = [pairs[bracket] for bracket in reversed(opened)]
        wrong = [f" {bracket}" for bracket in pairs.values() if bracket != ends[closed]]
        yield _question(draw, " ".join(["value =", *words, "0", *ends[:closed]]), f" {ends[closed]}", wrong)


def copying(draw: random.Random) -> Iterator[Item]:
    """Asks for the word that followed a given one earlier in the text; chance 1/4."""
    words = sorted(name for name in dir(builtins) if name.islower() and name.isalpha())
    while True:
        shown = draw.sample(words, 8)
        at = draw.randrange(4, 8)
        yield _question(draw, " ".join([*shown, *shown[:at]]), f" {shown[at]}", [f" {word}" for word in draw.sample(shown[:at], 3)])


def members(draw: random.Random) -> Iterator[Item]:
    """Asks for a member of a module of the standard library; chance 1/4."""
    known = {name: _public(name) for name in MODULES}
    while True:
        name = draw.choice(MODULES)
        others = sorted({word for words in known.values() for word in words} - set(known[name]))
        yield _question(draw, f"import {name}\n\n{name}.", draw.choice(known[name]), draw.sample(others, 3))


def prose(draw: random.Random) -> Iterator[Item]:
    """Yields documentation of the standard library, scored in bits per byte."""
    found = {inspect.getdoc(getattr(__import__(name, fromlist=["_"]), word)) or "" for name in MODULES for word in _public(name)}
    texts = sorted(text for text in found if 200 <= len(text) <= 2000)
    draw.shuffle(texts)
    yield from ({"text": text} for text in texts)


def _public(module: str) -> list[str]:
    loaded: Any = __import__(module, fromlist=["_"])
    return sorted(
        word for word in getattr(loaded, "__all__", dir(loaded)) if not word.startswith("_") and callable(getattr(loaded, word, None))
    )
