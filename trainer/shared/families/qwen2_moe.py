"""Qwen1.5-MoE and Qwen2's mixtures: Yang et al. 2024 (arXiv 2407.10671)."""

from __future__ import annotations

import dataclasses

from trainer.shared.families.family import LLAMA, MIXTURE, ConfigKey, Family
from trainer.shared.families.parts import MLP_BLOCKS, ROPE, ROUTING, WINDOW, ConfigPart, biases

FAMILY = Family(
    name="qwen2_moe",
    defaults={"biases": ("qkv",)},
    hub=dataclasses.replace(
        LLAMA,
        model_type="qwen2_moe",
        architecture="Qwen2MoeForCausalLM",
        keys=(
            ConfigKey("layers", "num_hidden_layers"),
            ConfigKey("hidden", "hidden_size"),
            ConfigKey("heads", "num_attention_heads"),
            ConfigKey("kv_heads", "num_key_value_heads", default=None),
            ConfigKey("ffn", "intermediate_size"),
            ConfigKey("seq", "max_position_embeddings"),
            ConfigKey("activation", "hidden_act", words={"swiglu": "silu"}),
            ConfigKey("norm_eps", "rms_norm_eps", default=1e-6),
            ConfigKey("experts.count", "num_experts", default=60),
            ConfigKey("experts.active", "num_experts_per_tok", default=4),
            ConfigKey("experts.ffn", "moe_intermediate_size", default=1408),
            ConfigKey("experts.shared_ffn", "shared_expert_intermediate_size", default=5632),
            ConfigKey("experts.every", "decoder_sparse_step", default=1),
            ConfigKey("experts.normalized", "norm_topk_prob", default=False),
        ),
        parts=(
            *(ROPE, WINDOW, ROUTING, MLP_BLOCKS, biases(qkv_bias=("qkv",))),
            ConfigPart((), lambda config, given: {"experts.shared_gate": given["experts.shared_ffn"] != 0}),
        ),
        absent={"qkv_bias": True, "use_sliding_window": False},
        mixture={
            **MIXTURE,
            "mlp.shared.up": "mlp.shared_expert.gate_proj mlp.shared_expert.up_proj",
            "mlp.shared.down": "mlp.shared_expert.down_proj",
            "mlp.shared_gate": "mlp.shared_expert_gate",
        },
    ),
)
