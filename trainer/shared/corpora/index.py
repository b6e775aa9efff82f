"""The index of a prepared corpus folder, as `trireme prepare` wrote it, read back and checked. No torch, no numpy.

A prepared folder holds ``tokenizer.json`` (byte-level BPE, or the user's), ``tokens.bin`` (all documents' token ids, each followed by the
end token), ``documents.npy`` (the start of each document, int64, one more entry than documents) and ``index.json``, this index. The
launcher checks it before it submits anything, the trainer when it opens the data. The content of ``tokens.bin`` is compared with
``sample`` when a training begins, once per node: all of a file of up to 16 MiB, 256 spread blocks of a larger one, so that the cost does
not grow with the corpus. ``sha256``, of the whole file, is the corpus's name: checkpoints record it.
"""

from __future__ import annotations

import hashlib
import json
import math
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainer.shared.run.errors import ConfigError
from trainer.shared.run.files import read_json
from trainer.shared.run.read import from_dict
from trainer.shared.run.schema import DataConfig, ModelConfig
from trainer.shared.run.spans import SENTINEL, SENTINELS, SHORTEST, masked, raw_tokens, text_seq, written_of, written_tokens

FORMAT = 2
SAMPLE_BLOCKS, SAMPLE_BLOCK_BYTES = 256, 2**16
INDEX, TOKENS, DOCUMENTS, TOKENIZER = "index.json", "tokens.bin", "documents.npy", "tokenizer.json"
FILES = (INDEX, TOKENS, DOCUMENTS, TOKENIZER)
ARTIFACT = "artifact.json"
"""The manifest with the size of each file (``trainer.shared.records.artifacts``). Folders of earlier versions have none."""


@dataclass(frozen=True)
class CorpusIndex:
    """The index of a prepared folder. ``vocab`` is the tokenizer's size, at most the requested one."""

    format: int
    dtype: str
    tokens: int
    documents: int
    vocab: int
    end_token: int
    sha256: str
    sample: str
    settings: dict[str, Any]

    @property
    def token_bytes(self) -> int:
        return self.tokens * {"uint16": 2, "uint32": 4}[self.dtype]

    def save(self, folder: Path) -> None:
        (folder / INDEX).write_text(json.dumps(asdict(self), indent=2) + "\n")


def check_corpus(data: DataConfig, model: ModelConfig) -> CorpusIndex | None:
    """Reads the index of ``data.path`` and checks it against the model; returns None for data other than a corpus.

    Raises ``ConfigError`` if the folder is missing, unreadable, torn, shorter than a sequence, or its tokens do not fit ``model.vocab``.
    """
    if data.kind != "corpus":
        return None
    index = read_index(data)
    if index.vocab > model.vocab:
        raise ConfigError(
            f"model.vocab={model.vocab} is smaller than the {index.vocab} tokens of the tokenizer in data.path={data.path}; "
            f"set model.vocab={index.vocab} or more, or prepare the data again with "
            + ("a smaller data.tokenizer" if "tokenizer" in index.settings else f"data.vocab={model.vocab}")
        )
    if index.tokens < text_seq(model) + 1:
        raise ConfigError(
            f"data.path={data.path} holds {index.tokens} tokens, fewer than one sequence of model.seq={model.seq} and its next token; "
            "prepare more text or lower model.seq"
        )
    windows(index, text_seq(model), data)
    if written_of(model) is not None:
        _check_spans(data, model, index)
    return index


def _check_spans(data: DataConfig, model: ModelConfig, index: CorpusIndex) -> None:
    """Checks that the model has a token for each masked span, and room for the tokens that are written."""
    spans = masked(text_seq(model))[1]
    if model.seq < SHORTEST or spans > SENTINELS:
        longest = (
            max(seq for seq in range(SHORTEST, model.seq + 1) if masked(raw_tokens(seq))[1] <= SENTINELS) if spans > SENTINELS else None
        )
        raise ConfigError(
            f"model.seq={model.seq} with data.kind=corpus masks {spans} spans of a text, and there are {SENTINELS} sentinels for one each; "
            f"use {SHORTEST} to {longest}"
            if longest
            else f"model.seq={model.seq} leaves no room for a token, a sentinel and the end token; use {SHORTEST} or more"
        )
    check_sentinels(Path(data.path) / TOKENIZER, index.vocab, model)
    if model.decoder_seq and model.decoder_seq < (written := written_tokens(model.seq)):
        raise ConfigError(
            f"model.decoder_seq={model.decoder_seq} is less than the {written} tokens that span corruption of model.seq={model.seq} leaves "
            f"to be written; set model.decoder_seq={written}, or leave it out"
        )


