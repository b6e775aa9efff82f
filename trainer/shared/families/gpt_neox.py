"""GPT-NeoX and Pythia: Black et al. 2022, Biderman et al. 2023. Attention and MLP in parallel, a quarter of each head turns."""

from __future__ import annotations

from typing import Any

from trainer.shared.families.family import MATRICES, ConfigKey, Family, HubFormat
from trainer.shared.families.gguf import GgufField, GgufFormat
from trainer.shared.families.parts import ROPE, Config, ConfigPart, biases, read_rope, write_rope

ACTIVATIONS = {"gelu_exact": "gelu", "gelu": "gelu_new", "relu": "relu", "squared_relu": "relu2"}


def read(config: Config, given: Config) -> dict[str, Any]:
    """Reads rotary positions by this family's older names."""
    older = {"rotary_pct": config.get("rotary_pct", 0.25), "rope_theta": config.get("rotary_emb_base", config.get("rope_theta"))}
    return read_rope({**config, **older}, given)


def write(model: Config) -> dict[str, Any]:
    """Inverts ``read``; the share is written with the angles even if all dimensions turn, which is not the default."""
    known, share = write_rope(model), model["rope.share"]
    known["rope_parameters"]["partial_rotary_factor"] = share
    return known | {"rotary_pct": share, "rotary_emb_base": model["rope_theta"]}


PARALLEL = ConfigPart(
    ("use_parallel_residual",),
    lambda config, given: {"residual": "parallel" if config.get("use_parallel_residual", True) else "sequential"},
    lambda model: {"use_parallel_residual": model["residual"] == "parallel"},
)
FAMILY = Family(
    name="gpt_neox",
    defaults={"norm": "layer", "biases": MATRICES, "residual": "parallel", "activation": "gelu_exact"},
    hub=HubFormat(
        model_type="gpt_neox",
        architecture="GPTNeoXForCausalLM",
        keys=(
            ConfigKey("layers", "num_hidden_layers"),
            ConfigKey("hidden", "hidden_size"),
            ConfigKey("heads", "num_attention_heads"),
            ConfigKey("ffn", "intermediate_size"),
            ConfigKey("seq", "max_position_embeddings"),
            ConfigKey("activation", "hidden_act", words=ACTIVATIONS, synonyms=dict.fromkeys(("gelu_fast", "gelu_pytorch_tanh"), "gelu")),
            ConfigKey("norm_eps", "layer_norm_eps", default=1e-5),
        ),
        parts=(
            ConfigPart((*ROPE.names, "rotary_emb_base"), read, write),
            PARALLEL,
            biases(True, always=("up", "down"), attention_bias=("qkv", "output")),
        ),
        root="gpt_neox.",
        ends={"embedding.tokens": "embed_in", "head.norm": "final_layer_norm"},
        blocks="layers",
        block={
            "attention_norm": "input_layernorm",
            "attention.qkv": "attention.query_key_value",
            "attention.output": "attention.dense",
            "mlp_norm": "post_attention_layernorm",
            "mlp.up": "mlp.dense_h_to_4h",
            "mlp.down": "mlp.dense_4h_to_h",
        },
        output="embed_out.weight",
        computed=(".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"),
    ),
    gguf=GgufFormat(
        architecture="gptneox",
        fields={
            "residual": GgufField(
                "use_parallel_residual", lambda there: "parallel" if there else "sequential", lambda ours: ours == "parallel"
            )
        },
        arranged=dict.fromkeys(("query_key_value.weight", "query_key_value.bias"), "by kind"),
        partial=True,
    ),
)
