"""The spelling of single tokens, as answers with log-probabilities report it."""

from __future__ import annotations

import re
from functools import cached_property, lru_cache
from itertools import islice
from typing import TYPE_CHECKING

from trainer.generate.telling import HALF

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BYTE = re.compile("<0x([0-9A-F]{2})>")
"""A token of one byte in vocabularies that fall back to bytes (SentencePiece)."""


def _alphabet() -> dict[str, int]:
    """Returns the byte of each character of byte-level vocabularies: printable bytes are themselves, the others follow from 256 on
    (Radford et al. 2019, ``encoder.py``)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


class TokenSpelling:
    """The words of a tokenizer's tokens, each as it is written inside a text: with the space that it begins with."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.special = {token: added.content for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}
        ids = (*tokenizer.encode("a", add_special_tokens=False).ids[-1:], *range(tokenizer.get_vocab_size()))
        self.inside = list(islice((token for token in ids if tokenizer.decode([token]).isalnum()), 1))  # a word for others to follow
        self.known = len(tokenizer.decode(self.inside))
        self.word = lru_cache(1 << 16)(self._word)

    def _word(self, token: int) -> str:
        return self.special.get(token) or self.tokenizer.decode([*self.inside, token])[self.known :]

    def bytes(self, token: int) -> list[int] | None:
        """Returns the UTF-8 bytes of a token, which may be a part of a character's; None if they are unknown."""
        if HALF not in (word := self.word(token)):
            return list(word.encode())
        piece = self.tokenizer.id_to_token(token) or ""
        if single := BYTE.fullmatch(piece):
            return [int(single[1], 16)]
        return [self.alphabet[letter] for letter in piece] if piece and {*piece} <= {*self.alphabet} else None

    @cached_property
    def alphabet(self) -> dict[str, int]:
        return _alphabet()
