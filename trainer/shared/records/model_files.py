"""Between ``ModelConfig`` and the ``config.json`` of Hugging Face's GPT-2, LLaMA and BLOOM, and what a folder of weights is a model of."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.shared.records.artifacts import GGUF, GGUF_FILE, ArtifactKind, checkpoint_facts, find_artifact
from trainer.shared.records.gguf_header import model_in, read_header
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.read import from_dict
from trainer.shared.run.rules import resolve_model
from trainer.shared.run.schema import ModelConfig, ResolvedModelConfig

ACTIVATIONS = {"gelu": "gelu_new", "squared_relu": "relu2"}
"""GPT-2's ``activation_function``; ours are the tanh form of GELU and Primer's max(x, 0)^2."""


READ = {
    "gpt2": "n_layer n_embd n_head n_inner n_positions activation_function layer_norm_epsilon attention_head_type "
    "scale_attn_by_inverse_layer_idx scale_attn_weights add_cross_attention",
    "llama": "num_hidden_layers hidden_size num_attention_heads num_key_value_heads intermediate_size max_position_embeddings head_dim "
    "hidden_act rms_norm_eps rope_parameters rope_scaling rope_theta attention_bias mlp_bias",
    "bloom": "n_layer num_hidden_layers hidden_size n_embed n_head num_attention_heads seq_length layer_norm_epsilon "
    "apply_residual_connection_post_layernorm",
}
"""Keys that say what the model is, and are read or refused by their value; beside ``vocab_size``, ``tie_word_embeddings``."""
NO_MATTER = re.compile(
    r"_.*|architectures|model_type|auto_map|.*_token_ids?|(torch_)?dtype|transformers_version|tokenizer_class|use_cache|use_bfloat16|"
    r"output_.*|return_dict.*|summary_.*|task_specific_params|(id2label|label2id|num_labels|problem_type|finetuning_task|prefix)|"
    r".*(dropout|pdrop)|initializer_range|chunk_size_feed_forward|torchscript|gradient_checkpointing|attn_implementation|"
    r"n_ctx|max_sequence_length|unsloth_.*|reorder_and_upcast_attn|attention_softmax_in_fp32|pretraining_tp|slow_but_exact|"
    r"masked_softmax_fusion|bias_dropout_fusion|skip_bias_add.*|offset_alibi|do_sample|temperature|top_[kp]|typical_p|num_beam.*|"
    r"num_return_sequences|(max|min)_length|(repetition|length|diversity)_penalty|.*no_repeat_ngram_size|early_stopping|remove_invalid_values|"
    r"bad_words_ids|suppress_tokens|begin_suppress_tokens|quantization_config"
)
"""Keys of a config.json that do not change the model: labels, generation, dropout, ways to compute the same, storage of weights."""


def to_config(model: ResolvedModelConfig) -> dict[str, Any]:
    """``config.json`` of a resolved model; ``ConfigError`` if the family's architecture there cannot express it."""
    _check_expressible(model)
    common = {"vocab_size": model.vocab, "tie_word_embeddings": model.tied}
    return {"gpt": _gpt2, "llama": _llama, "bloom": _bloom}[model.family](model) | common


def from_config(config: Mapping[str, Any]) -> ResolvedModelConfig:
    """The resolved model of a ``config.json``; ``ConfigError`` for an architecture, option or value that we do not have."""
    read = {"gpt2": _from_gpt2, "llama": _from_llama, "bloom": _from_bloom}.get(str(config.get("model_type")))
    if read is None:
        raise ConfigError(f"model_type={config.get('model_type')!r} cannot be imported; use gpt2, llama or bloom")
    _check_understood(config)
    try:
        given = read(config)
    except KeyError as error:
        raise ConfigError(f"config.json has no {error.args[0]}, which a {config['model_type']} model needs") from None
    try:
        return resolve_model(from_dict(ModelConfig, vars(given), "model."))
    except ConfigError as error:
        raise ConfigError(f"config.json says what no model here has: {error}") from None


