"""Mistral: Jiang et al. 2023. Llama's network, with a window in some versions and heads of their own width."""

from __future__ import annotations

from dataclasses import replace

from trainer.shared.families.family import LLAMA, Family
from trainer.shared.families.gguf import PAIRS, GgufFormat
from trainer.shared.families.parts import ROPE, one_window

FAMILY = Family(
    name="mistral",
    hub=replace(LLAMA, model_type="mistral", architecture="MistralForCausalLM", parts=(ROPE, one_window(4096))),
    gguf=GgufFormat(architecture="llama", arranged=PAIRS),
)
