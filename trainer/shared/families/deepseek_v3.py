"""DeepSeek-V3: DeepSeek-AI 2024 (arXiv 2412.19437); Kimi K2 has its form. Modules that predict further tokens are planned alone.

The correction of the experts' choice is not among the parameters that are counted: it has no gradient.
"""

from __future__ import annotations

import dataclasses

from trainer.shared.families import deepseek_v2
from trainer.shared.families.family import ConfigKey, Family
from trainer.shared.families.gguf import GgufField

BEFORE = deepseek_v2.FAMILY.hub
FAMILY = Family(
    name="deepseek_v3",
    hub=dataclasses.replace(
        BEFORE,
        model_type="deepseek_v3",
        architecture="DeepseekV3ForCausalLM",
        further_types=("kimi_k2",),
        expected={name: value for name, value in BEFORE.expected.items() if name != "norm_topk_prob"},
        absent={**BEFORE.absent, "scoring_func": "sigmoid", "norm_topk_prob": True, "topk_method": "noaux_tc"},
        correction="mlp.gate.e_score_correction_bias",
        keys=(
            *BEFORE.keys,
            ConfigKey("latent.interleaved", "rope_interleave", default=True),
            ConfigKey("predicted_tokens", "num_nextn_predict_layers", older="num_mtp_layers", default=0),
        ),
    ),
    gguf=dataclasses.replace(
        deepseek_v2.FILE,
        fields={
            **deepseek_v2.FILE.fields,
            "experts.groups": GgufField("expert_group_count"),
            "experts.active_groups": GgufField("expert_group_used_count"),
        },
        suits=lambda fields: fields.get(deepseek_v2.GATING) == 2,
    ),
)
