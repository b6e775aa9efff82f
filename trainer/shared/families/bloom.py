"""BLOOM: Le Scao et al. 2022. Published models: its table 3."""

from __future__ import annotations

from trainer.shared.families.family import MATRICES, ConfigKey, Family, FamilyDefaults, HubFormat, ReferenceModel
from trainer.shared.families.gguf import GgufFormat

FAMILY = Family(
    name="bloom",
    order=2,
    defaults={"positions": "alibi", "norm": "layer", "biases": MATRICES, "activation": "gelu", "tied": True},
    embedding_norm=True,
    embedding_dropout=False,
    hub=HubFormat(
        model_type="bloom",
        architecture="BloomForCausalLM",
        keys=(
            ConfigKey("layers", "n_layer", older="num_hidden_layers"),
            ConfigKey("hidden", "hidden_size", older="n_embed"),
            ConfigKey("heads", "n_head", older="num_attention_heads"),
            ConfigKey("seq", "seq_length", default=2048),
            ConfigKey("norm_eps", "layer_norm_epsilon", default=1e-5),
            *(ConfigKey("dropout", name, read=False) for name in ("hidden_dropout", "attention_dropout")),
        ),
        constants={"apply_residual_connection_post_layernorm": False},
        root="transformer.",
        ends={"embedding.tokens": "word_embeddings", "embedding.norm": "word_embeddings_layernorm", "head.norm": "ln_f"},
        blocks="h",
        block={
            "attention_norm": "input_layernorm",
            "attention.qkv": "self_attention.query_key_value",
            "attention.output": "self_attention.dense",
            "mlp_norm": "post_attention_layernorm",
            "mlp.up": "mlp.dense_h_to_4h",
            "mlp.down": "mlp.dense_4h_to_h",
        },
        computed=(".self_attention.bias",),
    ),
    gguf=GgufFormat(architecture="bloom", arranged=dict.fromkeys(("query_key_value.weight", "query_key_value.bias"), "by kind")),
    published=FamilyDefaults(
        models=(
            ReferenceModel("560M", 24, 1024, 16, 3e-4),
            ReferenceModel("1.1B", 24, 1536, 16, 2.5e-4),
            ReferenceModel("1.7B", 24, 2048, 16, 2e-4),
            ReferenceModel("3B", 30, 2560, 32, 1.6e-4),
            ReferenceModel("7.1B", 30, 4096, 32, 1.2e-4),
            ReferenceModel("176B", 70, 14336, 112, 0.6e-4),
        ),
        vocab=250880,
        batch_tokens=((1.1e9, 256 * 2048), (1.7e9, 512 * 2048), (7.1e9, 512 * 2048), (176e9, 2048 * 2048)),
        warmup_tokens=375e6,
    ),
)
