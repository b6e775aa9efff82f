"""Qwen3: Yang et al. 2025. Llama's network with norms of queries and keys, and heads of a width of their own."""

from __future__ import annotations

from dataclasses import replace

from trainer.shared.families.family import LLAMA, QUERY_KEY_NORMS, Family
from trainer.shared.families.gguf import GgufFormat
from trainer.shared.families.parts import ATTENTION_BIAS, ROPE, WINDOW

FAMILY = Family(
    name="qwen3",
    defaults={"qk_norm": "head"},
    hub=replace(
        LLAMA,
        model_type="qwen3",
        architecture="Qwen3ForCausalLM",
        parts=(ROPE, ATTENTION_BIAS, WINDOW),
        block={**LLAMA.block, **QUERY_KEY_NORMS},
    ),
    gguf=GgufFormat(architecture="qwen3"),
)
