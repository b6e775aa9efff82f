"""Samples are a function of the seed and their number, and an epoch shows every window once."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from trainer.data import Corpus, Dataset, Synthetic, TokenFile, open_dataset
from trainer.data.permutation import key_of, permute
from trainer.shared.corpora.index import FORMAT, TOKENS, CorpusIndex
from trainer.shared.run.schema import DataConfig, ModelConfig

SEQ = 4


def corpus(windows: int, seed: int = 1) -> Corpus:
    """A corpus whose window i is i*SEQ, i*SEQ + 1, ...: a row's first token names its window."""
    return corpus_of(np.arange(windows * SEQ + 1, dtype=np.uint32), seed)


def corpus_of(tokens: NDArray[np.uint32], seed: int = 1) -> Corpus:
    with tempfile.TemporaryDirectory() as folder:  # the open file outlives it
        tokens.tofile(Path(folder) / TOKENS)
        index = CorpusIndex(FORMAT, "uint32", len(tokens), 1, len(tokens), 0, "its digest", "of a sample", {})
        return Corpus(TokenFile(DataConfig(path=folder), index), SEQ, seed)


def synthetic(seed: int = 1) -> Synthetic:
    return Synthetic(97, SEQ, seed)


@given(st.integers(1, 3000), st.integers(0, 2**64 - 1))
def test_the_keyed_permutation_is_one_at_any_size(n: int, seed: int) -> None:
    assert sorted(permute(np.arange(n), n, key_of(seed))) == list(range(n))


@given(st.integers(2, 2**40), st.integers(0, 2**62), st.integers(0, 99))
def test_the_permutation_needs_no_memory_of_its_size(n: int, position: int, seed: int) -> None:
    (place,) = permute(np.array([position % n]), n, key_of(seed))
    assert 0 <= place < n


@pytest.mark.parametrize("dataset", [corpus(50), synthetic()])
@given(first=st.integers(0, 120), cut=st.integers(0, 3))
def test_samples_do_not_depend_on_how_they_are_cut_over_ranks_and_steps(dataset: Dataset, first: int, cut: int) -> None:
    whole = dataset.batch(first, 3)
    parts = np.concatenate([dataset.batch(first, cut), dataset.batch(first + cut, 3 - cut)])
    assert whole.shape == (3, SEQ + 1) and whole.dtype == np.int64
    assert (whole == parts).all()


@pytest.mark.parametrize("make", [lambda seed: corpus(500, seed), synthetic])
def test_the_seed_decides_and_samples_differ(make: object) -> None:
    one, again, other = make(1), make(1), make(2)  # type: ignore[operator]
    assert (one.batch(21, 3) == again.batch(21, 3)).all()
    assert (one.batch(21, 3) != other.batch(21, 3)).any()
    assert (one.batch(21, 3) != one.batch(24, 3)).any()


@given(st.integers(1, 40), st.integers(0, 5), st.integers(1, 9))
def test_an_epoch_shows_every_window_once_whatever_the_batch(windows: int, epoch: int, global_batch: int) -> None:
    data = corpus(windows)
    firsts = range(0, windows * (epoch + 1), global_batch)
    seen = np.concatenate([data.batch(first, global_batch) for first in firsts])[:, 0] // SEQ
    assert sorted(seen[epoch * windows : (epoch + 1) * windows]) == list(range(windows))


def test_epochs_differ_in_order() -> None:
    rows = corpus(100)
    assert (rows.batch(0, 100) != rows.batch(100, 100)).any()


def test_targets_continue_inputs_over_the_windows_end() -> None:
    rows = corpus(20).batch(0, 3)
    assert (np.diff(rows) == 1).all()


@pytest.mark.parametrize(("tokens", "windows"), [(SEQ + 1, 1), (2 * SEQ, 1), (2 * SEQ + 1, 2)])
def test_a_window_needs_the_token_after_it(tokens: int, windows: int) -> None:
    data = corpus_of(np.arange(tokens, dtype=np.uint32))
    assert data.windows == windows
    assert sorted(data.batch(0, windows)[:, 0]) == [i * SEQ for i in range(windows)]


def test_synthetic_tokens_cover_the_vocabulary_evenly() -> None:
    tokens = Synthetic(16, 255, seed=5).batch(0, 64)
    counts = np.bincount(tokens.ravel(), minlength=16)
    assert len(counts) == 16 and counts.min() > 0.8 * counts.mean()


def test_synthetic_data_needs_no_folder() -> None:
    dataset = open_dataset(DataConfig(kind="synthetic", path="nowhere"), ModelConfig(vocab=11, seq=8), seed=3)
    assert dataset.batch(0, 2).max() < 11
