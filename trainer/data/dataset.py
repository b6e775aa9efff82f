"""What the train loop reads: rows of tokens by (step, row), from a prepared corpus or made up.

There is no sampler state: row r of step s is sample ``s * global_batch + r``, and a sample is a function of the seed and its
number. So any rank under any layout can read its rows, and a resumed run needs no data position but the step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from trainer.config import ConfigError, DataConfig, ModelConfig
from trainer.config.corpus import TOKENS, check_corpus
from trainer.data.permutation import key_of, mix, permute


class Dataset(Protocol):
    """Rows of ``seq + 1`` token ids: inputs are all but the last, targets all but the first."""

    def batch(self, step: int, start: int, count: int) -> NDArray[np.int64]:
        """Rows ``start`` to ``start + count`` of ``step``'s global batch, shape [count, seq + 1]."""
        ...


def open_dataset(data: DataConfig, model: ModelConfig, seed: int, global_batch: int) -> Dataset:
    """The dataset of a run; ``global_batch`` rows make a step. ``ConfigError`` as ``check_corpus``, or if it cannot be mapped."""
    index = check_corpus(data, model)
    if index is None:
        return Synthetic(model.vocab, model.seq, seed, global_batch)
    path = Path(data.path) / TOKENS
    try:
        tokens = np.memmap(path, dtype=index.dtype, mode="r")
    except OSError as error:
        raise ConfigError(f"data.path={data.path}: cannot read {TOKENS}: {error}; check its permissions") from None
    return Corpus(tokens, model.seq, seed, global_batch)


class Synthetic:
    """Uniformly random tokens: for runs that only measure speed. The best possible loss is ln(vocab)."""

    def __init__(self, vocab: int, seq: int, seed: int, global_batch: int) -> None:
        self.vocab, self.seq, self.seed, self.global_batch = vocab, seq, seed, global_batch

    def batch(self, step: int, start: int, count: int) -> NDArray[np.int64]:
        samples = step * self.global_batch + np.arange(start, start + count, dtype=np.uint64)
        rows = mix(samples ^ key_of(self.seed))
        tokens = mix(rows[:, None] ^ np.arange(self.seq + 1, dtype=np.uint64))
        return (tokens % np.uint64(self.vocab)).astype(np.int64)


class Corpus:
    """A token file cut in windows of ``seq`` tokens (each with the token after it), every window once per epoch.

    Windows cross document borders, which the end token marks. Each epoch has its own order, keyed by (seed, epoch).
    """

    def __init__(self, tokens: NDArray[np.unsignedinteger], seq: int, seed: int, global_batch: int) -> None:
        self.tokens, self.seq, self.seed, self.global_batch = tokens, seq, seed, global_batch
        self.windows = (len(tokens) - 1) // seq

    def batch(self, step: int, start: int, count: int) -> NDArray[np.int64]:
        samples = step * self.global_batch + np.arange(start, start + count, dtype=np.int64)
        starts = self._window_of(samples) * self.seq
        return self.tokens[starts[:, None] + np.arange(self.seq + 1)].astype(np.int64)

    def _window_of(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """The window of each sample; a batch may span epochs."""
        epochs, positions = np.divmod(samples, self.windows)
        windows = np.empty_like(samples)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            windows[chosen] = permute(positions[chosen], self.windows, key_of(self.seed, int(epoch)))
        return windows
