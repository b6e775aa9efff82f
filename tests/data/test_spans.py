"""Span corruption masks what its paper says, loses nothing, and is a function of seed and sample."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from trainer.data.dataset import open_dataset, open_held_out
from trainer.data.instructions import Instructions
from trainer.data.prepare import prepare
from trainer.data.spans import SpanCorruption, begin_token, sentinels
from trainer.data.text import bytes_of_words
from trainer.shared.corpora.index import read_index
from trainer.shared.records.named_tokens import GENERATION
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.schema import DataConfig, ModelConfig
from trainer.shared.run.spans import SENTINEL, SENTINELS, masked, raw_tokens, written_tokens

VOCAB = 300


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    root = tmp_path_factory.mktemp("spans")
    text = " ".join(f"{number} is {number * 7919 % 1000}" for number in range(2000))
    (root / "text.txt").write_text(text)
    data = DataConfig(source=str(root / "text.txt"), path=str(root / "corpus"), vocab=VOCAB)
    prepare(data)
    return data


def model(seq: int = 64, **keys: Any) -> ModelConfig:
    return ModelConfig(family="t5", vocab=VOCAB + SENTINELS, seq=seq, **keys)


def spans(data: DataConfig, seq: int, seed: int = 1) -> SpanCorruption:
    return SpanCorruption(data, read_index(data), seq, written_tokens(seq), seed)


def restored(row: NDArray[np.int64], read: int, marks: list[int], end: int) -> list[int]:
    """The text of a row: each sentinel that is read stands for the tokens behind it in what is written."""
    written = [int(token) for token in row[read + 1 :] if token >= 0]
    assert written[-1] == end and int(row[read - 1]) == end
    lost: dict[int, list[int]] = {}
    for token in written[:-1]:
        if token in marks:
            lost[token] = []
        else:
            lost[[*lost][-1]].append(token)
    kept = [int(token) for token in row[: read - 1]]
    assert [token for token in kept if token in marks] == [*lost] == marks[: len(lost)]
    return [each for token in kept for each in (lost[token] if token in marks else [token])]


@pytest.mark.parametrize("seq", [3, 4, 5, 17, 64, 512])
def test_what_is_read_and_written_restores_the_text_and_every_token_of_a_row_is_accounted_for(corpus: DataConfig, seq: int) -> None:
    maker, raw = spans(corpus, seq), raw_tokens(seq)
    marks = [int(mark) for mark in maker.sentinels]
    texts = np.random.default_rng(seq).integers(0, VOCAB, (40, raw + 1))
    texts[texts == maker.end] += 1
    rows = maker.rows(texts, 7)
    noise, count = masked(raw)
    assert rows.shape == (40, seq + written_tokens(seq) + 1)
    for row, text in zip(rows, texts):
        assert restored(row, seq, marks, maker.end) == text[:-1].tolist()
        read = seq if raw - noise + count + 1 == seq else raw - noise + count + 1
        assert read == seq and (row[:seq] >= 0).all()
        assert row[seq] == ~maker.begin and (row[seq + 1 :] >= 0).all()
        assert sum(int(token) in marks for token in row[:seq]) == count


def test_fifteen_in_a_hundred_tokens_are_masked_in_spans_of_three(corpus: DataConfig) -> None:
    maker, raw, draws = spans(corpus, 37), raw_tokens(37), 2000
    text, lengths, places = np.full(raw, (maker.end + 1) % VOCAB), list[int](), set[bytes]()
    for number in range(draws):
        row = maker.corrupted(text, number)
        places.add((row[:37] >= VOCAB).tobytes())
        lengths += (np.diff(np.append(np.flatnonzero(row[38:] >= VOCAB), len(row) - 39)) - 1).tolist()
    assert sum(lengths) / (draws * raw) == pytest.approx(0.15, abs=0.005)
    assert float(np.mean(lengths)) == pytest.approx(3, abs=0.1) and min(lengths) == 1 and max(lengths) == 5
    assert len(places) > 20, "each sample has its own"


@pytest.mark.parametrize("kind", ["trained", "held out"])
def test_rows_are_the_same_however_they_are_read(corpus: DataConfig, kind: str) -> None:
    data = DataConfig(**(vars(corpus) | {"held_out": 0.2}))
    opened: Any = open_dataset(data, model(), seed=3) if kind == "trained" else open_held_out(data, model())
    whole = opened.batch(5, 24)
    for sizes in ([1] * 24, [5, 19], [8, 8, 8]):
        starts = np.cumsum([5, *sizes[:-1]])
        assert np.array_equal(np.concatenate([opened.batch(int(start), size) for start, size in zip(starts, sizes)]), whole)
    if kind == "trained":
        assert not np.array_equal(open_dataset(data, model(), seed=4).batch(5, 24), whole)


def test_what_is_held_out_is_not_trained_on(corpus: DataConfig) -> None:
    data = DataConfig(**(vars(corpus) | {"held_out": 0.25}))
    trained, kept = open_dataset(data, model(), seed=3), open_held_out(data, model())
    marks = sentinels(Path(data.path), VOCAB)

    def texts(rows: NDArray[np.int64]) -> Iterator[tuple[int, ...]]:
        yield from (tuple(restored(row, 64, marks, read_index(data).end_token)) for row in rows)

    windows: int = trained.windows  # type: ignore[attr-defined]
    seen = {*texts(trained.batch(0, windows))}
    assert len(seen) == windows and not seen & {*texts(kept.batch(0, kept.windows))}
    assert kept.windows / (windows + kept.windows) == pytest.approx(0.25, abs=0.02)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"vocab": VOCAB + SENTINELS - 1}, r"model\.vocab=399 has no room for the 100 sentinels .*set model\.vocab=400 or more"),
        ({"seq": 2}, r"model\.seq=2 leaves no room for a token, a sentinel and the end token; use 3 or more"),
        ({"seq": 1900}, r"model\.seq=1900 with data\.kind=corpus masks 105 spans of a text, and there are 100 .*use 3 to 1809"),
        ({"decoder_seq": 13}, r"model\.decoder_seq=13 is less than the 14 tokens .*set model\.decoder_seq=14"),
    ],
)
def test_a_model_without_room_for_spans_is_refused_in_one_line(corpus: DataConfig, shape: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        open_dataset(corpus, ModelConfig(**(vars(model()) | shape)), seed=1)
    assert "\n" not in str(error.value)


def test_a_longer_decoder_has_padding_without_targets(corpus: DataConfig) -> None:
    rows = open_dataset(corpus, model(decoder_seq=20), seed=1).batch(0, 3)
    end = read_index(corpus).end_token
    assert rows.shape == (3, 64 + 21) and (rows[:, 79:] == ~end).all() and (rows[:, 65:79] >= 0).all()


def test_sentinels_are_those_of_the_tokenizer_where_it_has_some(tmp_path: Path) -> None:
    assert sentinels(tmp_path, 7) == [*range(106, 6, -1)]
    added = [{"id": 50 + number, "content": f"<extra_id_{number}>"} for number in range(SENTINELS)]
    words = {"BPE": {"a": 0}, "Unigram": [["<pad>", 0.0], ["a", -1.0]]}
    for kind, vocab in words.items():
        (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"type": kind, "vocab": vocab}, "added_tokens": added}))
        assert sentinels(tmp_path, 200) == [*range(50, 150)]


def examples(folder: Path, corpus: DataConfig, lines: list[dict[str, str]], **keys: Any) -> DataConfig:
    file = folder / "examples.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    own = {"kind": "instructions", "source": str(file), "path": corpus.path, "template": "{prompt}{answer}"}
    return DataConfig(**(own | keys))


def test_examples_of_an_encoder_are_a_prompt_and_an_answer_each_with_its_end(tmp_path: Path, corpus: DataConfig) -> None:
    data = examples(tmp_path, corpus, [{"prompt": "ab", "answer": "xy"}, {"prompt": "a", "answer": "x" * 12}])
    found = Instructions(data, 6, VOCAB, seed=1, written=5)
    end, plain = found.end, found.text.plain
    first, second = found._rows(found.examples, found.tasks).tolist()
    assert first == [*plain("ab"), end, *[~end] * (5 - len(plain("ab"))), ~end, *plain("xy"), end, *[~end] * (4 - len(plain("xy")))]
    assert second == [*plain("a"), end, *[~end] * 4, ~end, *plain("x" * 12)[:5]]  # the answer is cut, and its end with it


def test_a_prompt_that_an_encoder_cannot_read_whole_is_cut_where_asked_or_refused(tmp_path: Path, corpus: DataConfig) -> None:
    lines = [{"prompt": "abcdefgh", "answer": "x"}]
    with pytest.raises(ConfigError, match=r"a prompt of \d+ tokens and its end token do not fit the 4 of model\.seq that an encoder reads"):
        Instructions(examples(tmp_path, corpus, lines), 4, VOCAB, seed=1, written=5)
    found = Instructions(examples(tmp_path, corpus, lines, truncate="prompt"), 4, VOCAB, seed=1, written=5)
    assert found.examples[0][:4] == [*found.text.plain("abcdefgh")[:3], found.end]


def test_a_decoder_begins_with_what_files_beside_the_tokenizer_name(tmp_path: Path) -> None:
    assert begin_token(tmp_path, 9) == 9
    for named, begins in (({"eos_token_id": 1, "pad_token_id": 3}, 3), ({"eos_token_id": 1, "decoder_start_token_id": 0}, 0)):
        (tmp_path / GENERATION).write_text(json.dumps(named))
        assert begin_token(tmp_path, 9) == begins


def unigram(folder: Path, marks: int = SENTINELS, named: bool = True) -> Path:
    """A Unigram tokenizer as that of mT5: the sentinels are its last words, the first one the highest."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    folder.mkdir()
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()  # type: ignore[assignment]
    tokenizer.decoder = decoders.Metaspace()  # type: ignore[assignment]
    words = ["<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(vocab_size=60, special_tokens=words, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator([" ".join(f"{number} is {number * 7919 % 1000}" for number in range(3000))], trainer)
    tokenizer.add_special_tokens([SENTINEL.format(number) for number in reversed(range(marks))])
    tokenizer.enable_truncation(5)  # a file keeps what its last use was set to
    tokenizer.save(str(folder / "tokenizer.json"))
    if named:
        (folder / GENERATION).write_text(json.dumps({"eos_token_id": 1, "pad_token_id": 0, "decoder_start_token_id": 0}))
    return folder


def test_text_in_the_words_of_a_tokenizer_that_is_given_is_masked_with_its_sentinels(tmp_path: Path, corpus: DataConfig) -> None:
    from tokenizers import Tokenizer

    given = unigram(tmp_path / "mt5")
    (tmp_path / "text.txt").write_text(text := "17 is 603 and <extra_id_0> </s> is not a token\n" * 400)
    data = DataConfig(source=str(tmp_path / "text.txt"), path=str(tmp_path / "corpus"), tokenizer=str(given))
    made, again = prepare(data), prepare(DataConfig(**(vars(data) | {"vocab": 999, "tokenizer": str(given / "tokenizer.json")})))
    assert not made.reused and again.reused  # the size of a BPE that no one trains says nothing
    known = Tokenizer.from_file(str(Path(data.path) / "tokenizer.json")).get_vocab()
    index, marks = read_index(data), [known[SENTINEL.format(number)] for number in range(SENTINELS)]
    assert (Path(data.path) / "tokenizer.json").read_bytes() == (given / "tokenizer.json").read_bytes()
    assert index.vocab == made.vocab == len(known) == max(marks) + 1 and marks[0] == max(marks) and index.end_token == 1
    tokens = np.fromfile(Path(data.path) / "tokens.bin", dtype=index.dtype)
    plain = Tokenizer.from_file(str(given / "tokenizer.json"))
    plain.no_truncation()
    plain.encode_special_tokens = True
    assert tokens.tolist() == [*plain.encode(text, add_special_tokens=False).ids, 1] and not {*marks, 0} & {*tokens.tolist()}
    opened: Any = open_dataset(data, model(), seed=1)
    for row in opened.batch(0, 5):
        assert row[64] == ~0 and len(restored(row, 64, marks, 1)) == raw_tokens(64)  # the decoder begins with the token that fills texts
    assert not prepare(DataConfig(**(vars(data) | {"tokenizer": str(unigram(tmp_path / "t5", marks=0))}))).reused


@pytest.mark.parametrize(
    ("marks", "vocab", "message"),
    [
        (SENTINELS - 1, 999, r"has 99 of the 100 sentinels of span corruption, <extra_id_0> to <extra_id_99>; use one with all of them"),
        (0, 100, r"model\.vocab=100 has no room for the 100 sentinels .*set model\.vocab=\d+ or more, or use a tokenizer with the words"),
    ],
)
def test_a_vocabulary_without_its_sentinels_is_refused_in_one_line(tmp_path: Path, marks: int, vocab: int, message: str) -> None:
    (tmp_path / "text.txt").write_text("17 is 603\n" * 400)
    given = unigram(tmp_path / "t5", marks)
    data = DataConfig(source=str(tmp_path / "text.txt"), path=str(tmp_path / "corpus"), tokenizer=str(given))
    prepare(data)
    with pytest.raises(ConfigError, match=message) as error:
        open_dataset(data, ModelConfig(family="t5", vocab=vocab, seq=64), seed=1)
    assert "\n" not in str(error.value)
    open_dataset(data, ModelConfig(vocab=vocab, seq=64), seed=1)  # a model without an encoder needs none


def test_a_tokenizer_that_cannot_be_used_leaves_what_was_prepared(tmp_path: Path, corpus: DataConfig) -> None:
    (tmp_path / "empty.json").write_text("{}")
    before = (Path(corpus.path) / "index.json").read_bytes()
    for tokenizer, message in (
        (tmp_path / "none", "none/?.* does not exist; give a whole tokenizer.json or a folder with one"),
        (tmp_path / "empty.json", "has no vocabulary in it; give a whole"),
        (unigram(tmp_path / "unnamed", named=False), "no file beside it says which .* ends a text; put a generation_config.json with"),
    ):
        with pytest.raises(ConfigError, match=message) as error:
            prepare(DataConfig(**(vars(corpus) | {"tokenizer": str(tokenizer)})))
        assert "\n" not in str(error.value) and (Path(corpus.path) / "index.json").read_bytes() == before


def test_bytes_of_a_token_are_those_of_its_text(tmp_path: Path, corpus: DataConfig) -> None:
    from tokenizers import Tokenizer

    for file in (unigram(tmp_path / "t5") / "tokenizer.json", Path(corpus.path) / "tokenizer.json"):
        words, text = Tokenizer.from_file(str(file)), " 17 is 603 is 7"
        words.no_truncation()
        assert bytes_of_words(file, end=1)[words.encode(text, add_special_tokens=False).ids].sum() == len(text)
    assert bytes_of_words(tmp_path / "t5" / "tokenizer.json", end=1)[[0, 1, -1]].tolist() == [0, 0, 0]
