"""Span corruption (Raffel et al. 2020, section 3.1.4): an encoder reads a text with holes, and a decoder writes the
missing spans.

Which spans are masked is a function of the seed and the sample's number alone, as its text is. A row holds the tokens that are read, then
those that are written behind the one that begins them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trainer.data.permutation import key_of, permute
from trainer.shared.corpora.index import TOKENIZER, CorpusIndex, words_of
from trainer.shared.records.named_tokens import decoder_start
from trainer.shared.run.schema import DataConfig
from trainer.shared.run.spans import SENTINEL, SENTINELS, masked


class SpanCorruption:
    """Makes rows of ``read`` + ``written`` + 1 tokens of windows of ``raw_tokens(read)``; behind the last target, complements."""

    def __init__(self, data: DataConfig, index: CorpusIndex, read: int, written: int, seed: int) -> None:
        self.read, self.written, self.seed, self.end = read, written, seed, index.end_token
        self.begin = begin_token(Path(data.path), self.end)
        self.sentinels = np.array(sentinels(Path(data.path), index.vocab), dtype=np.int64)

    def rows(self, texts: NDArray[np.int64], first: int) -> NDArray[np.int64]:
        """Returns the rows of samples ``first``, ``first`` + 1, ..., whose windows ``texts`` are, each with the token behind it."""
        rows = [self.corrupted(text[:-1], first + number) for number, text in enumerate(texts)]
        return np.stack(rows) if rows else np.empty((0, self.read + self.written + 1), dtype=np.int64)

    def corrupted(self, text: NDArray[np.int64], number: int) -> NDArray[np.int64]:
        """Returns the row of sample ``number``."""
        noise, spans = masked(len(text))
        kept, lost = (segments(n, spans, key_of(self.seed, number, part)) for part, n in enumerate((len(text) - noise, noise)))
        edges = np.cumsum(np.stack((kept, lost), 1).ravel())  # each part that is kept and the span behind it
        pieces = np.split(text, edges[:-1])
        read = [token for piece, sentinel in zip(pieces[::2], self.sentinels) for token in (*piece, sentinel)]
        written = [token for piece, sentinel in zip(pieces[1::2], self.sentinels) for token in (sentinel, *piece)]
        return np.array([*read, self.end, ~self.begin, *padded([*written, self.end], self.written, ~self.end)], dtype=np.int64)


def segments(tokens: int, count: int, key: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Returns the lengths, 1 or more, of ``count`` random segments of so many tokens; each way to cut them is as likely."""
    cuts = np.sort(permute(np.arange(count - 1), tokens - 1, key)) + 1 if count > 1 else np.array([], dtype=np.int64)
    return np.diff(np.concatenate(([0], cuts, [tokens])))


def padded(tokens: list[int], length: int, filler: int) -> list[int]:
    """Returns ``tokens``, cut or filled up to ``length``."""
    return [*tokens[:length], *[filler] * (length - len(tokens))]


def sentinels(folder: Path, vocab: int) -> list[int]:
    """Returns the numbers of the sentinels, in order: those of the tokenizer in ``folder``, or those behind its ``vocab`` words, the
    last of them first."""
    known = words_of(folder / TOKENIZER) or {}
    own = [known.get(SENTINEL.format(number)) for number in range(SENTINELS)]
    return [vocab + SENTINELS - 1 - i if number is None else number for i, number in enumerate(own)]


def begin_token(folder: Path, end: int) -> int:
    """Returns the token that a decoder begins with: the one that files next to the tokenizer name, or else the end token."""
    named = decoder_start([folder])
    return end if named is None else named
