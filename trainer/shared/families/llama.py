"""LLaMA: Touvron et al. 2023. Published models: its table 2, and Llama 3.1 405B (Dubey et al. 2024, table 3)."""

from __future__ import annotations

from trainer.shared.families.family import LLAMA, Family, FamilyDefaults, ReferenceModel
from trainer.shared.families.gguf import PAIRS, GgufFormat

FAMILY = Family(
    name="llama",
    order=1,
    hub=LLAMA,
    gguf=GgufFormat(architecture="llama", arranged=PAIRS),
    published=FamilyDefaults(
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
        batch_tokens=((7e9, 2048 * 2048), (70e9, 2048 * 2048), (405e9, 4 * 2048 * 2048)),
        warmup_tokens=2000 * 2048 * 2048,
        ffn_multiple=256,
        grouped_above=67e9,  # Llama 2 70B, Llama 3.1 405B
    ),
)
