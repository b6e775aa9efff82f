"""A token file that is not what was prepared is refused by name, at the start or when the damage is met, and never trained on."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.farm import Farm
from tests.small_runs import small
from trainer.data import open_dataset
from trainer.data.prepare import prepare
from trainer.shared.corpora import index as corpus_files
from trainer.shared.corpora.index import SAMPLE_BLOCKS, TOKENS, sample_digest
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.schema import DataConfig, ModelConfig

pytestmark = pytest.mark.slow

VOCAB, BLOCK = 300, 256


@pytest.fixture
def corpus(tmp_path: Path) -> DataConfig:
    (tmp_path / "text.txt").write_text("a sentence like any other, or nearly so\n" * 400)
    data = DataConfig(source=str(tmp_path / "text.txt"), path=str(tmp_path / "out"), vocab=VOCAB)
    prepare(data)
    return data


def overwrite(data: DataConfig, position: int, token: int) -> None:
    tokens = np.memmap(Path(data.path) / TOKENS, dtype=np.uint16, mode="r+")
    tokens[position] = token
    tokens.flush()


def run(data: DataConfig, steps: int = 3) -> dict[str, Any]:
    return small(steps=steps, model={"vocab": VOCAB}, data=2) | {"data": vars(data)}


def test_content_that_differs_from_what_was_prepared_is_refused_at_the_start_on_every_rank(farm: Farm, corpus: DataConfig) -> None:
    assert farm.train(run(corpus), 2).checked().result["status"] == "done"
    overwrite(corpus, 7, 11)
    refused = farm.train(run(corpus), 2)
    assert set(refused.codes.values()) == {2} and refused.result["reason"] == "configuration"
    for rank in (0, 1):
        assert "tokens.bin is not the prepared file (its checksum differs" in refused.failure(rank)["message"]
        assert "--force`" in refused.failure(rank)["message"]
    assert not prepare(corpus).reused, "and is not taken for prepared"


def test_a_token_outside_of_the_vocabulary_is_named_with_its_position(corpus: DataConfig) -> None:
    dataset = open_dataset(corpus, ModelConfig(vocab=VOCAB, seq=8), seed=1)
    dataset.batch(0, 1000)
    overwrite(corpus, 21, 60_000)
    with pytest.raises(
        ConfigError, match=r"tokens.bin has token 60000 at position 21, outside of the tokenizer's vocabulary of \d+; .*--force"
    ):
        dataset.batch(0, 1000)


def test_a_file_that_is_cut_while_it_is_trained_on_ends_the_run_plainly_and_for_good(farm: Farm, corpus: DataConfig) -> None:
    out = farm.folder()
    farm.write(out / "config.yaml", run(corpus, steps=100_000))
    started = farm.start(out / "config.yaml", 2, out)
    while not (out / "metrics.jsonl").exists():
        time.sleep(0.02)
    os.truncate(Path(corpus.path) / TOKENS, 100)
    ended = farm.wait(started)
    assert 2 in ended.codes.values() and -7 not in ended.codes.values()
    assert ended.result["reason"] == "configuration"
    assert "tokens.bin has been cut to 100 bytes" in ended.result["message"]
    assert "error: data.path=" in ended.logs


@pytest.mark.parametrize("blocks", [0, 1, 2, SAMPLE_BLOCKS, 3 * SAMPLE_BLOCKS + 1])
def test_the_sampled_checksum_sees_the_size_and_both_ends_and_all_of_a_small_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocks: int
) -> None:
    monkeypatch.setattr(corpus_files, "SAMPLE_BLOCK_BYTES", BLOCK)  # as many blocks, of fewer bytes
    path = tmp_path / "file"
    size = max(0, blocks * BLOCK - 5)
    path.write_bytes(bytes(size))
    digests = [sample_digest(path)]
    small_enough = range(0, size, BLOCK) if blocks <= SAMPLE_BLOCKS else ()
    for position in {0, max(0, size - 1), *small_enough} if size else ():
        with path.open("r+b") as file:
            file.seek(position)
            file.write(b"x")
        digests.append(sample_digest(path))
    os.truncate(path, size + 1)
    digests.append(sample_digest(path))
    assert len(set(digests)) == len(digests)