def read_model(source: Path) -> ResolvedModelConfig:
    """The model that ``config.json`` in ``source`` describes; ``ConfigError`` if it cannot be read, or is none that we have."""
    try:
        config = json.loads((source / "config.json").read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("it is no JSON object")
        return from_config(config)
    except ConfigError:
        raise
    except (OSError, ValueError, AttributeError, TypeError, ArithmeticError, RecursionError) as error:
        raise ConfigError(f"cannot read {source / 'config.json'}: {error}; give a folder in the Hugging Face layout") from None


def model_of(folder: Path) -> ResolvedModelConfig:
    """The model whose weights are in ``folder``, a checkpoint or a Hugging Face folder. ``ConfigError`` if there are none."""
    found = find_artifact(folder)
    if found is None or found.kind not in (ArtifactKind.CHECKPOINT, ArtifactKind.HUGGINGFACE):
        what = "nothing that is known" if found is None else f"a {found.kind.value}"
        raise ConfigError(f"{folder} holds {what}; give a checkpoint, or a folder with config.json and .safetensors files")
    if found.kind is ArtifactKind.HUGGINGFACE:
        return read_model(folder)
    return resolve_model(from_dict(ModelConfig, checkpoint_facts(folder)[1]["model"], "model."))


def to_import(source: Path) -> tuple[Path, ResolvedModelConfig]:
    """Where the weights to be imported are, a Hugging Face folder or a GGUF file (alone, or ``GGUF_FILE`` of a folder), and their model.
    ``ConfigError`` if there are none that can be read."""
    file = source / GGUF_FILE if (source / GGUF_FILE).is_file() else source
    return file, model_in(*read_header(file), file) if file.suffix == GGUF else read_model(file)


def _check_expressible(model: ResolvedModelConfig) -> None:
    allowed = {"gpt": tuple(ACTIVATIONS), "llama": ("swiglu",), "bloom": ("gelu",)}[model.family]
    if model.activation not in allowed:
        raise ConfigError(
            f"model.activation={model.activation} cannot be exported with model.family={model.family}; its layout has {allowed[0]}"
        )
    if model.family != "llama" and model.kv_heads != model.heads:
        raise ConfigError(
            f"model.kv_heads={model.kv_heads} cannot be exported with model.family={model.family}, which has no grouped queries"
        )
    if model.family == "bloom" and model.ffn != 4 * model.hidden:
        raise ConfigError(
            f"model.ffn={model.ffn} cannot be exported with model.family=bloom, whose MLP is 4 x model.hidden={4 * model.hidden}"
        )


def _gpt2(model: ResolvedModelConfig) -> dict[str, Any]:
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), model.dropout)
    return dropout | {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": model.layers,
        "n_embd": model.hidden,
        "n_head": model.heads,
        "n_inner": model.ffn,
        "n_positions": model.seq,
        "activation_function": ACTIVATIONS[model.activation],
        "layer_norm_epsilon": model.norm_eps,
    }


def _llama(model: ResolvedModelConfig) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "intermediate_size": model.ffn,
        "max_position_embeddings": model.seq,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "attention_bias": False,
        "mlp_bias": False,
    }


def _bloom(model: ResolvedModelConfig) -> dict[str, Any]:
    return {
        "model_type": "bloom",
        "architectures": ["BloomForCausalLM"],
        "n_layer": model.layers,
        "hidden_size": model.hidden,
        "n_head": model.heads,
        "seq_length": model.seq,
        "layer_norm_epsilon": model.norm_eps,
        "hidden_dropout": model.dropout,
        "attention_dropout": model.dropout,
        "apply_residual_connection_post_layernorm": False,
    }


def _from_gpt2(config: Mapping[str, Any]) -> ModelConfig:
    names = {theirs: ours for ours, theirs in ACTIVATIONS.items()} | {"gelu_pytorch_tanh": "gelu"}
    activation = config.get("activation_function", "gelu_new")
    if activation not in names:
        raise ConfigError(f"activation_function={activation!r} cannot be imported; use gelu_new or relu2")
    _refuse(
        config, attention_head_type="multihead", scale_attn_by_inverse_layer_idx=False, scale_attn_weights=True, add_cross_attention=False
    )
    return ModelConfig(
        family="gpt",
        layers=config["n_layer"],
        hidden=config["n_embd"],
        heads=config["n_head"],
        ffn=config.get("n_inner"),
        seq=config["n_positions"],
        vocab=config["vocab_size"],
        tied=config.get("tie_word_embeddings", True),
        activation=names[activation],
        norm_eps=config.get("layer_norm_epsilon", 1e-5),
    )


def _from_llama(config: Mapping[str, Any]) -> ModelConfig:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ConfigError(f"rope_type={kind!r} cannot be imported; only unscaled rotary positions are trained here")
    _refuse(
        config, hidden_act="silu", attention_bias=False, mlp_bias=False, head_dim=config["hidden_size"] // config["num_attention_heads"]
    )
    return ModelConfig(
        family="llama",
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=config["num_attention_heads"],
        kv_heads=config.get("num_key_value_heads"),
        ffn=config["intermediate_size"],
        seq=config["max_position_embeddings"],
        vocab=config["vocab_size"],
        tied=config.get("tie_word_embeddings", False),
        rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
        norm_eps=config.get("rms_norm_eps", 1e-6),
    )


def _from_bloom(config: Mapping[str, Any]) -> ModelConfig:
    _refuse(config, apply_residual_connection_post_layernorm=False)
    hidden = config["hidden_size"] if "hidden_size" in config else config["n_embed"]
    return ModelConfig(
        family="bloom",
        layers=config["n_layer"] if "n_layer" in config else config["num_hidden_layers"],
        hidden=hidden,
        heads=config["n_head"] if "n_head" in config else config["num_attention_heads"],
        seq=config.get("seq_length", 2048),
        vocab=config["vocab_size"],
        tied=config.get("tie_word_embeddings", True),
        norm_eps=config.get("layer_norm_epsilon", 1e-5),
    )


def _check_understood(config: Mapping[str, Any]) -> None:
    """Raises ``ConfigError`` for a key that may make another model than the one that is read here. One that is off (null, false, empty)
    makes none."""
    known = {*READ[config["model_type"]].split(), "vocab_size", "tie_word_embeddings"}
    for name, value in config.items():
        if value and name not in known and not NO_MATTER.fullmatch(name):
            raise ConfigError(
                f"{name}={value!r} of config.json cannot be imported: nothing here understands it; "
                "remove it if the model is the same without it"
            )


def _refuse(config: Mapping[str, Any], **required: Any) -> None:
    """``ConfigError`` for an option that is set to anything but the only value that we have."""
    for name, value in required.items():
        if config.get(name) not in (None, value):
            raise ConfigError(f"{name}={config[name]!r} cannot be imported; only {value!r} is trained here")
