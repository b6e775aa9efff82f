"""GLM-4.5 and GLM-4.6: Zhipu AI 2025 (arXiv 2508.06471)."""

from __future__ import annotations

import dataclasses

from trainer.shared.families.family import LLAMA, MIXTURE, QUERY_KEY_NORMS, SHARED_EXPERTS, ConfigKey, Family, llama_keys
from trainer.shared.families.parts import GROUPS, ROPE, ROUTING, SHARED, ConfigPart, biases

FAMILY = Family(
    name="glm4_moe",
    hub=dataclasses.replace(
        LLAMA,
        model_type="glm4_moe",
        architecture="Glm4MoeForCausalLM",
        keys=(
            *llama_keys(1e-5),
            ConfigKey("experts.count", "n_routed_experts"),
            ConfigKey("experts.active", "num_experts_per_tok"),
            ConfigKey("experts.ffn", "moe_intermediate_size"),
            ConfigKey("experts.dense_layers", "first_k_dense_replace", default=1),
            ConfigKey("experts.normalized", "norm_topk_prob", default=True),
            ConfigKey("experts.scale", "routed_scaling_factor", default=1.0),
            ConfigKey("predicted_tokens", "num_nextn_predict_layers", older="num_mtp_layers", default=0),
        ),
        parts=(
            *(ROPE, SHARED, ROUTING, GROUPS, biases(attention_bias=("qkv",))),
            ConfigPart((), lambda config, given: {"experts.router": "sigmoid"}),
            ConfigPart(
                ("use_qk_norm",),
                lambda config, given: {"qk_norm": "head" if config.get("use_qk_norm") else "none"},
                lambda model: {"use_qk_norm": model["qk_norm"] == "head"},
            ),
        ),
        absent={"partial_rotary_factor": 0.5},
        block={**LLAMA.block, **QUERY_KEY_NORMS},
        mixture=MIXTURE | SHARED_EXPERTS,
        correction="mlp.gate.e_score_correction_bias",
    ),
)
