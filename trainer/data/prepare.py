"""From text to a prepared folder: train a byte-level BPE or take a tokenizer that is there, encode every document, write tokens and
index, atomically.

Everything is written to a temporary folder next to the target, which is renamed when it is complete. So a prepared folder is
complete or absent, and a preparation may be killed and repeated at any time. Of two concurrent preparations the second waits
and reuses the result of the first.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.data.text import TextTokens
from trainer.shared.corpora.index import (
    DOCUMENTS,
    FILES,
    FORMAT,
    TOKENIZER,
    TOKENS,
    CorpusIndex,
    check_sample,
    given_tokenizer,
    read_index,
    sample_digest,
    size_of,
)
from trainer.shared.corpora.sources import Source, open_source
from trainer.shared.records.artifacts import MANIFEST, ArtifactKind, write_artifact
from trainer.shared.records.named_tokens import DECODER_START, GENERATION, decoder_start, named_tokens, tokenizer_digest
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.files import write_json
from trainer.shared.run.schema import DataConfig

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"
TRAINING_BYTES = 64 * 2**20
"""Text that the tokenizer is trained on: documents spread evenly over the source, about this many bytes."""
LONGEST_WORD = 1000
"""Longest word in bytes whose pairs are learnt at once: time is quadratic, and longer ones are data. Encoding cuts nothing."""
UINT16_VOCAB = 2**16
"""The largest vocabulary whose tokens are stored in two bytes."""
BATCH_BYTES = 2**20
"""Text encoded at once: enough to keep every core busy, little enough to stay small in memory."""

Progress = Callable[[str, int, int], None]
"""Progress callback: (stage, bytes done, bytes in all)."""


@dataclass(frozen=True)
class Prepared:
    """Result of a preparation. ``reused``: the folder was already there. ``skipped``: files that are not UTF-8 text."""

    path: str
    reused: bool
    tokens: int
    documents: int
    vocab: int
    bytes: int
    sha256: str
    skipped: tuple[str, ...] = ()


def prepare(data: DataConfig, force: bool = False, progress: Progress = lambda *_: None) -> Prepared:
    """Makes ``data.path`` from ``data.source``, or reuses a folder of the same source and settings unless ``force``. Raises ``ConfigError``
    for unreadable text and for a target that holds other files."""
    if data.kind != "corpus":
        raise ConfigError(f"data.kind={data.kind} needs no preparation; use data=stdlib, or data.source and data.path for your own text")
    target = Path(data.path)
    _check_target(target, data)
    source = open_source(data)
    settings = {name: getattr(data, name) for name in ("source", "pattern", "text_key")} | {"files": source.fingerprint()}
    given = given_tokenizer(data)
    settings |= {"vocab": data.vocab} if given is None else {"tokenizer": tokenizer_digest(given)}
    with _working_folder(target, data) as work:
        index = None if force else _matching(data, settings)
        if reused := index is not None:
            return _summary(data, index, source, reused)
        index = _write(source, settings, work, progress)
        _move_into_place(work, target)
    return _summary(data, index, source, reused)


@contextmanager
def _working_folder(target: Path, data: DataConfig) -> Iterator[Path]:
    """An empty folder next to the target, locked against other preparations; leftovers of a killed one are removed."""
    work, lock = target.with_name(f".{target.name}.partial"), target.with_name(f".{target.name}.lock")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with lock.open("w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir()
            try:
                yield work
            finally:
                shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise ConfigError(f"data.path={data.path} cannot be written: {error.strerror}; choose another folder, or free some space") from None


def _check_target(target: Path, data: DataConfig) -> None:
    """Refuses to replace anything but a prepared folder."""
    if not target.exists():
        return
    foreign = [target] if not target.is_dir() else sorted(p for p in target.iterdir() if p.name not in (*FILES, GENERATION, MANIFEST))
    if foreign:
        raise ConfigError(f"data.path={data.path} holds something else ({foreign[0].name}); choose another data.path, or move that away")


def _matching(data: DataConfig, settings: dict[str, Any]) -> CorpusIndex | None:
    """The index of an intact folder that was prepared with the same settings."""
    with suppress(ConfigError):  # missing, torn, damaged or of another version: prepare it again
        index = read_index(data)
        check_sample(data, index)
        return index if index.settings == settings else None
    return None


def _write(source: Source, settings: dict[str, Any], folder: Path, progress: Progress) -> CorpusIndex:
    given = given_tokenizer(source.data)
    tokenizer, end = _trained(source, folder, progress) if given is None else _taken(given, folder)
    vocab = size_of(tokenizer.get_vocab())
    dtype = "uint16" if vocab <= UINT16_VOCAB else "uint32"
    starts, sha256 = [0], hashlib.sha256()
    with (folder / TOKENS).open("wb") as tokens:
        for ids in _encoded(tokenizer, end, source, progress):
            content = np.asarray(ids, dtype=dtype).tobytes()
            tokens.write(content)
            sha256.update(content)
            starts.append(starts[-1] + len(ids))
        tokens.flush()
        os.fsync(tokens.fileno())
    if starts[-1] == len(starts) - 1:  # there is no document, or nothing but ends of documents
        raise ConfigError(f"data.source={source.data.source} holds no text in UTF-8; give another source or data.pattern")
    np.save(folder / DOCUMENTS, np.asarray(starts, dtype=np.int64))
    digests = sha256.hexdigest(), sample_digest(folder / TOKENS)
    index = CorpusIndex(FORMAT, dtype, starts[-1], len(starts) - 1, vocab, end, *digests, settings)
    index.save(folder)
    write_artifact(folder, ArtifactKind.CORPUS, made_by="prepare")
    return index


def _taken(given: Path, folder: Path) -> tuple[Tokenizer, int]:
    """Copies the tokenizer ``given``, with the tokens that files beside it name; returns it and its end token."""
    text = TextTokens(given, sys.maxsize)
    if not text.ends:
        raise ConfigError(
            f"data.tokenizer={given}: no file beside it says which of its special tokens ends a text; put a {GENERATION} with "
            "eos_token_id there, and with decoder_start_token_id for a model with an encoder"
        )
    shutil.copyfile(given, folder / TOKENIZER)
    starts = decoder_start([given.parent])
    named = named_tokens([given.parent]) | ({} if starts is None else {DECODER_START: starts})
    if named:
        write_json(folder / GENERATION, named)
    return text.tokenizer, text.ends[0]


def _trained(source: Source, folder: Path, progress: Progress) -> tuple[Tokenizer, int]:
    """Trains a byte-level BPE, so that any text encodes without an unknown token, and decodes to itself; returns it and its end token."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    cut = pre_tokenizers.Split(Regex(f".{{1,{LONGEST_WORD}}}"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, cut])  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=source.data.vocab,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sample(source, progress), trainer)
    tokenizer.pre_tokenizer = words  # type: ignore[assignment]
    tokenizer.save(str(folder / TOKENIZER))
    return tokenizer, tokenizer.get_vocab()[END_OF_TEXT]


