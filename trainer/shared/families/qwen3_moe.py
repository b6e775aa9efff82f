"""Qwen3's mixtures: Yang et al. 2025 (arXiv 2505.09388)."""

from __future__ import annotations

import dataclasses

from trainer.shared.families.family import LLAMA, MIXTURE, QUERY_KEY_NORMS, ConfigKey, Family, llama_keys
from trainer.shared.families.gguf import EXPERTS, GgufField, GgufFormat
from trainer.shared.families.parts import ATTENTION_BIAS, MLP_BLOCKS, ROPE, ROUTING, WINDOW

FAMILY = Family(
    name="qwen3_moe",
    defaults={"qk_norm": "head"},
    hub=dataclasses.replace(
        LLAMA,
        model_type="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        keys=(
            *llama_keys(1e-6),
            ConfigKey("experts.count", "num_experts", older="num_local_experts", default=128),
            ConfigKey("experts.active", "num_experts_per_tok", default=8),
            ConfigKey("experts.ffn", "moe_intermediate_size", default=768),
            ConfigKey("experts.every", "decoder_sparse_step", default=1),
            ConfigKey("experts.normalized", "norm_topk_prob", default=False),
        ),
        parts=(ROPE, WINDOW, ROUTING, MLP_BLOCKS, ATTENTION_BIAS),
        absent={"use_sliding_window": False},
        block={**LLAMA.block, **QUERY_KEY_NORMS},
        mixture=MIXTURE,
    ),
    gguf=GgufFormat(architecture="qwen3moe", fields={**EXPERTS, "experts.ffn": GgufField("expert_feed_forward_length")}),
)
