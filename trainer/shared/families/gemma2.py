"""Gemma 2: Gemma Team 2024. Norms before and after, GeGLU, caps of scores and logits, a window in every other block."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trainer.shared.families.family import LLAMA, POST_NORMS, ConfigKey, Family
from trainer.shared.families.gguf import WINDOW, GgufField, GgufFormat, gemma
from trainer.shared.families.parts import ATTENTION_BIAS, ROPE, Config, ConfigPart, inverse, read_window, write_window

NAMES = ("sliding_window", "layer_types", "query_pre_attn_scalar")


def scales(every: int) -> ConfigPart:
    """Returns the part with windows, by default in all blocks but each ``every``-th, and the factors of embeddings and scores."""

    def read(config: Config, given: Config) -> dict[str, Any]:
        older = {"sliding_window": 4096, "sliding_window_pattern": every} if config.get("layer_types") is None else {}
        scale = config.get("query_pre_attn_scalar", 256) ** -0.5
        return {**read_window({**older, **config}, given), "attention_scale": scale, "embedding_scale": given["hidden"] ** 0.5}

    def write(model: Config) -> dict[str, Any]:
        window = write_window(model)
        return {
            "sliding_window": window["sliding_window"],
            "layer_types": window["layer_types"],
            "query_pre_attn_scalar": inverse(model["attention_scale"] ** 2),
        }

    return ConfigPart((*NAMES, "sliding_window_pattern"), read, write)


HUB = replace(
    LLAMA,
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    keys=(
        *(key for key in LLAMA.keys if key.ours not in ("activation", "head_width")),
        ConfigKey("head_width", "head_dim", default=256),
        ConfigKey("activation", "hidden_activation", older="hidden_act", words={"geglu": "gelu_pytorch_tanh"}),
        ConfigKey("score_cap", "attn_logit_softcapping", default=50.0),
        ConfigKey("logit_cap", "final_logit_softcapping", default=30.0),
    ),
    parts=(ROPE, ATTENTION_BIAS, scales(2)),
    expected={"use_bidirectional_attention": False},
    block={**LLAMA.block, **POST_NORMS, "mlp_norm": "pre_feedforward_layernorm"},
)
FAMILY = Family(
    name="gemma2",
    defaults={"norm_at": "both", "activation": "geglu", "tied": True},
    norm_offset=True,
    hub=HUB,
    gguf=GgufFormat(
        architecture="gemma2",
        fields={
            "score_cap": GgufField("attn_logit_softcapping"),
            "logit_cap": GgufField("final_logit_softcapping"),
            "window": WINDOW,
        },
        implied=lambda given: gemma(given, layers_27b=46, every=2),
    ),
)
