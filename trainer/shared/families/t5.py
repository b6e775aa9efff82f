"""T5: Raffel et al. 2020 (arXiv 1910.10683); its version 1.1 and mT5 (Shazeer 2020, arXiv 2002.05202; Xue et al. 2021, arXiv 2010.11934).

The defaults are those of 1.1 and mT5: a gated MLP and a head of its own. The first version has ``activation=relu`` and ``tied=true``.

Published models: those of 1.1, and with the same network the NeMo launcher's 23B and 41B; learning rates and batches are the launcher's,
for AdamW. Blocks are those of both stacks.
"""

from __future__ import annotations

from typing import Any

from trainer.shared.families.family import ConfigKey, Family, FamilyDefaults, HubFormat, ReferenceModel
from trainer.shared.families.parts import Config, ConfigPart, NotUnderstood, unread, whole

MULTILINGUAL = "mt5"
"""Model type of mT5, whose head is always its own; its MLP has a gate unless a file says otherwise."""
RELATIVE = "layer.0.SelfAttention.relative_attention_bias"
ATTENTION = {
    "attention_norm": "layer.0.layer_norm",
    "attention.qkv": "layer.0.SelfAttention.q layer.0.SelfAttention.k layer.0.SelfAttention.v",
    "attention.output": "layer.0.SelfAttention.o",
}
CROSS = {
    "cross_norm": "layer.1.layer_norm",
    "cross.query": "layer.1.EncDecAttention.q",
    "cross.kv": "layer.1.EncDecAttention.k layer.1.EncDecAttention.v",
    "cross.output": "layer.1.EncDecAttention.o",
}


def mlp(layer: str) -> dict[str, str]:
    """Returns the names of the MLP of a block whose last layer is ``layer``."""
    return {
        "mlp_norm": f"{layer}.layer_norm",
        "mlp.up": f"{layer}.DenseReluDense.wi_0 {layer}.DenseReluDense.wi_1",
        "mlp.down": f"{layer}.DenseReluDense.wo",
    }


def read_stacks(config: Config, given: Config) -> dict[str, Any]:
    """Reads the blocks of both stacks; a file that says nothing of the decoder means as many as the encoder's."""
    encoder, decoder = whole(config, "num_layers"), whole(config, "num_decoder_layers", whole(config, "num_layers"))
    for name, blocks in (("num_layers", encoder), ("num_decoder_layers", decoder)):
        if not blocks:
            raise NotUnderstood(f"{name}={config.get(name)!r}")
    return {"layers": encoder + decoder, "encoder_layers": encoder}


def write_stacks(model: Config) -> dict[str, Any]:
    """Inverts ``read_stacks``."""
    return {"num_layers": model["encoder_layers"], "num_decoder_layers": model["layers"] - model["encoder_layers"]}


def read_head(config: Config, given: Config) -> dict[str, Any]:
    """Reads whether the head is the embedding. Where it is, what it multiplies is scaled; newer files say the latter, older ones the
    former, and those of mT5 neither rightly."""
    if config.get("model_type") == MULTILINGUAL:
        return {"tied": False}
    tied = config.get("tie_word_embeddings")
    return {"tied": bool(config.get("scale_decoder_outputs", tied is None or tied))}


def read_gate(config: Config, given: Config) -> dict[str, Any]:
    """Reads the activation of mT5 where its file leaves it out."""
    return {"activation": "geglu"} if config.get("model_type") == MULTILINGUAL and "feed_forward_proj" not in config else {}


FAMILY = Family(
    name="t5",
    title="t5 (with mT5)",
    order=3,
    defaults={"positions": "relative", "activation": "geglu"},
    encoder_decoder=True,
    attention_scale=1.0,
    init_scale=1.0,
    final_dropout=True,
    wide_embedding=True,
    tied_head_scaled=True,
    hub=HubFormat(
        model_type="t5",
        further_types=(MULTILINGUAL,),
        architecture="T5ForConditionalGeneration",
        keys=(
            ConfigKey("hidden", "d_model"),
            ConfigKey("heads", "num_heads"),
            ConfigKey("head_width", "d_kv", default=64),
            ConfigKey("ffn", "d_ff"),
            ConfigKey("seq", "n_positions", default=512),  # a habit of old files: relative positions have no end
            ConfigKey("relative_buckets", "relative_attention_num_buckets", default=32),
            ConfigKey("relative_distance", "relative_attention_max_distance", default=128),
            ConfigKey("norm_eps", "layer_norm_epsilon", default=1e-6),
            ConfigKey(
                "activation",
                "feed_forward_proj",
                words={"relu": "relu", "geglu": "gated-gelu", "swiglu": "gated-silu", "gelu": "gelu_new", "gelu_exact": "gelu"},
                synonyms={"gated-gelu_new": "geglu"},
            ),
        ),
        parts=(
            ConfigPart(("num_layers", "num_decoder_layers"), read_stacks, write_stacks),
            ConfigPart(("scale_decoder_outputs",), read_head, lambda model: {"scale_decoder_outputs": model["tied"]}),
            ConfigPart((), read_gate),
            unread("dropout_rate", "initializer_factor", "dense_act_fn", "is_gated_act"),  # the last two repeat feed_forward_proj
        ),
        constants={"is_encoder_decoder": True},
        root="",
        ends={
            "embedding.tokens": "shared",
            "embedding.tables.0": f"encoder.block.0.{RELATIVE}",
            "embedding.tables.1": f"decoder.block.0.{RELATIVE}",
            "encoder_end.norm": "encoder.final_layer_norm",
            "head.norm": "decoder.final_layer_norm",
        },
        blocks="encoder.block",
        block={**ATTENTION, **mlp("layer.1")},
        decoder_blocks="decoder.block",
        decoder_block={**ATTENTION, **CROSS, **mlp("layer.2")},
        ungated="wi",
        forms={"attention.qkv": "by kind", "cross.kv": "keys and values", "mlp.up": "stacked"},
        computed=("embed_tokens.weight", "EncDecAttention.relative_attention_bias.weight"),
    ),
    published=FamilyDefaults(
        models=(
            ReferenceModel("small", 16, 512, 6, 1e-4, ffn=1024, head_width=64),
            ReferenceModel("base", 24, 768, 12, 1e-4, ffn=2048),
            ReferenceModel("large", 48, 1024, 16, 1e-4, ffn=2816),
            ReferenceModel("xl", 48, 2048, 32, 1e-4, ffn=5120),
            ReferenceModel("xxl", 48, 4096, 64, 1e-4, ffn=10240),
            ReferenceModel("23B", 72, 5120, 80, 1e-4, ffn=10880),
            ReferenceModel("41B", 96, 6144, 96, 1e-4, ffn=10880),
        ),
        vocab=32128,
        batch_tokens=((2e8, 1.05e6), (1e11, 1.0e6)),
        dropout=0.1,
        weight_decay=0.01,
        warmup_tokens=1e10,
        ffn_multiple=64,
        seq=512,
    ),
)
