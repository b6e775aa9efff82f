"""The text decoder of Llama 4: Meta 2025. Read for planning: weights are neither read nor written here yet.

Its norm of queries and keys has no parameters, and is not told apart from none. Attention in chunks is counted as a window of that
length: the same for sequences of up to one chunk, at most twice the work for longer ones.
"""

from __future__ import annotations

from typing import Any

from trainer.shared.families.family import ConfigKey, Family, HubFormat
from trainer.shared.families.parts import FULL, ROPE, ROUTING, Config, ConfigPart, NotUnderstood, each_so_many_th, unread, whole

CHUNKED = "chunked_attention"


def read_experts(config: Config, given: Config) -> dict[str, Any]:
    """Reads the experts: routed and shared ones have one width, an MLP another; ``moe_layers`` lists the blocks of experts."""
    every, blocks = whole(config, "interleave_moe_layer_step", 1), config.get("moe_layers")
    if blocks:
        every = each_so_many_th([i in blocks for i in range(given["layers"])], f"moe_layers={blocks!r}")
    width = whole(config, "intermediate_size")
    return {"experts.every": every, "experts.ffn": width, "experts.shared_ffn": width}


def read_pattern(config: Config, given: Config) -> dict[str, Any]:
    """Reads the pattern of blocks: those without positions see everything, the others a chunk."""
    turned = config.get("no_rope_layers") or []
    skipped = whole(config, "no_rope_layer_interval", 4)
    if turned:
        skipped = each_so_many_th([not flag for flag in turned[: given["layers"]]], f"no_rope_layers={turned!r}")
    chunk, types = whole(config, "attention_chunk_size"), config.get("layer_types")
    if types and types != [FULL if not chunk or (skipped and (i + 1) % skipped == 0) else CHUNKED for i in range(given["layers"])]:
        raise NotUnderstood(f"layer_types={types!r}, which are not those of no_rope_layers,")
    return {"rope.skip_every": skipped} | ({"window": chunk, "full_every": skipped} if chunk else {})


FAMILY = Family(
    name="llama4",
    hub=HubFormat(
        model_type="llama4_text",
        architecture="Llama4ForCausalLM",
        keys=(
            ConfigKey("layers", "num_hidden_layers"),
            ConfigKey("hidden", "hidden_size"),
            ConfigKey("heads", "num_attention_heads"),
            ConfigKey("kv_heads", "num_key_value_heads", default=None),
            ConfigKey("head_width", "head_dim", default=None),
            ConfigKey("ffn", "intermediate_size_mlp"),
            ConfigKey("seq", "max_position_embeddings"),
            ConfigKey("activation", "hidden_act", words={"swiglu": "silu"}),
            ConfigKey("norm_eps", "rms_norm_eps", default=1e-5),
            ConfigKey("experts.count", "num_local_experts"),
            ConfigKey("experts.active", "num_experts_per_tok", default=1),
        ),
        parts=(
            *(ROPE, ROUTING),
            ConfigPart(("intermediate_size", "interleave_moe_layer_step", "moe_layers"), read_experts),
            ConfigPart(("no_rope_layers", "no_rope_layer_interval", "attention_chunk_size", "layer_types"), read_pattern),
            unread("use_qk_norm", "attn_temperature_tuning", "attn_scale", "floor_scale", "for_llm_compressor", "cache_implementation"),
        ),
        expected={"attention_bias": False},
        absent={"rope_theta": 5e5, "attention_chunk_size": 8192},
    ),
)
