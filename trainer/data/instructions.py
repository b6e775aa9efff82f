"""Examples to tune on: a JSONL file, a template, and answers, which alone are learnt.

A row is one example: prompt, answer, end token, padding. What is no target is given as its complement (``trainer.data.dataset``), so the
loss is that of answers and of the end token behind them, over their number in the whole batch.
"""

from __future__ import annotations

import hashlib
import json
import string
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from trainer.data.permutation import key_of, permute
from trainer.spec import ConfigError, DataConfig
from trainer.spec.corpus import TOKENIZER

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Part = tuple[str | None, str]
"""A piece of a template: the field that it holds, and its text."""


class Instructions:
    """The examples of ``data.source``, every one once per epoch, in an order keyed by (seed, epoch)."""

    def __init__(self, data: DataConfig, seq: int, vocab: int, seed: int) -> None:
        self.data, self.seq, self.seed = data, seq, seed
        self.tokenizer, self.end = _tokenizer(data, vocab)
        content = _content(data)
        words = json.dumps([data.template, data.answer, data.truncate, seq])
        self.name = hashlib.sha256(content + words.encode()).hexdigest()
        self.rows = np.stack([self._row(fields, where) for fields, where in _examples(content, data)])

    def batch(self, first: int, count: int) -> NDArray[np.int64]:
        """Examples ``first`` to ``first + count``, shape [count, seq + 1]."""
        epochs, positions = np.divmod(np.arange(first, first + count, dtype=np.int64), len(self.rows))
        chosen = np.empty_like(positions)
        for epoch in np.unique(epochs):
            own = epochs == epoch
            chosen[own] = permute(positions[own], len(self.rows), key_of(self.seed, int(epoch)))
        return self.rows[chosen]

    def check(self) -> None:
        """All was read when it was opened."""

    def _row(self, fields: dict[str, str], where: str) -> NDArray[np.int64]:
        """One example in ``seq + 1`` tokens: the field ``data.truncate`` gives way first, then the end of the answer."""
        parts = [(name, self._tokens(text)) for name, text in _parts(self.data, fields, where)]
        prompt, answer = parts[:-1], [*parts[-1][1], self.end]
        over = sum(len(tokens) for _, tokens in prompt) + len(answer) - (self.seq + 1)
        before: list[int] = []
        for name, tokens in prompt:
            cut = min(max(over, 0), len(tokens)) if name is not None and name == self.data.truncate else 0
            over -= cut
            before += tokens[: len(tokens) - cut]
        after = answer[: self.seq + 1 - len(before)]
        if not before or not after:
            raise ConfigError(
                f"{where}: of the answer nothing is left in model.seq={self.seq} behind a prompt of {len(before)} tokens; name "
                f"a field that "
                "may be cut in data.truncate, raise model.seq, or take that line out"
            )
        padding = self.seq + 1 - len(before) - len(after)
        return np.array([~token for token in before] + after + [~self.end] * padding, dtype=np.int64)

    def _tokens(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)


def _tokenizer(data: DataConfig, vocab: int) -> tuple[Tokenizer, int]:
    """The tokenizer in ``data.path``, and its end token."""
    from tokenizers import Tokenizer

    path = Path(data.path) / TOKENIZER
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(f"data.path={data.path}: {TOKENIZER} cannot be read: {error}; give the folder of a prepared corpus") from None
    if tokenizer.get_vocab_size() > vocab:
        raise ConfigError(
            f"model.vocab={vocab} is smaller than the {tokenizer.get_vocab_size()} tokens of the tokenizer in data.path={data.path}"
        )
    return tokenizer, min(tokenizer.get_added_tokens_decoder(), default=0)


def _content(data: DataConfig) -> bytes:
    try:
        return Path(data.source).read_bytes()
    except OSError as error:
        raise ConfigError(f"data.source={data.source} cannot be read: {error.strerror}; give a JSONL file of examples") from None


def _examples(content: bytes, data: DataConfig) -> Iterator[tuple[dict[str, str], str]]:
    """Each line's fields, and where they are. ``ConfigError`` if there is none."""
    lines = [(number, line) for number, line in enumerate(content.splitlines(), start=1) if line.strip()]
    if not lines:
        raise ConfigError(f"data.source={data.source} holds no example; give a JSONL file with an object in each line")
    for number, line in lines:
        where = f"{data.source} line {number}"
        try:
            record: Any = json.loads(line)
        except (ValueError, RecursionError):
            raise ConfigError(f"{where} is not valid JSON; fix or remove that line") from None
        if not isinstance(record, dict):
            raise ConfigError(f"{where} is not a JSON object; each line must be one")
        yield {name: value for name, value in record.items() if isinstance(value, str)}, where


def _parts(data: DataConfig, fields: dict[str, str], where: str) -> Iterator[Part]:
    """The template with an example's fields; the answer comes last."""
    for text, name, _, _ in template_parts(data):
        if text:
            yield None, text
        if name is None:
            continue
        if name not in fields:
            there = ", ".join(fields) or "none"
            raise ConfigError(f"{where} has no text in field '{name}' of data.template (fields with text: {there}); fix one of them")
        yield name, fields[name]


def template_parts(data: DataConfig) -> list[tuple[str, str | None, str | None, str | None]]:
    """The pieces of ``data.template``. ``ConfigError`` unless it ends with the answer."""
    try:
        parts = list(string.Formatter().parse(data.template))
    except ValueError as error:
        raise ConfigError(f"data.template={data.template!r} cannot be read: {error}; write fields as {{name}}") from None
    names = [name for _, name, _, _ in parts if name is not None]
    if names.count(data.answer) != 1 or parts[-1][1] != data.answer:
        raise ConfigError(f"data.template={data.template!r} does not end with {{{data.answer}}}, the field that data.answer names")
    return parts
