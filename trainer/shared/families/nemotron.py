"""Nemotron-4 and Minitron: Parmar et al. 2024 (arXiv 2402.16819). Read for planning: weights are neither read nor written here yet."""

from __future__ import annotations

from trainer.shared.families.family import ConfigKey, Family, HubFormat
from trainer.shared.families.parts import BIASES, ROPE

FAMILY = Family(
    name="nemotron",
    defaults={"norm": "layer", "activation": "squared_relu"},
    norm_offset=True,
    hub=HubFormat(
        model_type="nemotron",
        architecture="NemotronForCausalLM",
        keys=(
            ConfigKey("layers", "num_hidden_layers"),
            ConfigKey("hidden", "hidden_size"),
            ConfigKey("heads", "num_attention_heads"),
            ConfigKey("kv_heads", "num_key_value_heads", default=None),
            ConfigKey("head_width", "head_dim", default=None),
            ConfigKey("ffn", "intermediate_size"),
            ConfigKey("seq", "max_position_embeddings"),
            ConfigKey("activation", "hidden_act", words={"squared_relu": "relu2"}),
            ConfigKey("norm_eps", "norm_eps", default=1e-5),
        ),
        parts=(ROPE, BIASES),
        absent={"partial_rotary_factor": 0.5},
    ),
)
