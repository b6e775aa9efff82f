"""Gemma: Gemma Team 2024 (arXiv 2403.08295). Read for planning: weights are neither read nor written here yet."""

from __future__ import annotations

import math

from trainer.shared.families.family import ConfigKey, Family, HubFormat
from trainer.shared.families.parts import ATTENTION_BIAS, ROPE, Config, ConfigPart, NotUnderstood

ACTIVATION = ("hidden_activation", "hidden_act")


def read_activation(config: Config, given: Config) -> dict[str, str]:
    """Reads GELU in its tanh form, which older files call by the name of the exact one."""
    for name in ACTIVATION:
        if config.get(name) not in (None, "gelu", "gelu_pytorch_tanh"):
            raise NotUnderstood(f"{name}={config[name]!r}")
    return {"activation": "geglu"}


def read_scale(config: Config, given: Config) -> dict[str, float]:
    """Returns the factor of embeddings: the square root of their width."""
    return {"embedding_scale": math.sqrt(given["hidden"])}


FAMILY = Family(
    name="gemma",
    defaults={"activation": "geglu", "tied": True},
    norm_offset=True,
    hub=HubFormat(
        model_type="gemma",
        architecture="GemmaForCausalLM",
        keys=(
            ConfigKey("layers", "num_hidden_layers"),
            ConfigKey("hidden", "hidden_size"),
            ConfigKey("heads", "num_attention_heads"),
            ConfigKey("kv_heads", "num_key_value_heads", default=None),
            ConfigKey("head_width", "head_dim", default=256),
            ConfigKey("ffn", "intermediate_size"),
            ConfigKey("seq", "max_position_embeddings", default=8192),
            ConfigKey("norm_eps", "rms_norm_eps", default=1e-6),
        ),
        parts=(ROPE, ConfigPart((), read_scale), ConfigPart(ACTIVATION, read_activation), ATTENTION_BIAS),
        expected={"use_bidirectional_attention": False},
    ),
)
