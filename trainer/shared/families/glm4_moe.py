"""GLM-4.5 and GLM-4.6: Zhipu AI 2025 (arXiv 2508.06471). Read for planning: weights are neither read nor written here yet."""

from __future__ import annotations

from trainer.shared.families.family import ConfigKey, Family, HubFormat, llama_keys
from trainer.shared.families.parts import ROPE, ROUTING, SHARED, ConfigPart, biases

FAMILY = Family(
    name="glm4_moe",
    hub=HubFormat(
        model_type="glm4_moe",
        architecture="Glm4MoeForCausalLM",
        keys=(
            *llama_keys(1e-5),
            ConfigKey("experts.count", "n_routed_experts"),
            ConfigKey("experts.active", "num_experts_per_tok"),
            ConfigKey("experts.ffn", "moe_intermediate_size"),
            ConfigKey("experts.dense_layers", "first_k_dense_replace", default=1),
            ConfigKey("predicted_tokens", "num_nextn_predict_layers", older="num_mtp_layers", default=0),
        ),
        parts=(
            *(ROPE, SHARED, ROUTING, biases(attention_bias=("qkv",))),
            ConfigPart(("use_qk_norm",), lambda config, given: {"qk_norm": "head" if config.get("use_qk_norm") else "none"}),
        ),
        absent={"partial_rotary_factor": 0.5},
    ),
)
