"""DeepSeek-V2: DeepSeek-AI 2024 (arXiv 2405.04434)."""

from __future__ import annotations

import dataclasses

from trainer.shared.families.family import LLAMA, MIXTURE, SHARED_EXPERTS, ConfigKey, Family
from trainer.shared.families.parts import GROUPS, LATENT, ROPE, ROUTING, SHARED

FAMILY = Family(
    name="deepseek_v2",
    hub=dataclasses.replace(
        LLAMA,
        model_type="deepseek_v2",
        architecture="DeepseekV2ForCausalLM",
        keys=(
            ConfigKey("layers", "num_hidden_layers"),
            ConfigKey("hidden", "hidden_size"),
            ConfigKey("heads", "num_attention_heads"),
            ConfigKey("head_width", "qk_nope_head_dim", default=128),
            ConfigKey("latent.kv_rank", "kv_lora_rank", default=512),
            ConfigKey("latent.rotary", "qk_rope_head_dim", default=64),
            ConfigKey("latent.value", "v_head_dim", default=128),
            ConfigKey("ffn", "intermediate_size"),
            ConfigKey("seq", "max_position_embeddings"),
            ConfigKey("activation", "hidden_act", words={"swiglu": "silu"}),
            ConfigKey("norm_eps", "rms_norm_eps", default=1e-6),
            ConfigKey("experts.count", "n_routed_experts"),
            ConfigKey("experts.active", "num_experts_per_tok"),
            ConfigKey("experts.ffn", "moe_intermediate_size"),
            ConfigKey("experts.dense_layers", "first_k_dense_replace", default=0),
            ConfigKey("experts.router", "scoring_func", default="softmax"),
            ConfigKey("experts.normalized", "norm_topk_prob", default=False),
            ConfigKey("experts.scale", "routed_scaling_factor", default=1.0),
        ),
        parts=(ROPE, LATENT, SHARED, ROUTING, GROUPS),
        expected={"moe_layer_freq": 1, "attention_bias": False, "mlp_bias": False, "norm_topk_prob": False},
        block={
            **{ours: theirs for ours, theirs in LLAMA.block.items() if ours != "attention.qkv"},
            "attention.query": "self_attn.q_proj",
            "attention.query.compress": "self_attn.q_a_proj",
            "attention.query.norm": "self_attn.q_a_layernorm",
            "attention.query.expand": "self_attn.q_b_proj",
            "attention.latent.compress": "self_attn.kv_a_proj_with_mqa",
            "attention.latent.norm": "self_attn.kv_a_layernorm",
            "attention.latent.expand": "self_attn.kv_b_proj",
        },
        mixture=MIXTURE | SHARED_EXPERTS,
        absent={"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "q_lora_rank": 1536, "topk_method": "greedy"},
    ),
)
