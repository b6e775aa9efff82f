"""OLMo 2: Walsh et al. 2024. Norms after attention and MLP, none before; a norm of queries and of keys over all heads together."""

from __future__ import annotations

from dataclasses import replace

from trainer.shared.families.family import LLAMA, POST_NORMS, QUERY_KEY_NORMS, Family
from trainer.shared.families.gguf import GgufFormat
from trainer.shared.families.parts import ATTENTION_BIAS, ROPE

FAMILY = Family(
    name="olmo2",
    defaults={"norm_at": "after", "qk_norm": "width"},
    hub=replace(
        LLAMA,
        model_type="olmo2",
        architecture="Olmo2ForCausalLM",
        parts=(ROPE, ATTENTION_BIAS),
        block={**LLAMA.block, **POST_NORMS, **QUERY_KEY_NORMS},
    ),
    gguf=GgufFormat(architecture="olmo2"),
)