def _sample(source: Source, progress: Progress) -> Iterator[str]:
    """Documents spread evenly over the source, at most about ``TRAINING_BYTES`` of text."""
    total = source.total_bytes
    share, seen, taken = min(1.0, TRAINING_BYTES / max(1, total)), 0, 0
    for size, documents in source.documents():
        seen += size
        if taken < seen * share:
            taken += size
            yield from documents
        progress("training the tokenizer", seen, total)


def _encoded(tokenizer: Tokenizer, end: int, source: Source, progress: Progress) -> Iterator[list[int]]:
    """The token ids of every document, each closed by the end token; many are encoded at once, on all cores."""
    total, done = source.total_bytes, 0
    tokenizer.encode_special_tokens = True  # a document that spells out the end token contains its letters, not an end
    for size, texts in _batches(source):
        for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False):
            yield [*encoding.ids, end]
        done += size
        progress("encoding", done, total)


def _batches(source: Source) -> Iterator[tuple[int, list[str]]]:
    """Documents in batches of about ``BATCH_BYTES``, with the bytes read for each."""
    size, texts = 0, []
    for file_bytes, documents in source.documents():
        size += file_bytes
        texts += documents
        if size >= BATCH_BYTES:
            yield size, texts
            size, texts = 0, []
    yield size, texts


def _move_into_place(work: Path, target: Path) -> None:
    """Renames ``work`` to the target; removes the old folder only once the new one stands."""
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    with suppress(FileNotFoundError):
        target.rename(old)
    work.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def _summary(data: DataConfig, index: CorpusIndex, source: Source, reused: bool) -> Prepared:
    skipped = tuple(os.fsencode(path).decode(errors="replace") for path in source.skipped)
    return Prepared(data.path, reused, index.tokens, index.documents, index.vocab, source.total_bytes, index.sha256, skipped)
