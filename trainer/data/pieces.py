"""Shorter sequences of a dataset: those of a phase of a run."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trainer.data.dataset import Dataset


class SequencePieces:
    """Cuts every sample of ``dataset`` in ``count`` sequences, which follow each other in the order of the text."""

    def __init__(self, dataset: Dataset, count: int):
        self.dataset, self.count, self.name = dataset, count, dataset.name

    def batch(self, first: int, count: int) -> NDArray[np.int64]:
        """Pieces ``first`` to ``first + count``, shape [count, seq / pieces + 1]; the last token of one is the first of the next."""
        start, stop = first // self.count, -(-(first + count) // self.count)
        rows = self.dataset.batch(start, stop - start)
        width = (rows.shape[1] - 1) // self.count
        pieces = np.lib.stride_tricks.sliding_window_view(rows, width + 1, axis=1)[:, ::width].reshape(-1, width + 1)
        return pieces[first - start * self.count :][:count]

    def check(self) -> None:
        self.dataset.check()
