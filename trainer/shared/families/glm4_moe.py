"""GLM-4.5 and GLM-4.6: Zhipu AI 2025 (arXiv 2508.06471). Read for planning: weights are neither read nor written here yet."""

from __future__ import annotations

from trainer.shared.families.family import ConfigKey, Family, HubFormat
from trainer.shared.families.parts import ROPE, ROUTING, SHARED, Part, biases

FAMILY = Family(
    name="glm4_moe",
    hub=HubFormat(
        model_type="glm4_moe",
        architecture="Glm4MoeForCausalLM",
        keys=(
            ConfigKey("layers", "num_hidden_layers"),
            ConfigKey("hidden", "hidden_size"),
            ConfigKey("heads", "num_attention_heads"),
            ConfigKey("kv_heads", "num_key_value_heads", default=None),
            ConfigKey("head_width", "head_dim", default=None),
            ConfigKey("ffn", "intermediate_size"),
            ConfigKey("seq", "max_position_embeddings"),
            ConfigKey("activation", "hidden_act", words={"swiglu": "silu"}),
            ConfigKey("norm_eps", "rms_norm_eps", default=1e-5),
            ConfigKey("experts.count", "n_routed_experts"),
            ConfigKey("experts.active", "num_experts_per_tok"),
            ConfigKey("experts.ffn", "moe_intermediate_size"),
            ConfigKey("experts.dense_layers", "first_k_dense_replace", default=1),
            ConfigKey("predicted_tokens", "num_nextn_predict_layers", older="num_mtp_layers", default=0),
        ),
        parts=(
            *(ROPE, SHARED, ROUTING, biases(attention_bias=("qkv",))),
            Part(("use_qk_norm",), lambda config, given: {"qk_norm": "head" if config.get("use_qk_norm") else "none"}),
        ),
        absent={"partial_rotary_factor": 0.5},
    ),
)
