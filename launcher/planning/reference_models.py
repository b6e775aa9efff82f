"""Published models that sizes are read from and interpolated between: facts, each with its source.

Sources: GPT-3 (Brown et al. 2020, table 2.1) up to 13B and 175B, with the heads that the NeMo launcher uses; the NeMo launcher's
5B, 20B and 40B; 76B, 310B, 530B and 1T from Megatron-LM (Narayanan et al. 2021, table 1; Korthikanti et al. 2022, table 3), their
learning rates from the NeMo tool's table. LLaMA (Touvron et al. 2023, table 2) and Llama 3.1 405B (Dubey et al. 2024, table 3).
BLOOM (Le Scao et al. 2022, table 3).
"""

from __future__ import annotations

from dataclasses import dataclass

GROUPED_QUERY_FROM = 67e9
"""LLaMA models above this many parameters have 8 key/value heads (Llama 2 70B, Llama 3.1 405B); smaller ones one per head."""


@dataclass(frozen=True)
class ReferenceModel:
    """One published model: its shape and its peak learning rate."""

    name: str
    layers: int
    hidden: int
    heads: int
    lr: float


@dataclass(frozen=True)
class FamilyDefaults:
    """What the models of one family share. Batches in tokens, by parameters; interpolated between, constant outside."""

    models: tuple[ReferenceModel, ...]  # ascending in size
    vocab: int
    dropout: float
    weight_decay: float
    batch_tokens: tuple[tuple[float, float], ...]
    warmup_tokens: float | None  # None: 0.15 % of all steps
    ffn_multiple: int | None = None  # SwiGLU: 8/3 hidden rounded up to a multiple of this; None: 4 hidden


M, B, T = 1e6, 1e9, 1e12

GPT = FamilyDefaults(
    models=(
        ReferenceModel("126M", 12, 768, 12, 6e-4),
        ReferenceModel("350M", 24, 1024, 16, 3e-4),
        ReferenceModel("760M", 24, 1536, 16, 2.5e-4),
        ReferenceModel("1.3B", 24, 2048, 16, 2e-4),
        ReferenceModel("2.7B", 32, 2560, 32, 1.6e-4),
        ReferenceModel("5B", 24, 4096, 32, 1.2e-4),
        ReferenceModel("6.7B", 32, 4096, 32, 1.2e-4),
        ReferenceModel("13B", 40, 5120, 40, 1e-4),
        ReferenceModel("20B", 44, 6144, 48, 1e-4),
        ReferenceModel("40B", 48, 8192, 64, 0.8e-4),
        ReferenceModel("76B", 60, 10240, 80, 0.7e-4),
        ReferenceModel("175B", 96, 12288, 96, 0.6e-4),
        ReferenceModel("310B", 96, 16384, 128, 0.5e-4),
        ReferenceModel("530B", 105, 20480, 128, 0.4e-4),
        ReferenceModel("1T", 128, 25600, 160, 0.3e-4),
    ),
    vocab=51200,
    dropout=0.1,
    weight_decay=0.1,
    batch_tokens=((0.76 * B, 256 * 2048), (2 * B, 1024 * 2048), (5 * B, 2048 * 2048)),  # NeMo tool, a size inside each of its bins
    warmup_tokens=None,
)

LLAMA = FamilyDefaults(
    models=(
        ReferenceModel("160M", 12, 768, 12, 3e-4),  # below 7B: GPT-3's depth and width, LLaMA's everything else
        ReferenceModel("1.3B", 24, 2048, 16, 3e-4),
        ReferenceModel("7B", 32, 4096, 32, 3e-4),
        ReferenceModel("13B", 40, 5120, 40, 3e-4),
        ReferenceModel("30B", 60, 6656, 52, 1.5e-4),
        ReferenceModel("65B", 80, 8192, 64, 1.5e-4),
        ReferenceModel("405B", 126, 16384, 128, 0.8e-4),
    ),
    vocab=32000,
    dropout=0.0,
    weight_decay=0.1,
    batch_tokens=((7 * B, 2048 * 2048), (70 * B, 2048 * 2048), (405 * B, 4 * 2048 * 2048)),
    warmup_tokens=2000 * 2048 * 2048,
    ffn_multiple=256,
)

BLOOM = FamilyDefaults(
    models=(
        ReferenceModel("560M", 24, 1024, 16, 3e-4),
        ReferenceModel("1.1B", 24, 1536, 16, 2.5e-4),
        ReferenceModel("1.7B", 24, 2048, 16, 2e-4),
        ReferenceModel("3B", 30, 2560, 32, 1.6e-4),
        ReferenceModel("7.1B", 30, 4096, 32, 1.2e-4),
        ReferenceModel("176B", 70, 14336, 112, 0.6e-4),
    ),
    vocab=250880,
    dropout=0.0,
    weight_decay=0.1,
    batch_tokens=((1.1 * B, 256 * 2048), (1.7 * B, 512 * 2048), (7.1 * B, 512 * 2048), (176 * B, 2048 * 2048)),
    warmup_tokens=375 * M,
)

FAMILY_DEFAULTS = {"gpt": GPT, "llama": LLAMA, "bloom": BLOOM}
"""The families whose shape, hyper-parameters and configuration are known here."""
