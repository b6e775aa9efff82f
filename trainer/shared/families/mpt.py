"""MPT: MosaicML 2023. Read for planning: weights are neither read nor written here yet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.shared.families.family import MATRICES, ConfigKey, Family, HubFormat
from trainer.shared.families.parts import Config, ConfigPart, NotUnderstood, unread, whole

EXPECTED = {"attn_type": "multihead_attention", "alibi_bias_max": 8, "clip_qkv": None, "prefix_lm": False}
"""Keys of ``attn_config`` with the values that a file without them implies."""
KNOWN = {*EXPECTED, "alibi", "qk_ln", "softmax_scale", "attn_impl", "attn_pdrop", "attn_uses_sequence_id", "model_type"}


def read_attention(config: Config, given: Config) -> dict[str, Any]:
    """Reads ``attn_config``: positions, norms of queries and keys, the factor of scores."""
    attention = config.get("attn_config") or {}
    if not isinstance(attention, Mapping):
        raise NotUnderstood(f"attn_config={attention!r}")
    for name, value in attention.items():
        if (name in EXPECTED and value not in (None, EXPECTED[name])) or (value and name not in KNOWN):
            raise NotUnderstood(f"{name}={value!r} of attn_config")
    alibi = "alibi" if attention.get("alibi", True) else None
    return {
        "positions": alibi or ("learned" if config.get("learned_pos_emb", True) else "none"),
        "qk_norm": "width" if attention.get("qk_ln") else "none",
        "attention_scale": attention.get("softmax_scale"),
    }


def read_widths(config: Config, given: Config) -> dict[str, Any]:
    """Reads the MLP as a multiple of the width; biases of matrices and norms, all or none."""
    found = {"ffn": whole(config, "expansion_ratio", 4) * given["hidden"]}
    return found if config.get("no_bias", True) else found | {"biases": list(MATRICES), "norm": "layer"}


def read_scale(config: Config, given: Config) -> dict[str, Any]:
    """Reads the factor of logits, a number or ``inv_sqrt_d_model``."""
    scale = config.get("logit_scale")
    return {} if scale is None else {"logit_scale": given["hidden"] ** -0.5 if scale == "inv_sqrt_d_model" else scale}


FAMILY = Family(
    name="mpt",
    defaults={"positions": "alibi", "norm": "layer_no_bias", "activation": "gelu_exact", "tied": True},
    hub=HubFormat(
        model_type="mpt",
        architecture="MptForCausalLM",
        keys=(
            ConfigKey("layers", "n_layers"),
            ConfigKey("hidden", "d_model"),
            ConfigKey("heads", "n_heads"),
            ConfigKey("seq", "max_seq_len"),
            ConfigKey("norm_eps", "layer_norm_epsilon", default=1e-5),
        ),
        parts=(
            ConfigPart(("attn_config", "learned_pos_emb"), read_attention),
            ConfigPart(("expansion_ratio", "no_bias"), read_widths),
            ConfigPart(("logit_scale",), read_scale),
            unread("init_config", "init_device", "norm_type", "tokenizer_name", "verbose"),
        ),
        expected={"embedding_fraction": 1.0},
    ),
)
