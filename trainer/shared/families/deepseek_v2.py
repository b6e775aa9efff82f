"""DeepSeek-V2: DeepSeek-AI 2024 (arXiv 2405.04434)."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from trainer.shared.families.family import LLAMA, MIXTURE, SHARED_EXPERTS, ConfigKey, Family
from trainer.shared.families.gguf import EXPERTS, GgufField, GgufFormat
from trainer.shared.families.parts import GROUPS, LATENT, ROPE, ROUTING, SHARED, Config

ROUTERS = {1: "softmax", 2: "sigmoid"}
"""By their numbers in GGUF (``ExpertGatingFuncType`` of the package ``gguf``)."""
LITE = 27
GATING, LOG_MULTIPLIER, SHARED_COUNT = "expert_gating_func", "rope.scaling.yarn_log_multiplier", "expert_shared_count"


def log_multiplier(model: Config) -> float | None:
    """Returns what llama.cpp's YaRN needs to scale scores: they are multiplied by (1 + m ln factor)^2 / sqrt(width of a query), and
    sines and cosines by nothing."""
    if model["rope.kind"] != "yarn" or model["rope.factor"] == 1:
        return None
    magnitude = math.sqrt(model["attention_scale"] * math.sqrt(model["head_width"] + model["latent.rotary"]))
    return float(f"{(magnitude - 1) / math.log(model['rope.factor']):.9g}")


def implied(given: Config) -> dict[str, Any]:
    """Returns the keys that fields of several meanings tell: a key's length has its position's, shared experts are counted. All networks
    there but that of 27 blocks (DeepSeek-V2-Lite) have latents of queries, so that a file without says of none how wide they are."""
    rope, width = given["rope"], given["head_width"]
    shared = given.get(SHARED_COUNT, 0) * given.get("experts.ffn", 0)
    told = {"head_width": width - given.get("latent.rotary", 0), "experts.shared_ffn": shared}
    if given["layers"] != LITE and not given.get("latent.query_rank"):
        told["latent.query_rank"] = 1
    if rope["kind"] != "yarn":
        return told
    magnitude = 1 + given.get(LOG_MULTIPLIER, 0.0) * math.log(rope.get("factor", 1.0))
    return told | {"attention_scale": magnitude**2 / math.sqrt(width), "rope.magnitude": 1.0}


FILE = GgufFormat(
    architecture="deepseek2",
    fields={
        **EXPERTS,
        "experts.ffn": GgufField("expert_feed_forward_length"),
        "experts.dense_layers": GgufField("leading_dense_block_count"),
        "experts.normalized": GgufField("expert_weights_norm"),
        "experts.scale": GgufField("expert_weights_scale"),
        "experts.router": GgufField(GATING, ROUTERS.get, {name: number for number, name in ROUTERS.items()}.get),
        "latent.kv_rank": GgufField("attention.kv_lora_rank"),
        "latent.query_rank": GgufField("attention.q_lora_rank", write=lambda rank: rank or None),
        "latent.rotary": GgufField("rope.dimension_count"),
        "latent.value": GgufField("attention.value_length"),
    },
    stated={
        "attention.key_length": lambda model: model["head_width"] + model["latent.rotary"],
        SHARED_COUNT: lambda model: model["experts.shared_ffn"] // (model["experts.ffn"] or model["ffn"]) or None,
        LOG_MULTIPLIER: log_multiplier,
    },
    implied=implied,
    suits=lambda fields: fields.get(GATING) != 2,
    renamed={"e_score_correction_bias": "e_score_correction.bias"},
)
"""The form with keys and values of every head, which are made from the latent as in training (``attn_kv_b``). llama.cpp's choice among
groups of experts is that of the third version, so this one has none there."""

FAMILY = Family(
    name="deepseek_v2",
    hub=dataclasses.replace(
        LLAMA,
        model_type="deepseek_v2",
        architecture="DeepseekV2ForCausalLM",
        keys=(
            ConfigKey("layers", "num_hidden_layers"),
            ConfigKey("hidden", "hidden_size"),
            ConfigKey("heads", "num_attention_heads"),
            ConfigKey("head_width", "qk_nope_head_dim", default=128),
            ConfigKey("latent.kv_rank", "kv_lora_rank", default=512),
            ConfigKey("latent.rotary", "qk_rope_head_dim", default=64),
            ConfigKey("latent.value", "v_head_dim", default=128),
            ConfigKey("ffn", "intermediate_size"),
            ConfigKey("seq", "max_position_embeddings"),
            ConfigKey("activation", "hidden_act", words={"swiglu": "silu"}),
            ConfigKey("norm_eps", "rms_norm_eps", default=1e-6),
            ConfigKey("experts.count", "n_routed_experts"),
            ConfigKey("experts.active", "num_experts_per_tok"),
            ConfigKey("experts.ffn", "moe_intermediate_size"),
            ConfigKey("experts.dense_layers", "first_k_dense_replace", default=0),
            ConfigKey("experts.router", "scoring_func", default="softmax"),
            ConfigKey("experts.normalized", "norm_topk_prob", default=False),
            ConfigKey("experts.scale", "routed_scaling_factor", default=1.0),
        ),
        parts=(ROPE, LATENT, SHARED, ROUTING, GROUPS),
        expected={"moe_layer_freq": 1, "attention_bias": False, "mlp_bias": False, "norm_topk_prob": False},
        block={
            **{ours: theirs for ours, theirs in LLAMA.block.items() if ours != "attention.qkv"},
            "attention.query": "self_attn.q_proj",
            "attention.query.compress": "self_attn.q_a_proj",
            "attention.query.norm": "self_attn.q_a_layernorm",
            "attention.query.expand": "self_attn.q_b_proj",
            "attention.latent.compress": "self_attn.kv_a_proj_with_mqa",
            "attention.latent.norm": "self_attn.kv_a_layernorm",
            "attention.latent.expand": "self_attn.kv_b_proj",
        },
        mixture=MIXTURE | SHARED_EXPERTS,
        absent={"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "q_lora_rank": 1536, "topk_method": "greedy"},
    ),
    gguf=FILE,
)
