"""Examples to tune on: a JSONL file, and a template that makes text of a line's fields. No torch, no tokenizer, so the launcher checks them
before anything is submitted."""

from __future__ import annotations

import hashlib
import json
import math
import string
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trainer.shared.corpora.questions import questions
from trainer.shared.corpora.sources import STDLIB
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.keys import MOST
from trainer.shared.run.read import SURROGATE
from trainer.shared.run.schema import DataConfig, TuneConfig
from trainer.shared.run.tuning import PROMPTS

Part = tuple[str | None, str]
"""A piece of a template: the field that it holds, and its text."""


def read_content(data: DataConfig) -> bytes:
    """Reads the examples, a JSON object in each line. Raises ``ConfigError`` if they cannot be read."""
    if data.source == STDLIB:
        return questions()
    try:
        return Path(data.source).read_bytes()
    except OSError as error:
        raise ConfigError(f"data.source={data.source} cannot be read: {error.strerror}; give a JSONL file of examples") from None


def parse_examples(content: bytes, data: DataConfig) -> Iterator[tuple[list[Part], str, int]]:
    """Yields each line as the pieces of its text, the last of which is the answer, its place, and its task. Raises ``ConfigError`` for a
    line that is not an example."""
    lines = [(number, line) for number, line in enumerate(content.splitlines(), start=1) if line.strip()]
    if not lines:
        raise ConfigError(f"data.source={data.source} holds no example; give a JSONL file with an object in each line")
    template = template_parts(data)
    for number, line in lines:
        where = f"{data.source} line {number}"
        try:
            record: Any = json.loads(line)
        except (ValueError, RecursionError):
            raise ConfigError(f"{where} is not valid JSON; fix or remove that line") from None
        if not isinstance(record, dict):
            raise ConfigError(f"{where} is not a JSON object; each line must be one")
        yield (
            list(_parts(template, {name: value for name, value in record.items() if isinstance(value, str)}, where)),
            where,
            _task(record, data, where),
        )


def _task(record: dict[str, Any], data: DataConfig, where: str) -> int:
    number = 0 if data.task is None else record.get(data.task)
    if type(number) is not int or not 0 <= number <= MOST:
        raise ConfigError(f"{where} has no number of a task in field '{data.task}' that data.task names; use 0, 1, ...")
    return number


def _parts(template: list[tuple[str, str | None]], fields: dict[str, str], where: str) -> Iterator[Part]:
    """Yields the template with an example's fields; the answer comes last."""
    for text, name in template:
        if text:
            yield None, text
        if name is None:
            continue
        if name not in fields:
            there = ", ".join(fields) or "none"
            raise ConfigError(f"{where} has no text in field '{name}' of data.template (fields with text: {there}); fix one of them")
        if SURROGATE.search(fields[name]):
            raise ConfigError(f"{where} has half a character in field '{name}' (a surrogate alone); fix or remove that line")
        yield name, fields[name]


def template_parts(data: DataConfig) -> list[tuple[str, str | None]]:
    """Returns the pieces of ``data.template``: text, and the field behind it. Raises ``ConfigError`` unless it ends with the answer."""
    try:
        found = list(string.Formatter().parse(data.template))
    except ValueError as error:
        raise ConfigError(f"data.template={data.template!r} cannot be read: {error}; write fields as {{name}}") from None
    if odd := [name for _, name, form, conversion in found if form or conversion]:
        raise ConfigError(
            f"data.template={data.template!r} asks for a form of field '{odd[0]}', and texts are taken as they are; write {{{odd[0]}}}"
        )
    parts = [(text, name) for text, name, _, _ in found]
    names = [name for _, name in parts if name is not None]
    if names.count(data.answer) != 1 or parts[-1][1] != data.answer:
        raise ConfigError(f"data.template={data.template!r} does not end with {{{data.answer}}}, the field that data.answer names")
    if data.truncate is not None and data.truncate not in names[:-1]:
        raise ConfigError(
            f"data.truncate={data.truncate} is not a field of data.template={data.template!r} before the answer; name one, or null"
        )
    return parts


def check_examples(data: DataConfig, tune: TuneConfig | None = None) -> str:
    """Returns the digest of all examples. Raises ``ConfigError`` for a line that is not an example, or a task that ``tune`` trains without
    any."""
    content = read_content(data)
    tasks = [task for _, _, task in parse_examples(content, data)]
    trained = split(len(tasks), data)
    if tune is not None:
        _check_tasks(tasks, trained, data, tune)
    return hashlib.sha256(content).hexdigest()


def _check_tasks(tasks: Sequence[int], trained: int, data: DataConfig, tune: TuneConfig) -> None:
    """Raises ``ConfigError`` if an example's task is out of range, or a task has no example among the first ``trained``."""
    if data.task is None or tune.method not in PROMPTS:
        return
    asked = f"data.source={data.source}: tune.tasks={tune.tasks}"
    if max(tasks) >= tune.tasks:
        raise ConfigError(f"{asked}, but field '{data.task}' of an example is {max(tasks)}; raise tune.tasks, or number tasks from 0")
    if missing := set(range(tune.tasks)) - set(tasks[:trained]):
        raise ConfigError(
            f"{asked}, but no example that is trained on is of task {min(missing)} (field '{data.task}'); add some, or number fewer tasks "
            "from 0"
        )


def split(count: int, data: DataConfig) -> int:
    """Returns how many of ``count`` examples are trained on; the rest is held out. Raises ``ConfigError`` if none is left."""
    held_out = math.ceil(count * data.held_out)
    if held_out >= count:
        raise ConfigError(
            f"data.held_out={data.held_out:g} leaves nothing to train on of the {count} examples in data.source={data.source}; use less"
        )
    return count - held_out
