"""gpt-oss: OpenAI 2025 (arXiv 2508.10925). Read for planning: weights are neither read nor written here yet.

The bounds of its activation change no count of operations that is made here.
"""

from __future__ import annotations

from typing import Any

from trainer.shared.families.family import MATRICES, ConfigKey, Family, HubFormat
from trainer.shared.families.parts import ROPE, ROUTING, WINDOW, Config, ConfigPart, biases, unread


def read_router(config: Config, given: Config) -> dict[str, Any]:
    """Reads the router, which has a bias."""
    return {"experts.router_bias": True}


FAMILY = Family(
    name="gpt_oss",
    title="gpt_oss (gpt-oss)",
    defaults={"biases": MATRICES},
    attention_sinks=True,
    hub=HubFormat(
        model_type="gpt_oss",
        architecture="GptOssForCausalLM",
        keys=(
            ConfigKey("layers", "num_hidden_layers"),
            ConfigKey("hidden", "hidden_size"),
            ConfigKey("heads", "num_attention_heads"),
            ConfigKey("kv_heads", "num_key_value_heads", default=None),
            ConfigKey("head_width", "head_dim", default=64),
            ConfigKey("ffn", "intermediate_size"),
            ConfigKey("seq", "max_position_embeddings"),
            ConfigKey("activation", "hidden_act", words={"swiglu": "silu"}),
            ConfigKey("norm_eps", "rms_norm_eps", default=1e-5),
            ConfigKey("experts.count", "num_local_experts", older="num_experts"),
            ConfigKey("experts.active", "num_experts_per_tok", older="experts_per_token", default=4),
        ),
        parts=(
            *(ROPE, WINDOW, ROUTING, ConfigPart((), read_router), unread("swiglu_limit", "swiglu_alpha", "initial_context_length")),
            biases(attention_bias=("qkv", "output"), always=("up", "down")),
        ),
        absent={"attention_bias": True, "rope_theta": 150000.0, "sliding_window": 128, "sliding_window_pattern": 2},
    ),
)
