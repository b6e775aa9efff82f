"""Converts between ``ModelConfig`` and Hugging Face's ``config.json`` of its family, and finds the model of a folder of weights."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.shared.families.family import ALWAYS, ConfigKey, Family
from trainer.shared.families.parts import ConfigPart, NotUnderstood
from trainer.shared.families.registry import FAMILIES
from trainer.shared.records.artifacts import GGUF, GGUF_FILE, ArtifactKind, checkpoint_facts, find_artifact
from trainer.shared.records.gguf_header import model_in, read_header
from trainer.shared.run.derived import resolve_model
from trainer.shared.run.errors import ConfigError, listed
from trainer.shared.run.limits.model import check_model
from trainer.shared.run.read import flatten, from_dict, nested
from trainer.shared.run.resolved import ResolvedModelConfig
from trainer.shared.run.schema import ModelConfig

COMMON = (ConfigKey("vocab", "vocab_size"), ConfigKey("tied", "tie_word_embeddings", default=None))
"""Keys of every family."""
TOWERS = ("vision_config", "audio_config", "vision_tower", "mm_vision_tower", "speech_config")
"""Keys in the config.json of a model that sees or hears."""
UNWRITTEN = (
    *("family", "dropout", "init_std", "zero_init", "attention", "decoder_seq"),
    *(f"experts.{name}" for name in ("imbalance", "forced", "balance_loss", "z_loss", "correction")),
)
"""Keys that change neither the shape of a model nor its results, or only its training."""
REPEATED = {"sliding_window_size": "sliding_window"}
"""Keys that repeat another one."""
NO_MATTER = re.compile(
    r"_.*|architectures|model_type|auto_map|.*_token_ids?|(torch_)?dtype|transformers_version|tokenizer_class|use_cache|use_bfloat16|"
    r"output_.*|return_dict.*|summary_.*|task_specific_params|(id2label|label2id|num_labels|problem_type|finetuning_task|prefix)|"
    r".*(dropout|pdrop)|initializer_range|chunk_size_feed_forward|torchscript|gradient_checkpointing|attn_implementation|cache_implementation|"
    r"n_ctx|max_sequence_length|unsloth_.*|reorder_and_upcast_attn|(scale_)?attention_softmax_in_fp32|pretraining_tp|slow_but_exact|"
    r"masked_softmax_fusion|bias_dropout_fusion|skip_bias_add.*|offset_alibi|do_sample|temperature|top_[kp]|typical_p|num_beam.*|"
    r"num_return_sequences|(max|min)_length|(repetition|length|diversity)_penalty|.*no_repeat_ngram_size|early_stopping|remove_invalid_values|"
    r"bad_words_ids|suppress_tokens|begin_suppress_tokens|quantization_config"
)
"""Keys of a config.json that do not change the model: labels, generation, dropout, ways to compute the same, storage of weights."""


def to_config(model: ResolvedModelConfig) -> dict[str, Any]:
    """Returns the ``config.json`` of a resolved model. Raises ``ConfigError`` if the family's architecture there cannot express it."""
    check_named(model.family)
    family = FAMILIES[model.family]
    hub = family.hub
    _check_expressible(model, family)
    values = flatten(model)
    config = {
        "model_type": hub.model_type,
        "architectures": [hub.architecture],
        **{key.theirs: key.words.get(values[key.ours], values[key.ours]) for key in hub.keys},
        **{name: value for part in hub.parts for name, value in part.write(values).items()},
        **hub.constants,
        **{key.theirs: values[key.ours] for key in COMMON},
    }
    check_same(values, flatten(from_config(config)), family)
    return config