def check_sentinels(tokenizer: Path, words: int, model: ModelConfig) -> None:
    """Raises ``ConfigError`` unless a tokenizer.json of so many tokens has all sentinels, or none and a model with an encoder has room for
    them behind its words."""
    known = words_of(tokenizer) or {}
    own = sum(SENTINEL.format(number) in known for number in range(SENTINELS))
    if written_of(model) is None or own == SENTINELS:
        return
    named = f"{SENTINEL.format(0)} to {SENTINEL.format(SENTINELS - 1)}"
    if own:
        raise ConfigError(
            f"the tokenizer {tokenizer} has {own} of the {SENTINELS} sentinels of span corruption, {named}; use one with all of them, or "
            "with none: then they are numbered behind its words"
        )
    if model.vocab < words + SENTINELS:
        raise ConfigError(
            f"model.vocab={model.vocab} has no room for the {SENTINELS} sentinels of span corruption behind the {words} tokens of "
            f"the tokenizer {tokenizer}; set model.vocab={words + SENTINELS} or more, or use a tokenizer with the words {named}"
        )


def given_tokenizer(data: DataConfig) -> Path | None:
    """Returns the tokenizer.json that text is prepared with; None where one is trained. Raises ``ConfigError`` if it is not there or has no
    words."""
    if data.tokenizer is None:
        return None
    given = Path(data.tokenizer)
    file = given / TOKENIZER if given.is_dir() else given
    if not words_of(file):
        flaw = "has no vocabulary in it" if file.is_file() else "does not exist"
        raise ConfigError(f"data.tokenizer={data.tokenizer}: {file} {flaw}; give a whole {TOKENIZER} or a folder with one")
    return file


def size_of(words: dict[str, int]) -> int:
    """Returns how many numbers the words of a tokenizer take."""
    return max(words.values(), default=-1) + 1


def windows(index: CorpusIndex, seq: int, data: DataConfig) -> tuple[int, int]:
    """Returns the number of windows of ``seq`` tokens to train on, and of those held out after them. Raises ``ConfigError`` if none is left
    to train on."""
    total = (index.tokens - 1) // seq
    held_out = math.ceil(total * data.held_out) if data.held_out < 1 else total
    if held_out >= total:
        raise ConfigError(
            f"data.held_out={data.held_out:g} leaves nothing to train on of the {total} sequences in data.path={data.path}; "
            f"use {f'less than {(total - 1) / total:.3g}' if total > 1 else 0}, or prepare more text"
        )
    return total - held_out, held_out


def corpus_name(sha256: str, held_out: float) -> str:
    """Returns the name that checkpoints record for a run's data: the digest of the corpus, and the share that is held out."""
    return f"{sha256}-{held_out:g}" if held_out else sha256


def data_name(data: DataConfig) -> str | None:
    """Returns ``corpus_name`` of a run's data, or ``synthetic``; None for examples, which only the tokenizer names."""
    if data.kind == "corpus":
        return corpus_name(read_index(data).sha256, data.held_out)
    return data.kind if data.kind == "synthetic" else None


def read_in_training(name: str, sha256: str, held_out: float) -> bool:
    """Returns whether a run on the data ``name`` may have read some of the last ``held_out`` (0: all) of the corpus ``sha256``."""
    trained, _, left_out = name.partition("-")
    return trained == sha256 and (not held_out or float(left_out or 0) < held_out)


def read_index(data: DataConfig) -> CorpusIndex:
    """Reads the index of ``data.path``. Raises ``ConfigError`` if there is none, or files are missing or differ in size from those
    written."""
    folder, remedy, again = Path(data.path), f"run `{prepare_command(data)}`", f"run `{prepare_command(data)} --force`"
    try:
        found = sorted(path.name for path in folder.iterdir())
        missing = [name for name in FILES if name not in found]
        record = json.loads((folder / INDEX).read_text()) if not missing else {}
        size = (folder / TOKENS).stat().st_size if not missing else 0
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"data.path={data.path} does not exist or is not a folder; {remedy}") from None
    except OSError as error:
        raise ConfigError(f"data.path={data.path} cannot be read: {error.strerror}; check its permissions, or {remedy}") from None
    except (ValueError, RecursionError):
        record = None
    if missing:
        raise ConfigError(f"data.path={data.path} is not a whole prepared corpus (no {missing[0]} in it); {remedy}")
    index = _parse(record)
    if index is None:
        raise ConfigError(f"data.path={data.path}: {INDEX} is damaged or of another version; {again}")
    if size != index.token_bytes:
        raise ConfigError(f"data.path={data.path}: {TOKENS} has {size} bytes, but {index.token_bytes} were written; {again}")
    if ARTIFACT in found and (flaw := _flaw(folder)):
        raise ConfigError(f"data.path={data.path}: {flaw}; {again}")
    return index


