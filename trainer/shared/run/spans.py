"""The sizes of span corruption (Raffel et al. 2020, section 3.1.4): which part of a text an encoder reads and a decoder writes. Pure."""

from __future__ import annotations

from functools import lru_cache

from trainer.shared.families.registry import FAMILIES
from trainer.shared.run.schema import ModelConfig

NOISE_DENSITY, MEAN_SPAN = 0.15, 3.0
"""Share of tokens that are masked, and the mean length of a masked span: those of T5 and mT5."""
SENTINELS = 100
"""Tokens that stand for a span each."""
SENTINEL = "<extra_id_{}>"
"""Word of a sentinel in the tokenizers of T5 and mT5; where a tokenizer has none, sentinels are numbered behind its words."""
SHORTEST = 3
"""The shortest sequence with a token, a sentinel and the end token."""


def masked(tokens: int) -> tuple[int, int]:
    """Returns how many of so many tokens are masked, and in how many spans; one of each at least."""
    noise = min(max(round(tokens * NOISE_DENSITY), 1), tokens - 1)
    return noise, min(max(round(noise / MEAN_SPAN), 1), noise, tokens - noise)


@lru_cache(maxsize=64)
def raw_tokens(seq: int) -> int:
    """Returns the number of tokens of which ``seq`` are left to be read: those not masked, a sentinel for each span and the end token."""
    tokens = max(2, seq - 2)
    while _read(tokens + 1) <= seq:
        tokens += 1
    return tokens


def _read(tokens: int) -> int:
    noise, spans = masked(tokens)
    return tokens - noise + spans + 1


def written_tokens(seq: int) -> int:
    """Returns the tokens that are written where ``seq`` are read: a sentinel and the tokens of each span, and the end token."""
    if seq < SHORTEST:
        return seq
    return sum(masked(raw_tokens(seq))) + 1


def written_of(model: ModelConfig) -> int | None:
    """Returns how many tokens of a sample the decoder of a model with an encoder writes; None for other models."""
    if not FAMILIES[model.family].encoder_decoder:
        return None
    return model.decoder_seq or written_tokens(model.seq)


def text_seq(model: ModelConfig) -> int:
    """Returns the tokens of text that a sample is made of: more than an encoder reads of them."""
    return model.seq if written_of(model) is None else raw_tokens(max(model.seq, SHORTEST))
