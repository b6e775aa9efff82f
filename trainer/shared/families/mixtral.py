"""Mixtral: Jiang et al. 2024 (arXiv 2401.04088). Read for planning: weights are neither read nor written here yet."""

from __future__ import annotations

from trainer.shared.families.family import ConfigKey, Family, HubFormat, llama_keys
from trainer.shared.families.parts import ROPE, ROUTING, WINDOW

FAMILY = Family(
    name="mixtral",
    hub=HubFormat(
        model_type="mixtral",
        architecture="MixtralForCausalLM",
        keys=(
            *llama_keys(1e-5),
            ConfigKey("experts.count", "num_local_experts", older="num_experts", default=8),
            ConfigKey("experts.active", "num_experts_per_tok", default=2),
        ),
        parts=(ROPE, WINDOW, ROUTING),
        absent={"rope_theta": 1e6},
    ),
)
