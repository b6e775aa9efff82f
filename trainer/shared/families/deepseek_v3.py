"""DeepSeek-V3: DeepSeek-AI 2024 (arXiv 2412.19437); Kimi K2 has its form. Read for planning: weights are neither read nor written here
yet.

The correction of the experts' choice is not among the parameters that are counted: it has no gradient.
"""

from __future__ import annotations

import dataclasses

from trainer.shared.families import deepseek_v2
from trainer.shared.families.family import ConfigKey, Family

BEFORE = deepseek_v2.FAMILY.hub
FAMILY = Family(
    name="deepseek_v3",
    hub=dataclasses.replace(
        BEFORE,
        model_type="deepseek_v3",
        architecture="DeepseekV3ForCausalLM",
        further_types=("kimi_k2",),
        absent={**BEFORE.absent, "scoring_func": "sigmoid", "norm_topk_prob": True, "topk_method": "noaux_tc"},
        keys=(*BEFORE.keys, ConfigKey("predicted_tokens", "num_nextn_predict_layers", older="num_mtp_layers", default=0)),
    ),
)
