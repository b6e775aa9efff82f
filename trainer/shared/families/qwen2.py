"""Qwen2 and Qwen2.5: Yang et al. 2024. Llama's network with biases of queries, keys and values."""

from __future__ import annotations

from dataclasses import replace

from trainer.shared.families.family import LLAMA, Family
from trainer.shared.families.gguf import GgufFormat
from trainer.shared.families.parts import ROPE, WINDOW

FAMILY = Family(
    name="qwen2",
    defaults={"biases": ("qkv",)},
    hub=replace(LLAMA, model_type="qwen2", architecture="Qwen2ForCausalLM", parts=(ROPE, WINDOW)),
    gguf=GgufFormat(architecture="qwen2"),
)
