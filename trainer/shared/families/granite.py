"""Granite 3: IBM 2024. Llama's network with factors of embeddings, attention scores, additions to the residual stream, and logits."""

from __future__ import annotations

from dataclasses import replace

from trainer.shared.families.family import LLAMA, ConfigKey, Family
from trainer.shared.families.gguf import INVERSE, PAIRS, GgufField, GgufFormat
from trainer.shared.families.parts import ConfigPart, inverse

LOGITS = ConfigPart(
    ("logits_scaling",),
    lambda config, given: {"logit_scale": inverse(config.get("logits_scaling", 1.0))},
    lambda model: {"logits_scaling": inverse(model["logit_scale"])},
)
FAMILY = Family(
    name="granite",
    hub=replace(
        LLAMA,
        model_type="granite",
        architecture="GraniteForCausalLM",
        keys=(
            *LLAMA.keys,
            ConfigKey("embedding_scale", "embedding_multiplier", default=1.0),
            ConfigKey("residual_scale", "residual_multiplier", default=1.0),
            ConfigKey("attention_scale", "attention_multiplier", default=1.0),
        ),
        parts=(*LLAMA.parts, LOGITS),
    ),
    gguf=GgufFormat(
        architecture="granite",
        fields={
            "attention_scale": GgufField("attention.scale"),
            "embedding_scale": GgufField("embedding_scale"),
            "residual_scale": GgufField("residual_scale"),
            "logit_scale": INVERSE,
        },
        arranged=PAIRS,
    ),
)
