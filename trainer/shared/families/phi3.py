"""Phi-3 and Phi-4-mini: Abdin et al. 2024. Llama's network with fused matrices; a part of each head may turn, by LongRoPE's factors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trainer.shared.families.family import LLAMA, Family
from trainer.shared.families.gguf import WINDOW, GgufFormat
from trainer.shared.families.parts import ROPE, Config, ConfigPart, one_window


def write(model: Config) -> dict[str, Any]:
    """Writes the length before scaling outside the scaling too, where older readers look for it."""
    original = model["rope.original"]
    return ROPE.write(model) | ({} if original is None else {"original_max_position_embeddings": original})


FAMILY = Family(
    name="phi3",
    hub=replace(
        LLAMA,
        model_type="phi3",
        architecture="Phi3ForCausalLM",
        parts=(ConfigPart(ROPE.names, ROPE.read, write), one_window(None)),
        block={**LLAMA.block, "attention.qkv": "self_attn.qkv_proj", "mlp.up": "mlp.gate_up_proj"},
        forms={"attention.qkv": "by kind"},
    ),
    gguf=GgufFormat(architecture="phi3", fields={"window": WINDOW}, partial=True),
)
