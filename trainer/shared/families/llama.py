"""LLaMA: Touvron et al. 2023. Published models: its table 2, and Llama 3.1 405B (Dubey et al. 2024, table 3)."""

from __future__ import annotations

from trainer.shared.families.family import ConfigKey, Family, FamilyDefaults, HubFormat, ReferenceModel
from trainer.shared.families.parts import ROPE

FAMILY = Family(
    name="llama",
    order=1,
    hub=HubFormat(
        model_type="llama",
        architecture="LlamaForCausalLM",
        keys=(
            ConfigKey("layers", "num_hidden_layers"),
            ConfigKey("hidden", "hidden_size"),
            ConfigKey("heads", "num_attention_heads"),
            ConfigKey("kv_heads", "num_key_value_heads", default=None),
            ConfigKey("head_width", "head_dim", default=None),
            ConfigKey("ffn", "intermediate_size"),
            ConfigKey("seq", "max_position_embeddings"),
            ConfigKey("activation", "hidden_act", words={"swiglu": "silu"}),
            ConfigKey("norm_eps", "rms_norm_eps", default=1e-6),
        ),
        parts=(ROPE,),
        constants={"attention_bias": False, "mlp_bias": False},
        root="model.",
        ends={"embedding.tokens": "embed_tokens", "head.norm": "norm"},
        blocks="layers",
        block={
            "attention_norm": "input_layernorm",
            "attention.qkv": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
            "attention.output": "self_attn.o_proj",
            "mlp_norm": "post_attention_layernorm",
            "mlp.up": "mlp.gate_proj mlp.up_proj",
            "mlp.down": "mlp.down_proj",
        },
        forms={"attention.qkv": "apart", "mlp.up": "stacked"},
        computed=(".rotary_emb.inv_freq",),
    ),
    gguf="llama",
    gguf_arranged={"q_proj.weight": "pairs of queries", "k_proj.weight": "pairs of keys"},
    published=FamilyDefaults(
        models=(
            ReferenceModel("160M", 12, 768, 12, 3e-4),  # below 7B: GPT-3's depth and width, LLaMA's everything else
            ReferenceModel("1.3B", 24, 2048, 16, 3e-4),
            ReferenceModel("7B", 32, 4096, 32, 3e-4),
            ReferenceModel("13B", 40, 5120, 40, 3e-4),
            ReferenceModel("30B", 60, 6656, 52, 1.5e-4),
            ReferenceModel("65B", 80, 8192, 64, 1.5e-4),
            ReferenceModel("405B", 126, 16384, 128, 0.8e-4),
        ),
        vocab=32000,
        batch_tokens=((7e9, 2048 * 2048), (70e9, 2048 * 2048), (405e9, 4 * 2048 * 2048)),
        warmup_tokens=2000 * 2048 * 2048,
        ffn_multiple=256,
        grouped_above=67e9,  # Llama 2 70B, Llama 3.1 405B
    ),
)
