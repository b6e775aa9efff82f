"""Examples to tune on: a JSONL file, a template, and answers, which alone are learnt (``trainer.shared.corpora.examples`` reads them).

A row is one example: prompt (as it is read where an answer is generated), answer, end token, padding; or several of them (``data.pack``).
A position without a target holds the complement of its token (``trainer.data.dataset``), so the loss is that of answers and of the end
token behind them, over their number in the whole batch.
"""

from __future__ import annotations

import bisect
import hashlib
import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trainer.data.permutation import key_of, permute
from trainer.data.spans import begin_token, padded
from trainer.data.text import TextTokens, bytes_of_words
from trainer.shared.corpora.examples import Part, parse_examples, read_content, split
from trainer.shared.corpora.index import TOKENIZER, corpus_name
from trainer.shared.records.named_tokens import GENERATION
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.schema import DataConfig


class Examples:
    """All examples of ``data.source`` as rows of tokens, of which the first ``trained`` are trained on. An encoder reads prompts of up to
    ``seq`` tokens, and its decoder writes answers of up to ``written``; else (None) both are one sequence."""

    def __init__(self, data: DataConfig, seq: int, vocab: int, written: int | None = None) -> None:
        self.data, self.seq, self.written = data, seq, written
        self.text = TextTokens(Path(data.path) / TOKENIZER, vocab)
        self.end = self._end()
        content = read_content(data)
        words = json.dumps(
            [data.template, data.answer, data.truncate, seq]
            + ["packed"] * data.pack
            + ([] if data.task is None else ["task", data.task])
            + ([self.text.begin, self.end] if self.text.begin or self.text.named else [])
            + ([] if written is None else ["written", written])
        )
        self.sha256 = hashlib.sha256(content + words.encode()).hexdigest()
        self.name = corpus_name(self.sha256, data.held_out)
        parsed = list(parse_examples(content, data))
        self.examples = [(self._spelt if written is None else self._pair)(parts, where) for parts, where, _ in parsed]
        self.tasks = np.array([task for _, _, task in parsed], dtype=np.int64)
        self.trained = split(len(self.examples), data)

    def check(self) -> None:
        """All was read when it was opened."""

    def token_bytes(self) -> NDArray[np.int64]:
        """UTF-8 bytes of each token, by its id; 0 for the end token."""
        return bytes_of_words(Path(self.data.path) / TOKENIZER, self.end)

    def _rows(self, examples: list[list[int]], tasks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Each in a row of ``seq + 1`` tokens, behind its task if there are several."""
        width = self.seq + 1 + (self.written or 0)
        rows = np.array([padded(example, width, ~self.end) for example in examples], dtype=np.int64)
        return rows if self.data.task is None else np.concatenate([~tasks[:, None], rows], axis=1)

    def _spelt(self, parts: list[Part], where: str) -> list[int]:
        """Returns one example in up to ``seq + 1`` tokens: ``data.truncate`` gives way first, then the answer. A fitting prompt is encoded
        whole."""
        answer = [*self.text.plain(parts[-1][1]), self.end]
        before = self.text.begun("".join(text for _, text in parts[:-1]))
        if len(before) + len(answer) > self.seq + 1 and self.data.truncate is not None:
            before = self._cut(parts[:-1], self.seq + 1 - len(answer))
        after = answer[: self.seq + 1 - len(before)]
        if not before:
            raise ConfigError(
                f"{where}: nothing is left to stand before the answer of {len(answer)} tokens, and its first one is learnt from what does; "
                "put text before it in data.template, or take that line out"
            )
        if not after:
            raise ConfigError(
                f"{where}: of the answer nothing is left behind a prompt of {len(before)} tokens in the {self.seq} that model.seq leaves "
                "for text; name a field that may be cut in data.truncate, raise model.seq, or take that line out"
            )
        return [~token for token in before] + after

    def _pair(self, parts: list[Part], where: str) -> list[int]:
        """Returns one example in ``seq`` tokens to read and ``written`` + 1 to write, each part with its end token; an answer is cut at its
        end, a prompt where ``data.truncate`` says so."""
        assert self.written is not None
        before = self.text.begun("".join(text for _, text in parts[:-1]))
        if len(before) >= self.seq and self.data.truncate is not None:
            before = self._cut(parts[:-1], self.seq - 1)
        if not 0 < len(before) < self.seq:
            raise ConfigError(
                f"{where}: a prompt of {len(before)} tokens and its end token do not fit the {self.seq} of model.seq that an encoder "
                "reads; name a field that may be cut in data.truncate, raise model.seq, or take that line out"
            )
        answer = padded([*self.text.plain(parts[-1][1]), self.end], self.written, ~self.end)
        return [*padded([*before, self.end], self.seq, ~self.end), ~begin_token(Path(self.data.path), self.end), *answer]

    def _cut(self, prompt: list[Part], room: int) -> list[int]:
        """``prompt`` in ``room`` tokens, if the field that gives way has as many as are too many."""
        spelt, begin = [(name, self.text.plain(text)) for name, text in prompt], self.text.begin
        if [token for _, tokens in spelt[:1] for token in tokens[: len(begin)]] != begin:
            spelt.insert(0, (None, begin))
        over, before = sum(len(tokens) for _, tokens in spelt) - room, list[int]()
        for name, tokens in spelt:
            cut = min(max(over, 0), len(tokens)) if name == self.data.truncate else 0
            over -= cut
            before += tokens[: len(tokens) - cut]
        return before

    def _end(self) -> int:
        if not self.text.ends:
            raise ConfigError(
                f"data.path={self.data.path}: no file there says which of its special tokens ends an answer; put a {GENERATION} with "
                "eos_token_id next to the tokenizer"
            )
        return self.text.ends[0]


class Instructions(Examples):
    """Samples the trained rows, once per epoch, in an order keyed by (seed, epoch) for each task; tasks take turns."""

    def __init__(self, data: DataConfig, seq: int, vocab: int, seed: int, written: int | None = None) -> None:
        super().__init__(data, seq, vocab, written)
        self.seed = seed
        trained, tasks = self.examples[: self.trained], self.tasks[: self.trained]
        self.rows = self._rows(packed(trained, seq + 1) if data.pack else trained, tasks)
        tasks = tasks[: len(self.rows)]
        self.turns = [np.flatnonzero(tasks == task) for task in np.unique(tasks)]

    def batch(self, first: int, count: int) -> NDArray[np.int64]:
        """Rows ``first`` to ``first + count``, shape [count, seq + 1]."""
        numbers = np.arange(first, first + count, dtype=np.int64)
        chosen = np.empty_like(numbers)
        for turn, members in enumerate(self.turns):
            own = numbers % len(self.turns) == turn
            chosen[own] = members[self._ordered(numbers[own] // len(self.turns), len(members))]
        return self.rows[chosen]

    def _ordered(self, numbers: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        """Maps the numbers of samples to ``count`` rows."""
        epochs, positions = np.divmod(numbers, count)
        for epoch in np.unique(epochs):
            own = epochs == epoch
            positions[own] = permute(positions[own], count, key_of(self.seed, int(epoch)))
        return positions


class HeldOutExamples(Examples):
    """The examples that are held out, in their order, each in a row; all where none are."""

    def __init__(self, data: DataConfig, seq: int, vocab: int, written: int | None = None) -> None:
        super().__init__(data, seq, vocab, written)
        first = self.trained if data.held_out else 0
        self.rows = self._rows(self.examples[first:], self.tasks[first:])

    @property
    def windows(self) -> int:
        return len(self.rows)

    def batch(self, first: int, count: int) -> NDArray[np.int64]:
        return self.rows[first : first + count]


def packed(examples: list[list[int]], room: int) -> list[list[int]]:
    """Rows of up to ``room`` tokens that hold all ``examples``: each goes where the least room is left behind it."""
    rows: list[list[int]] = []
    left: list[tuple[int, int]] = []  # room and number of each row, sorted
    for example in examples:
        found = bisect.bisect_left(left, (len(example), -1))
        space, number = left.pop(found) if found < len(left) else (room, len(rows))
        if number == len(rows):
            rows.append([])
        rows[number] += example
        bisect.insort(left, (space - len(example), number))
    return rows
