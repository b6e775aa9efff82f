"""GPT-J: Wang and Komatsuzaki 2021. Read for planning: weights are neither read nor written here yet."""

from __future__ import annotations

from typing import Any

from trainer.shared.families.family import ConfigKey, Family, HubFormat
from trainer.shared.families.parts import Config, ConfigPart, unread, whole


def read_share(config: Config, given: Config) -> dict[str, Any]:
    """Reads the number of a head's dimensions that turn; null means all of them."""
    turned = whole(config, "rotary_dim")
    return {"rope.share": turned * given["heads"] / given["hidden"]} if turned else {}


FAMILY = Family(
    name="gptj",
    defaults={"norm": "layer", "residual": "parallel_one_norm", "biases": ("up", "down", "head"), "activation": "gelu"},
    hub=HubFormat(
        model_type="gptj",
        architecture="GPTJForCausalLM",
        keys=(
            ConfigKey("layers", "n_layer"),
            ConfigKey("hidden", "n_embd"),
            ConfigKey("heads", "n_head"),
            ConfigKey("ffn", "n_inner", default=None),
            ConfigKey("seq", "n_positions"),
            ConfigKey("activation", "activation_function", words={"gelu": "gelu_new"}),
            ConfigKey("norm_eps", "layer_norm_epsilon", default=1e-5),
        ),
        parts=(ConfigPart(("rotary_dim",), read_share), unread("rotary")),
        expected={"scale_attn_weights": True},
        absent={"rotary_dim": 64},
    ),
)
