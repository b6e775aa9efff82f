"""OLMo 3: Ai2 2025. Read for planning: weights are neither read nor written here yet."""

from __future__ import annotations

from typing import Any

from trainer.shared.families.family import ConfigKey, Family, HubFormat
from trainer.shared.families.parts import ATTENTION_BIAS, FULL, ROPE, SLIDING, WINDOW, Config, ConfigPart, NotUnderstood, read_rope


def read_ropes(config: Config, given: Config) -> dict[str, Any]:
    """Reads the scaling of positions, which applies only to the blocks that attend to everything."""
    ropes = config.get("rope_parameters") or {}
    if FULL not in ropes:
        found = read_rope(config, given)
        local = found["rope_theta"]
    else:
        found, near = (read_rope({**config, "rope_parameters": ropes[kind]}, given) for kind in (FULL, SLIDING))
        local = near["rope_theta"]
        if near["rope.kind"] != "default":
            raise NotUnderstood(f"rope_type={near['rope.kind']!r} of {SLIDING}")
    return found if found["rope.kind"] == "default" and found["rope_theta"] == local else {**found, "rope.local_theta": local}


FAMILY = Family(
    name="olmo3",
    defaults={"norm_at": "after", "qk_norm": "width"},
    hub=HubFormat(
        model_type="olmo3",
        architecture="Olmo3ForCausalLM",
        keys=(
            ConfigKey("layers", "num_hidden_layers"),
            ConfigKey("hidden", "hidden_size"),
            ConfigKey("heads", "num_attention_heads"),
            ConfigKey("kv_heads", "num_key_value_heads", default=None),
            ConfigKey("ffn", "intermediate_size"),
            ConfigKey("seq", "max_position_embeddings"),
            ConfigKey("activation", "hidden_act", words={"swiglu": "silu"}),
            ConfigKey("norm_eps", "rms_norm_eps", default=1e-5),
        ),
        parts=(ConfigPart(ROPE.names, read_ropes), WINDOW, ATTENTION_BIAS),
        absent={"rope_theta": 5e5, "sliding_window": 4096, "sliding_window_pattern": 4},
    ),
)
