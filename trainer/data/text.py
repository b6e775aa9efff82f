"""Text in the tokens of a model: behind those that its tokenizer puts before every text, and up to one that ends it."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trainer.shared.corpora.index import size_of, words_of
from trainer.shared.records.named_tokens import decoder_start, named_tokens
from trainer.shared.run.errors import ConfigError

SPACE, BYTE = "\N{LOWER ONE EIGHTH BLOCK}", re.compile("<0x[0-9A-F]{2}>")
"""A space, and a byte that has no word, in the vocabularies of SentencePiece."""


def bytes_of_words(tokenizer: Path, end: int) -> NDArray[np.int64]:
    """Returns the UTF-8 bytes that each token of a tokenizer.json stands for, by its number: 0 for the end token and special ones.

    A byte-level vocabulary spells a byte as one letter. Others spell a space as a bar, and a byte as ``<0x0A>`` where they have it.
    """
    record = json.loads(tokenizer.read_text(encoding="utf-8"))
    known, byte_level = words_of(tokenizer) or {}, "ByteLevel" in json.dumps(record.get("decoder"))
    silent = {end, *(token["id"] for token in record.get("added_tokens") or [] if token.get("special"))}
    lengths = np.zeros(size_of(known), dtype=np.int64)
    for word, token in known.items():
        if token not in silent:
            lengths[token] = len(word) if byte_level else 1 if BYTE.fullmatch(word) else len(word.replace(SPACE, " ").encode())
    return lengths


class TextTokens:
    """A tokenizer.json for a model of ``vocab`` tokens. ``named``: ``named_tokens`` beside ``weights`` or the file. ``begin`` stands before
    every text. ``ends`` are tokens that end one, an answer's first: the named ones, else the only special one. ``pairs``: an encoder reads
    a whole text, and an answer is another one, which begins with ``start``.

    Raises ``ConfigError`` if the file cannot be read, or has more tokens.
    """

    def __init__(self, file: Path, vocab: int, weights: Sequence[Path] = (), pairs: bool = False):
        from tokenizers import Tokenizer

        try:
            self.tokenizer = Tokenizer.from_str(file.read_text(encoding="utf-8"))
        except Exception as error:  # what the library raises for a damaged file has no type of its own
            raise ConfigError(f"the tokenizer {file} cannot be read: {error}; give a whole tokenizer.json") from None
        if (size := self.tokenizer.get_vocab_size()) > vocab:
            raise ConfigError(f"model.vocab={vocab} is smaller than the {size} tokens of the tokenizer {file}; give the model's own")
        self.tokenizer.no_truncation()  # a file keeps what its last use was set to; texts are neither cut nor padded here
        self.tokenizer.no_padding()
        self.vocab = vocab
        self.named = named_tokens([*weights, file.parent])
        some = self.tokenizer.encode("a")
        self.begin = list(itertools.compress(some.ids, itertools.takewhile(bool, some.special_tokens_mask)))
        special = [token for token, added in self.tokenizer.get_added_tokens_decoder().items() if added.special]
        ends = self.named.get("eos_token_id", special if len(special) == 1 else [])
        self.ends = tuple(ends) if isinstance(ends, list) else (ends,)
        self.pairs, begins = pairs, decoder_start([*weights, file.parent])
        self.start = next(iter(self.ends), 0) if begins is None else begins

    def plain(self, text: str) -> list[int]:
        """A text's own tokens."""
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def begun(self, text: str) -> list[int]:
        """A text's tokens behind ``begin``, which it may spell out itself. What a tokenizer puts behind a text is left out, since it goes
        on; unless it is read whole: then its end stands there."""
        tokens = [*self.plain(text), *(self.ends[:1] if self.pairs else ())]
        return tokens if tokens[: len(self.begin)] == self.begin else self.begin + tokens

    def before(self, prompt: Sequence[int]) -> Sequence[int]:
        """The tokens that an answer to a prompt continues."""
        return () if self.pairs else prompt

    def shown(self, prompt: str) -> str:
        """A prompt as it is shown before its answer."""
        return f"{prompt}\n" if self.pairs else prompt
