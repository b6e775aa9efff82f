"""OPT: Zhang et al. 2022 (arXiv 2205.01068), but for 350M, whose norms come after and whose embedding is projected. Read for planning:
weights are neither read nor written here yet."""

from __future__ import annotations

from typing import Any

from trainer.shared.families.family import MATRICES, ConfigKey, Family, HubFormat
from trainer.shared.families.parts import Config, ConfigPart, NotUnderstood, biases, unread


def read_projection(config: Config, given: Config) -> dict[str, Any]:
    """Checks that the embedding has the width of the blocks."""
    if (width := config.get("word_embed_proj_dim")) not in (None, given["hidden"]):
        raise NotUnderstood(f"word_embed_proj_dim={width!r}, which is not hidden_size={given['hidden']},")
    return {}


FAMILY = Family(
    name="opt",
    defaults={"positions": "learned", "norm": "layer", "biases": MATRICES, "activation": "relu", "tied": True},
    further_positions=2,  # the first two rows were meant for padding
    hub=HubFormat(
        model_type="opt",
        architecture="OPTForCausalLM",
        keys=(
            ConfigKey("layers", "num_hidden_layers"),
            ConfigKey("hidden", "hidden_size"),
            ConfigKey("heads", "num_attention_heads"),
            ConfigKey("ffn", "ffn_dim"),
            ConfigKey("seq", "max_position_embeddings"),
            ConfigKey("activation", "activation_function", words={"relu": "relu", "gelu_exact": "gelu"}),
        ),
        parts=(ConfigPart(("word_embed_proj_dim",), read_projection), biases(enable_bias=MATRICES), unread("init_std")),
        expected={"do_layer_norm_before": True, "layer_norm_elementwise_affine": True, "_remove_final_layer_norm": False},
        absent={"enable_bias": True},
    ),
)