def from_config(config: Mapping[str, Any]) -> ResolvedModelConfig:
    """Returns the resolved model of a ``config.json``. Raises ``ConfigError`` for an unsupported architecture, option or value."""
    config = _of_text(config)
    families = {name: family for family in FAMILIES.values() for name in (family.hub.model_type, *family.hub.further_types)}
    family = families.get(str(config.get("model_type")))
    if family is None:
        raise ConfigError(f"model_type={config.get('model_type')!r} cannot be imported; use {listed(families)}")
    _check_understood(config, family)
    given: dict[str, Any] = {"family": family.name}
    config = {**family.hub.absent, **config}
    _refuse(config, **family.hub.expected, **family.hub.constants)
    for key in (*family.hub.keys, *COMMON):
        if key.read:
            given[key.ours] = _read(config, key, family)
    _model_of(given, family)  # parts compute with values of the right types
    for part in family.hub.parts:
        given |= _part(config, part, given)
    model = _model_of(given, family)
    try:
        check_model(model)
        return resolve_model(model)
    except ConfigError as error:
        raise ConfigError(f"config.json says what no model here has: {error}") from None


def _of_text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the part of a config.json that describes its text decoder. Raises ``ConfigError`` if there is more than that."""
    for tower in TOWERS:
        if config.get(tower):
            raise ConfigError(
                f"{tower} of config.json cannot be read: only decoders of text are; give its text_config as a file of its own"
            )
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        return config
    return {**{name: config[name] for name in ("model_type", "tie_word_embeddings") if name in config}, **text}


def _model_of(given: Mapping[str, Any], family: Family) -> ModelConfig:
    """Makes the model of keys by their dotted names. Raises ``ConfigError``, with the name in config.json, for a wrong type."""
    try:
        return from_dict(ModelConfig, nested(given), "model.")
    except ConfigError as error:
        names = {f"model.{key.ours}": key.theirs for key in (*family.hub.keys, *COMMON)}
        named = names.get(re.split(r"[^\w.]", str(error), maxsplit=1)[0])
        raise ConfigError(f"config.json says what no model here has: {f'{named}: ' if named else ''}{error}") from None


def check_named(family: str) -> None:
    """Raises ``ConfigError`` for a family without known names of tensors."""
    if not FAMILIES[family].hub.block:
        raise ConfigError(
            f"weights of model.family={family} are neither read nor written here yet; such a model can be planned, with model.from=FOLDER"
        )


def read_model(source: Path) -> ResolvedModelConfig:
    """Reads the model of a JSON file, or of the ``config.json`` of a folder. Raises ``ConfigError`` if it cannot be read, or is not
    supported."""
    file = source if source.suffix == ".json" and not source.is_dir() else source / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("it is not a JSON object")
        return from_config(config)
    except ConfigError:
        raise
    except (OSError, ValueError, AttributeError, TypeError, ArithmeticError, RecursionError) as error:
        raise ConfigError(f"cannot read {file}: {error}; give a folder in the Hugging Face layout") from None


def model_of(folder: Path) -> ResolvedModelConfig:
    """Returns the model whose weights are in ``folder``, a checkpoint or a Hugging Face folder. Raises ``ConfigError`` if there are
    none."""
    found = find_artifact(folder)
    if found is None or found.kind not in (ArtifactKind.CHECKPOINT, ArtifactKind.HUGGINGFACE):
        what = "nothing that is known" if found is None else f"a {found.kind.value}"
        raise ConfigError(f"{folder} holds {what}; give a checkpoint, or a folder with config.json and .safetensors files")
    if found.kind is ArtifactKind.HUGGINGFACE:
        return _with_weights(folder)
    return resolve_model(from_dict(ModelConfig, checkpoint_facts(folder)[1]["model"], "model."))


def to_import(source: Path) -> tuple[Path, ResolvedModelConfig]:
    """Finds the weights to be imported, a Hugging Face folder or a GGUF file (alone, or ``GGUF_FILE`` of a folder), and their model. Raises
    ``ConfigError`` if there are none that can be read."""
    file = source / GGUF_FILE if (source / GGUF_FILE).is_file() else source
    return file, model_in(read_header(file), file) if file.suffix == GGUF else _with_weights(file)


def _with_weights(folder: Path) -> ResolvedModelConfig:
    """Returns the model of a folder whose weights are to be read."""
    model = read_model(folder)
    check_named(model.family)
    return model


def _check_expressible(model: ResolvedModelConfig, family: Family) -> None:
    keys = {key.ours: key for key in family.hub.keys}
    allowed = tuple(keys["activation"].words) if "activation" in keys else (family.default("activation"),)
    if model.activation not in allowed:
        raise ConfigError(
            f"model.activation={model.activation} cannot be exported with model.family={model.family}; its layout has {allowed[0]}"
        )
    corrected = model.experts.correction is not None
    if model.experts.count and corrected != (family.hub.correction is not None):
        raise ConfigError(
            f"model.experts.correction={model.experts.correction if corrected else 'null'} cannot be exported with "
            f"model.family={model.family}, whose layout has {'none' if corrected else 'corrections'}; use another family"
        )
    if "kv_heads" not in keys and model.kv_heads != model.heads:
        raise ConfigError(
            f"model.kv_heads={model.kv_heads} cannot be exported with model.family={model.family}, which has no grouped queries"
        )
    if "ffn" not in keys and model.ffn != 4 * model.hidden:
        raise ConfigError(
            f"model.ffn={model.ffn} cannot be exported with model.family={model.family}, whose MLP is 4 x model.hidden={4 * model.hidden}"
        )


def check_same(values: Mapping[str, Any], back: Mapping[str, Any], family: Family) -> None:
    """Raises ``ConfigError`` for the first of a model's keys that differs when the written form is read back."""
    for name, value in values.items():
        if name in UNWRITTEN or value == back[name] or (name == "biases" and {*value} == {*back[name]}):
            continue
        if not (isinstance(value, float) and isinstance(back[name], float) and math.isclose(value, back[name], rel_tol=1e-9)):
            raise ConfigError(
                f"model.{name}={value} cannot be exported with model.family={family.name}, whose layout says {back[name]}; use that, or "
                "another family"
            )


