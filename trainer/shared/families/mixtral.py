"""Mixtral: Jiang et al. 2024 (arXiv 2401.04088)."""

from __future__ import annotations

import dataclasses

from trainer.shared.families.family import LLAMA, ConfigKey, Family, llama_keys
from trainer.shared.families.gguf import EXPERTS, PAIRS, GgufFormat
from trainer.shared.families.parts import ROPE, ROUTING, WINDOW

FAMILY = Family(
    name="mixtral",
    hub=dataclasses.replace(
        LLAMA,
        model_type="mixtral",
        architecture="MixtralForCausalLM",
        keys=(
            *llama_keys(1e-5),
            ConfigKey("experts.count", "num_local_experts", older="num_experts", default=8),
            ConfigKey("experts.active", "num_experts_per_tok", default=2),
        ),
        parts=(ROPE, WINDOW, ROUTING),
        absent={"rope_theta": 1e6},
        mixture={
            "mlp.router": "block_sparse_moe.gate",
            "mlp.up": "block_sparse_moe.experts.{}.w1 block_sparse_moe.experts.{}.w3",
            "mlp.down": "block_sparse_moe.experts.{}.w2",
        },
    ),
    gguf=GgufFormat(architecture="llama", fields=EXPERTS, arranged=PAIRS),
)
