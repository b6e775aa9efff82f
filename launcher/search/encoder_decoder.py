"""T5 and mT5: shapes by size, as the NeMo tool's tables have them. They are sized here, not trained: no layout, no recipe.

Parameters of L encoder and L decoder blocks with a gated MLP (T5 1.1): V h + L (12 h a k + 6 h f), for heads a of width k and MLP
width f: four attention matrices in the encoder, eight in the decoder (its own and over the encoder), three MLP matrices in each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainer.config import ConfigError

FAMILIES = ("t5", "mt5")


@dataclass(frozen=True)
class Row:
    """One row of the tool's table: it serves sizes below ``limit`` (``limit_mt5``) parameters."""

    limit: float
    limit_mt5: float
    hidden: int
    heads: int
    ffn: int
    head_width: int = 64


TABLE = (
    Row(0.1e9, 0.25e9, 512, 6, 1024),
    Row(0.4e9, 0.5e9, 768, 12, 2048),
    Row(1e9, 1.2e9, 1024, 16, 2816),
    Row(5e9, 5e9, 2048, 32, 5120),
    Row(15e9, 15e9, 4096, 64, 10240),
    Row(25.9e9, 25.9e9, 5120, 80, 10880),
    Row(43e9, 43e9, 6144, 96, 10880),
    Row(85.5e9, 85.5e9, 6144, 96, 16384),
    Row(165.5e9, 165.5e9, 7680, 96, 20480, 128),
    Row(250e9, 250e9, 12288, 96, 32768, 128),
)
VOCAB = {"t5": 32128, "mt5": 250112}
TOOL_FACTOR = {"t5": 1.0, "mt5": 0.87}
"""The tool trains mT5 models a little smaller for the same work, because of their vocabulary."""


@dataclass(frozen=True)
class EncoderDecoder:
    """One T5 or mT5: ``layers`` blocks in the encoder and as many in the decoder, and what to start its training with."""

    family: str
    layers: int
    hidden: int
    heads: int
    head_width: int
    ffn: int
    vocab: int
    lr: float = 1e-4
    init_std: float = 0.015
    warmup_ratio: float = 0.01
    weight_decay: float = 0.1
    dropout: float = 0.1
    global_batch: int = 2048
    seq: int = 512

    @property
    def parameters(self) -> int:
        attention = 12 * self.hidden * self.heads * self.head_width
        return self.vocab * self.hidden + self.layers * (attention + 6 * self.hidden * self.ffn)


def shape_for(family: str, parameters: float) -> EncoderDecoder:
    """The row that serves ``parameters``, as deep as needed; ``ConfigError`` beyond the table."""
    for row in TABLE:
        if parameters < (row.limit if family == "t5" else row.limit_mt5) or (row is TABLE[-1] and parameters <= row.limit):
            one = EncoderDecoder(family, 1, row.hidden, row.heads, row.head_width, row.ffn, VOCAB[family])
            embedding = one.vocab * one.hidden
            layers = max(1, round((parameters - embedding) / (one.parameters - embedding)))
            batch = 2048 if parameters <= 1e9 else 1920
            return EncoderDecoder(family, layers, row.hidden, row.heads, row.head_width, row.ffn, one.vocab, global_batch=batch)
    raise ConfigError(f"a {family} of {parameters:.3g} parameters is beyond the table; ask for at most {TABLE[-1].limit:g}")


def size_for(family: str, gpus: int, days: float, tokens: float, tflops: float) -> float:
    """Parameters that the budget allows by the tool's rule: 8 FLOPs per parameter and token."""
    values = (gpus, days, tokens, tflops)
    if not all(math.isfinite(v) and v > 0 for v in values):
        raise ConfigError(f"gpus={gpus}, days={days:g}, tokens={tokens:g} and tflops={tflops:g} must all be more than 0")
    return TOOL_FACTOR[family] * gpus * days * 86400 * tflops * 1e12 / (8 * tokens)
