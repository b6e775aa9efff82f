"""Falcon: Almazrouei et al. 2023 (arXiv 2311.16867). Read for planning: weights are neither read nor written here yet."""

from __future__ import annotations

from typing import Any

from trainer.shared.families.family import MATRICES, ConfigKey, Family, HubFormat
from trainer.shared.families.parts import ROPE, Config, ConfigPart, biases, whole


def read_form(config: Config, given: Config) -> dict[str, Any]:
    """Reads the decoder of 7B (one key/value head, one norm), that of 40B (groups, two norms), or blocks in sequence."""
    newer = config["new_decoder_architecture"]
    norms = whole(config, "num_ln_in_parallel_attn", 2 if newer else 1)
    parallel = "parallel" if newer and norms == 2 else "parallel_one_norm"
    kv_heads = whole(config, "num_kv_heads") if newer else 1 if config["multi_query"] else None
    return {
        "kv_heads": kv_heads or given["heads"],
        "residual": parallel if newer or config["parallel_attn"] else "sequential",
        "positions": "alibi" if config.get("alibi") else "rotary",
    }


FORM = ("new_decoder_architecture", "multi_query", "parallel_attn", "num_kv_heads", "num_ln_in_parallel_attn", "alibi")
FAMILY = Family(
    name="falcon",
    defaults={"norm": "layer", "residual": "parallel_one_norm", "activation": "gelu_exact", "tied": True},
    hub=HubFormat(
        model_type="falcon",
        architecture="FalconForCausalLM",
        keys=(
            ConfigKey("layers", "num_hidden_layers", older="n_layer"),
            ConfigKey("hidden", "hidden_size", older="n_embed"),
            ConfigKey("heads", "num_attention_heads", older="n_head"),
            ConfigKey("ffn", "ffn_hidden_size", default=None),
            ConfigKey("seq", "max_position_embeddings", default=2048),
            ConfigKey("activation", "activation", words={"gelu_exact": "gelu"}),
            ConfigKey("norm_eps", "layer_norm_epsilon", default=1e-5),
        ),
        parts=(ROPE, ConfigPart(FORM, read_form), biases(bias=MATRICES)),
        expected={"apply_residual_connection_post_layernorm": False},
        absent={"new_decoder_architecture": False, "multi_query": True, "parallel_attn": True},
    ),
)