def _read(config: Mapping[str, Any], key: ConfigKey, family: Family) -> Any:
    """Returns the value of a key of ours. Raises ``ConfigError`` if there is none, or it is an unknown word."""
    name = key.older if key.older is not None and key.theirs not in config else key.theirs
    default = next(iter(key.words.values()), key.default)
    if name not in config and default is ALWAYS:
        raise ConfigError(f"config.json has no {name}, which a {family.hub.model_type} model needs")
    if not key.words:
        return config.get(name, default)
    if len(key.words) == 1:
        _refuse(config, **{name: default})
        return next(iter(key.words))
    words = {theirs: ours for ours, theirs in key.words.items()} | {**key.synonyms}
    if (value := config.get(name, default)) not in words:
        raise ConfigError(f"{name}={value!r} cannot be imported; use {listed(key.words.values())}")
    return words[value]


def _part(config: Mapping[str, Any], part: ConfigPart, given: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return part.read(config, given)
    except NotUnderstood as error:
        raise ConfigError(f"{error} of config.json cannot be read: nothing here understands it") from None


def _check_understood(config: Mapping[str, Any], family: Family) -> None:
    """Raises ``ConfigError`` for a key that may make another model than the one read here. A key that is off (null, false, empty)
    cannot."""
    keys = (*family.hub.keys, *COMMON)
    known = {key.theirs for key in keys} | {key.older for key in keys} | {*family.hub.constants, *family.hub.expected}
    known |= {name for part in family.hub.parts for name in part.names}
    for name, value in config.items():
        again = name in REPEATED and value == config.get(REPEATED[name])
        if value and name not in known and not again and not NO_MATTER.fullmatch(name):
            raise ConfigError(
                f"{name}={value!r} of config.json cannot be imported: nothing here understands it; "
                "remove it if the model is the same without it"
            )


def _refuse(config: Mapping[str, Any], **required: Any) -> None:
    """Raises ``ConfigError`` for an option that is set to anything but the only supported value."""
    for name, value in required.items():
        if config.get(name) not in (None, value):
            raise ConfigError(f"{name}={config[name]!r} cannot be imported; only {value!r} is trained here")
