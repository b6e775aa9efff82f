"""Provides samples, which are rows of tokens, from a prepared corpus or synthetic.

There is no sampler state: a sample is a function of the seed and its number, and a run takes samples in the order of their numbers. So any
rank under any layout can read its rows, and a resumed run needs only the number of consumed samples, whatever the size of its batches.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from trainer.data.instructions import HeldOutExamples, Instructions
from trainer.data.permutation import key_of, mix, permute
from trainer.data.spans import SpanCorruption
from trainer.data.text import bytes_of_words
from trainer.shared.corpora.index import (
    TOKENIZER,
    TOKENS,
    CorpusIndex,
    check_corpus,
    check_sample,
    corpus_name,
    prepare_command,
    windows,
)
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.schema import DataConfig, ModelConfig
from trainer.shared.run.spans import text_seq, written_of


class Dataset(Protocol):
    """Rows of ``seq + 1`` token ids: inputs all but the last, targets all but the first; without a target, ``~id``. Of an encoder and its
    decoder: the tokens that are read, and such a row of those that are written."""

    name: str
    """Identity of the data: the digest of a corpus, or ``synthetic``. With the seed it decides every sample."""

    def batch(self, first: int, count: int) -> NDArray[np.int64]:
        """Samples ``first`` to ``first + count``, shape [count, seq + 1]. ``ConfigError`` for a file that is damaged or cut."""
        ...

    def check(self) -> None:
        """Compares files with the prepared digests, reading 16 MiB at most. Raises ``ConfigError`` if they differ."""
        ...


def open_dataset(data: DataConfig, model: ModelConfig, seed: int) -> Dataset:
    """The dataset of a run. ``ConfigError`` as ``check_corpus``, or if it cannot be read."""
    if data.kind == "instructions":
        return Instructions(data, model.seq, model.vocab, seed, written_of(model))
    index, pairs = check_corpus(data, model), written_of(model)
    if index is None:
        return Synthetic(model.vocab, model.seq + (pairs or 0), seed)
    spans = None if pairs is None else SpanCorruption(data, index, model.seq, pairs, seed)
    return Corpus(TokenFile(data, index), text_seq(model), seed, spans)


def open_held_out(data: DataConfig, model: ModelConfig) -> HeldOut | HeldOutExamples:
    """Returns the evaluated part of a corpus or examples. Raises ``ConfigError`` as ``check_corpus``, and for synthetic data."""
    if data.kind == "instructions":
        return HeldOutExamples(data, model.seq, model.vocab, written_of(model))
    index, pairs = check_corpus(data, model), written_of(model)
    if index is None:
        raise ConfigError(f"data.kind={data.kind} has nothing to evaluate on; name a prepared corpus with data.path")
    spans = None if pairs is None else SpanCorruption(data, index, model.seq, pairs, seed=0)
    return HeldOut(TokenFile(data, index), text_seq(model), spans)


class Synthetic:
    """Uniformly random tokens: for runs that only measure speed. The best possible loss is ln(vocab)."""

    name = "synthetic"

    def __init__(self, vocab: int, seq: int, seed: int) -> None:
        self.vocab, self.seq, self.seed = vocab, seq, seed

    def batch(self, first: int, count: int) -> NDArray[np.int64]:
        rows = mix(np.arange(first, first + count, dtype=np.uint64) ^ key_of(self.seed))
        tokens = mix(rows[:, None] ^ np.arange(self.seq + 1, dtype=np.uint64))
        return (tokens % np.uint64(self.vocab)).astype(np.int64)

    def check(self) -> None:
        """Nothing is read."""


class TokenFile:
    """Reads token ids of a prepared corpus piece by piece: a memory map would kill the process if the file was truncated."""

    def __init__(self, data: DataConfig, index: CorpusIndex) -> None:
        self.data, self.index, self.dtype = data, index, np.dtype(index.dtype)
        try:
            self.file = (Path(data.path) / TOKENS).open("rb", buffering=0)
        except OSError as error:
            raise ConfigError(f"data.path={data.path}: cannot read {TOKENS}: {error.strerror}; check its permissions") from None

    def read(self, start: int, count: int) -> NDArray[np.int64]:
        """``count`` tokens from position ``start`` on. ``ConfigError`` if the file ends before, or one is outside of the vocabulary."""
        size = count * self.dtype.itemsize
        content = os.pread(self.file.fileno(), size, start * self.dtype.itemsize)
        where, remedy = f"data.path={self.data.path}: {TOKENS}", f"run `{prepare_command(self.data)} --force`"
        if len(content) < size:
            now = os.fstat(self.file.fileno()).st_size
            raise ConfigError(f"{where} has been cut to {now} bytes, but {self.index.token_bytes} were written; {remedy}")
        tokens = np.frombuffer(content, self.dtype).astype(np.int64)
        worst = int(tokens.argmax())
        if tokens[worst] >= self.index.vocab:
            raise ConfigError(
                f"{where} has token {tokens[worst]} at position {start + worst}, "
                f"outside of the tokenizer's vocabulary of {self.index.vocab}; "
                f"the file is damaged: {remedy}"
            )
        return tokens


class HeldOut:
    """The windows at the end of a corpus that training leaves out, in the order of the text, with ``spans`` masked; all windows where none
    are left out."""

    def __init__(self, tokens: TokenFile, seq: int, spans: SpanCorruption | None = None) -> None:
        self.tokens, self.seq, self.spans = tokens, seq, spans
        trained, held_out = windows(tokens.index, seq, tokens.data)
        self.first, self.windows = (trained, held_out) if held_out else (0, trained)
        self.sha256 = tokens.index.sha256
        self.name = corpus_name(self.sha256, tokens.data.held_out)

    def batch(self, first: int, count: int) -> NDArray[np.int64]:
        starts = range(self.first + first, self.first + first + count)
        rows = np.stack([self.tokens.read(start * self.seq, self.seq + 1) for start in starts])
        return rows if self.spans is None else self.spans.rows(rows, first)

    def check(self) -> None:
        check_sample(self.tokens.data, self.tokens.index)

    def token_bytes(self) -> NDArray[np.int64]:
        """UTF-8 bytes of each token, by its id; 0 for the end token, and for all where only spans are written."""
        if self.spans is not None:
            return np.zeros(max(self.tokens.index.vocab, self.spans.sentinels.max() + 1), dtype=np.int64)
        return bytes_of_words(Path(self.tokens.data.path) / TOKENIZER, self.tokens.index.end_token)


class Corpus:
    """Cuts a token file in windows of ``seq`` tokens and their successors, across document borders; each epoch takes every window once, in
    an order keyed by (seed, epoch). ``spans`` of them may be masked."""

    def __init__(self, tokens: TokenFile, seq: int, seed: int, spans: SpanCorruption | None = None) -> None:
        self.tokens, self.seq, self.seed, self.spans = tokens, seq, seed, spans
        self.windows, _ = windows(tokens.index, seq, tokens.data)
        self.name = corpus_name(tokens.index.sha256, tokens.data.held_out)

    def batch(self, first: int, count: int) -> NDArray[np.int64]:
        starts = self._window_of(np.arange(first, first + count, dtype=np.int64)) * self.seq
        rows = [self.tokens.read(int(start), self.seq + 1) for start in starts]
        found = np.stack(rows) if rows else np.empty((0, self.seq + 1), dtype=np.int64)
        return found if self.spans is None else self.spans.rows(found, first)

    def check(self) -> None:
        check_sample(self.tokens.data, self.tokens.index)

    def _window_of(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """The window of each sample; a batch may span epochs."""
        epochs, positions = np.divmod(samples, self.windows)
        windows = np.empty_like(samples)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            windows[chosen] = permute(positions[chosen], self.windows, key_of(self.seed, int(epoch)))
        return windows