def _flaw(folder: Path) -> str:
    """Describes how the files of a prepared folder disagree with its manifest."""
    sizes = (read_json(folder / ARTIFACT) or {}).get("files")
    if not isinstance(sizes, dict) or not set(FILES) <= sizes.keys():
        return f"{ARTIFACT} is damaged"
    now = {name: (folder / name).stat().st_size for name in FILES}
    return next((f"{name} has {size} bytes, but {sizes[name]} were written" for name, size in now.items() if size != sizes[name]), "")


def other_words(given: Path, weights: Path, vocab: int) -> str:
    """Explains in a line for the user why the tokenizer.json ``given`` may not be that of a model of ``vocab`` tokens whose weights are in
    ``weights``; empty where nothing speaks against it."""
    beside = next((file for place in (weights, weights.parent) if (file := place / TOKENIZER).is_file()), None)
    own, known = words_of(given), None if beside is None else words_of(beside)
    if own is None or known == own:
        return ""
    if known is not None:
        return f"note: {given} has other words than {beside}, the model's own; its tokens mean something else to the model"
    told = f"note: {given} has {len(own)} tokens, and model.vocab={vocab}; unless it was trained with these, what it says means nothing"
    return told if len(own) < vocab else ""


def words_of(tokenizer: Path) -> dict[str, int] | None:
    """Returns each word of a tokenizer.json and its number; None where it has none in this form."""
    record = read_json(tokenizer) or {}
    model, added = record.get("model"), record.get("added_tokens") or []
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, list) and all(isinstance(entry, list) and entry for entry in vocab):  # of Unigram: words with their scores
        vocab = {str(entry[0]): number for number, entry in enumerate(vocab)}
    if not isinstance(vocab, dict) or not isinstance(added, list):
        return None
    return vocab | {token["content"]: token["id"] for token in added if isinstance(token, dict) and {"content", "id"} <= token.keys()}


def check_sample(data: DataConfig, index: CorpusIndex) -> None:
    """Raises ``ConfigError`` if the token file cannot be read, or no longer has the content that ``index`` records."""
    try:
        found = sample_digest(Path(data.path) / TOKENS)
    except OSError as error:
        raise ConfigError(f"data.path={data.path}: cannot read {TOKENS}: {error.strerror}; check its permissions") from None
    if found != index.sample:
        raise ConfigError(
            f"data.path={data.path}: {TOKENS} is not the prepared file (its checksum differs from that in {INDEX}); "
            f"run `{prepare_command(data)} --force`"
        )


def sample_digest(path: Path) -> str:
    """Returns the SHA-256 of a file's size and of up to ``SAMPLE_BLOCKS`` blocks, the first and the last among them. Reads 16 MiB at
    most."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        size = file.seek(0, 2)
        digest.update(b"%d\n" % size)
        last = max(0, -(-size // SAMPLE_BLOCK_BYTES) - 1)
        for block in sorted({i * last // (SAMPLE_BLOCKS - 1) for i in range(SAMPLE_BLOCKS)}):
            file.seek(block * SAMPLE_BLOCK_BYTES)
            digest.update(file.read(SAMPLE_BLOCK_BYTES))
    return digest.hexdigest()


def _parse(record: Any) -> CorpusIndex | None:
    """Returns the index in ``record``, or None if this version does not write such a record."""
    try:
        index = from_dict(CorpusIndex, record)
        return index if index.format == FORMAT and index.token_bytes >= 0 else None
    except (TypeError, KeyError, ConfigError):
        return None


def prepare_command(data: DataConfig) -> str:
    """Returns the command line that prepares ``data``, as a person would type it."""
    words = []
    for name in ("source", "path", "pattern", "text_key", "vocab", "tokenizer"):
        value = getattr(data, name)
        if value != getattr(DataConfig(), name):
            words.append(shlex.quote(f"data.{name}={value}"))
    return " ".join(["trireme prepare", *words])
