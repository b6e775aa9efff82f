"""The command of a trial with another trainer: a launch profile with one run's values filled in. Pure but for the script's digest."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.config.schema import Config
from launcher.config.trainer import LaunchProfile, TrainerProfile
from trainer.shared.families.family import BASE
from trainer.shared.families.registry import FAMILIES
from trainer.shared.parallel.balance import blocks_per_chunk
from trainer.shared.records.log_reader import check_patterns
from trainer.shared.run.derived import micro_batches, resolve_model, shared_ranks, world_size_of
from trainer.shared.run.errors import ConfigError, listed, nearest
from trainer.shared.run.foreign import AT_RUN_TIME, CommandConfig
from trainer.shared.run.read import flatten, to_dict
from trainer.shared.run.resolved import ResolvedModelConfig
from trainer.shared.run.schema import LayoutConfig, ModelConfig, ShardingConfig, TuneConfig

_PLACEHOLDER = re.compile(r"\{([a-z_][a-z_.0-9]*)\}")
SHARDED = ("layout.sharding.params", "layout.sharding.grads", "layout.sharding.optimizer")
ZERO = "zero"
"""Derived name: the ZeRO stage, 0 to 3, of a sharding over all replicas."""
ELSE = "else"
"""Entry of a table of words that stands for every other value."""
DERIVED = (
    *("ranks", "nodes", "ranks_per_node", "micro_batches", "layers_per_chunk", "sequences_per_replica"),
    *("tokens_per_step", "tokens_per_micro_batch", "vocab_without_end", ZERO, "stage_symbols"),
)
NETWORK = (
    *("even_heads", "window_before", "expert_width", "expert_blocks", "value_width", "query_groups"),
    *("rope_form", "score_magnitude", "router_form"),
)
"""Derived names that depend on the model alone."""
IMPLIED = {
    "tokens_per_micro_batch": ("layout.micro_batch",),
    "layers_per_chunk": ("layout.virtual_pipeline",),
    "vocab_without_end": ("model.vocab",),
    "window_before": ("model.window",),
    "expert_width": ("model.experts.ffn",),
    "expert_blocks": ("model.experts.dense_layers", "model.experts.every"),
    "value_width": ("model.latent.value",),
    "query_groups": ("model.kv_heads",),
    "stage_symbols": ("layout.balance",),
    "rope_form": ("model.rope.kind", "model.rope.original", "model.rope.magnitude"),
    "router_form": ("model.experts.router", "model.experts.normalized"),
}
"""Keys that a profile expresses by using a derived name."""
FREE = ("layout.data",)
"""Layout keys that follow from the others."""


def command_of(config: Config) -> CommandConfig | None:
    """Returns the command of a resolved run; None for this project's trainer. Raises ``ConfigError`` for a profile that cannot be launched,
    and for a layout or a run that it cannot express."""
    launch = config.trainer.launch
    if not config.trainer.foreign:
        return None
    check_told(config)
    check_layout(config.trainer, config.layout)
    values = values_of(config)
    words = [_text(word, values) for word in (*launch.command, *launch.arguments)]
    for name, told in launch.options.items():
        words += [] if told is None else _option(name, told, values)
    return CommandConfig(
        trainer=config.trainer.name,
        starts=launch.starts,
        words=words,
        files={name: _file(name, content, values) for name, content in launch.files.items()},
        environment={name: _text(value, values) for name, value in launch.environment.items()},
        code=_digest(launch.script),
        log=list(launch.log),
        reports=launch.reports,
        failures=dict(launch.failures),
        success=launch.success,
    )


def check_told(config: Config) -> None:
    """Raises ``ConfigError`` for a profile that could never be launched, or that cannot express the run, resolved or not, under any
    layout."""
    check_profile(config.trainer.launch)
    refusal = next(iter(untold(config)), None)
    if refusal:
        raise ConfigError(
            f"trainer={config.trainer.name} cannot be told {refusal}; give another value, use trainer=trireme, or add words for it to the "
            "profile's launch part"
        )


def check_layout(trainer: TrainerProfile, layout: LayoutConfig) -> None:
    """Raises ``ConfigError`` for a resolved layout that the trainer's profile cannot express."""
    refusal = next(iter(inexpressible(trainer, layout)), None)
    if refusal:
        raise ConfigError(f"trainer={trainer.name} cannot be told {refusal}; use another layout, or add it to its profile")


def check_profile(launch: LaunchProfile) -> None:
    """Raises ``ConfigError`` for a profile that could never be launched, or whose log could not be read."""
    if not launch.command:
        raise ConfigError("trainer.launch.command=[] starts nothing; give the words of the trainer's command")
    if launch.script is None and any("{script}" in word for word in launch.command):
        raise ConfigError("trainer.launch.script is not set, and the trainer's command needs it; give the path of your program")
    check_patterns(list(launch.log), launch.failures, launch.success, "trainer.launch.")


def values_of(config: Config) -> dict[str, Any]:
    """Returns the values of all placeholders: every key of the run, derived names, the profile's own variables."""
    run, launch = config.train_config(), config.trainer.launch
    values = flatten({name: value for name, value in to_dict(run).items() if name not in ("command", "requests")})
    layout, batch = config.layout, run.run.global_batch
    size = world_size_of(layout)
    derived = (
        *(size, config.cluster.nodes, min(size, config.cluster.gpus_per_node), micro_batches(run)),
        *(run.model.layers // (layout.pipeline * layout.virtual_pipeline), batch // (layout.data or 1)),
        *(batch * run.model.seq, layout.micro_batch * run.model.seq, run.model.vocab - 1, zero_stage(layout)),
        _stage_symbols(run.model, layout),
    )
    values |= dict(zip(DERIVED, derived, strict=True)) | _network(resolve_model(run.model))
    values |= {"script": launch.script, "trainer": config.trainer.name} | ({"python": launch.python} if launch.python else {})
    for name, choice in launch.variables.items():
        values[name] = _data(_chosen(f"trainer.launch.variables.{name}", choice, values), values)
    return values


def _network(model: ResolvedModelConfig) -> dict[str, Any]:
    """Returns the values of ``NETWORK``: whether heads divide the hidden width evenly, positions before a query that it sees, inner width
    of an expert, which blocks have experts (``all``, or a list of 0 and 1), width of a value, groups of queries that share keys (``none``
    with latents), scaling of rotary positions (``llama3 from 8192``, ``latent yarn from 4096``), and with latents the scale of YaRN's
    factor of magnitudes by whose square scores grow (DeepSeek-V2's ``mscale_all_dim``); scores of experts, whose weights add up to 1 or
    are scores (``softmax as it is``)."""
    experts = model.experts
    has = [int(block >= experts.dense_layers and (block + 1) % experts.every == 0) for block in range(model.layers)]
    runs = f"[0]*{experts.dense_layers}+[1]*{model.layers - experts.dense_layers}"
    blocks = "all" if all(has) or not experts.count else runs if experts.every == 1 else str(has).replace(" ", "")
    found = (
        *(model.query_width == model.hidden, None if model.window is None else model.window - 1, experts.ffn or model.ffn),
        *(blocks, model.latent.value or model.head_width, "none" if model.latent.kv_rank else model.kv_heads),
        *(_rope_form(model), _score_magnitude(model), experts.router + ("" if experts.normalized else " as it is")),
    )
    return dict(zip(NETWORK, found, strict=True))


def _rope_form(model: ResolvedModelConfig) -> str:
    rope, latents = model.rope, model.latent.kv_rank > 0
    kind = f"latent {rope.kind}" if latents else rope.kind
    if rope.magnitude is not None and not (latents and rope.magnitude == 1):
        kind += f" times {rope.magnitude:g}"
    return kind if rope.original is None else f"{kind} from {rope.original}"


def _score_magnitude(model: ResolvedModelConfig) -> float:
    """Returns a of m = 0.1 a ln(factor) + 1, where scores of queries of width w are scaled by m^2 / sqrt(w)."""
    width = model.head_width + model.latent.rotary
    magnitude = math.sqrt(model.attention_scale * math.sqrt(width))
    return round((magnitude - 1) / (0.1 * math.log(model.rope.factor)), 6) if model.rope.factor > 1 else 0.0


def _stage_symbols(model: ModelConfig, layout: LayoutConfig) -> str:
    """Returns the chunks of a pipeline in model order, one symbol each for embedding (E), block (t), module of a predicted token (m) and
    loss (L): Megatron Core's ``--pipeline-model-parallel-layout``. Empty for equal chunks."""
    if layout.balance == "equal":
        return ""
    return f"E{'|'.join('t' * count for count in blocks_per_chunk(model, layout))}{'m' * model.predicted_tokens}L"


def zero_stage(layout: LayoutConfig) -> int | None:
    """Returns the ZeRO stage, 0 to 3, if each state is sharded over all data x context ranks or not at all; None for other factors."""
    data, sharding = shared_ranks(layout), layout.sharding
    stages = [(1, 1, 1), (1, 1, data), (1, data, data), (data, data, data)]
    factors = (sharding.params, sharding.grads, sharding.optimizer)
    return stages.index(factors) if factors in stages else None


# -- settings that a profile can express ------------------------------------------------------------------------------------


def mentioned(launch: LaunchProfile) -> dict[str, set[str] | None]:
    """Returns the keys that a profile can express, each with the values that it has words for (None: any)."""
    found: dict[str, set[str] | None] = {}
    for name, told in launch.options.items():
        if told is not None:
            found[name] = _words(_without_null(told))
            found |= {key: None for key in IMPLIED.get(name, ()) if key not in found}
    for choice in launch.variables.values():
        if isinstance(choice, Mapping) and isinstance(choice.get("values"), Mapping):
            found[str(choice.get("by"))] = _words(choice["values"])
    everything = json.dumps([launch.command, launch.arguments, launch.files, launch.environment, launch.options, launch.variables])
    for name in _PLACEHOLDER.findall(everything):
        for key in IMPLIED.get(name, (name,)):
            found.setdefault(key, None)
    return found


def _words(told: Any) -> set[str] | None:
    """Returns the values that a table of words has entries for; None for any."""
    return set(map(yaml_word, told)) if isinstance(told, Mapping) and ELSE not in told else None


def _without_null(told: Any) -> Any:
    """Returns an option's table without its null entries, by which a profile removes words of the profile that it builds on."""
    return {value: words for value, words in told.items() if words is not None} if isinstance(told, Mapping) else told


def untold(config: Config) -> list[str]:
    """Lists the settings of a run, apart from its layout, that its trainer cannot be told: ``run.precision=fp8, only bf16`` for each value
    that a table of its profile has no entry for, and for keys that decide which weights learn from which data (``tune``, examples) if the
    profile does not mention them."""
    told = mentioned(config.trainer.launch)
    tune = {name: {yaml_word(value)} for name, value in flatten({"tune": to_dict(TuneConfig())}).items()}
    of_all = config.tune.method in tune["tune.method"]
    decisive = {name: words for name, words in tune.items() if not of_all or name in ("tune.method", "tune.base")}
    decisive["data.kind"] = {"corpus", "synthetic"}  # every trainer has its own data of these kinds
    out = []
    values = flatten(dataclasses.replace(config.train_config(), model=resolve_model(config.model)))
    decisive |= {name: {yaml_word(value)} for name, value in _plain(config.model, told).items()}
    for name, value in values.items():
        allowed = told.get(name, decisive.get(name))
        if name.startswith("layout.") or value is None or allowed is None or yaml_word(value) in allowed:
            continue  # None: it follows from other keys, and is checked once it is resolved
        out.append(f"{name}={yaml_word(value)}, only {listed(sorted(allowed))}")
    for name, value in _network(resolve_model(config.model)).items():
        if (words := told.get(name)) is not None and yaml_word(value) not in words:
            out.append(f"{IMPLIED.get(name, (name,))[0]}={yaml_word(value)}, only {listed(sorted(words))}")
    return out + _traits_untold(config.model, told)


def _traits_untold(model: ModelConfig, told: Mapping[str, Any]) -> list[str]:
    """Lists the traits that all models of a family have and no key sets, for a profile that expresses the network but not its family."""
    if "model.layers" not in told or "model.family" in told:
        return []
    family = FAMILIES[model.family]
    found = {
        "a norm of the embedding": family.embedding_norm,
        "attention sinks": family.attention_sinks,
        "norms of 1 + weight": family.norm_offset,
    }
    return [f"model.family={model.family}, which has {name}" for name, there in found.items() if there and name not in told]


CHOSEN = (
    *BASE,
    *(
        "head_width",
        "window",
        "full_every",
        "score_cap",
        "logit_cap",
        "attention_scale",
        "embedding_scale",
        "residual_scale",
        "logit_scale",
    ),
    *("predicted_tokens", "rope", "experts", "latent"),
)
"""Keys in which models of one size differ."""


def _plain(model: ModelConfig, told: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values that a model must have where a profile that expresses its shape has no words for a key: the usual ones of the
    family that the profile is told, or else of all families. Leaves out keys of parts that the model lacks, and the spread of its tokens
    over experts."""
    if "model.layers" not in told:
        return {}
    usual = ModelConfig()
    left = {name: getattr(usual, name) for name in CHOSEN}
    if "model.family" not in told and told.keys() & {f"model.{name}" for name in BASE}:
        left |= {name: list(value) if isinstance(value, tuple) else value for name, value in BASE.items()}
    plain = resolve_model(dataclasses.replace(model, **left))
    absent = ["model.experts.imbalance"]
    absent += ["model.experts."] * (not model.experts.count) + ["model.latent."] * (not model.latent.kv_rank)
    absent += ["model.rope."] * (resolve_model(model).positions != "rotary")
    there = ("model.experts.count", "model.latent.kv_rank")
    scale = resolve_model(dataclasses.replace(model, attention_scale=None)).attention_scale  # from the width of its heads
    if "score_magnitude" in told and model.latent.kv_rank:
        scale = resolve_model(model).attention_scale
    values = flatten({"model": to_dict(plain)}) | {"model.attention_scale": scale}
    names = [name for name in values if name.split(".")[1] in CHOSEN and (name in there or not name.startswith(tuple(absent)))]
    return {name: values[name] for name in names}


def inexpressible(trainer: TrainerProfile, layout: LayoutConfig) -> list[str]:
    """Lists the values of a resolved layout that a trainer cannot be told, as in ``layout.pipeline=2``: its profile has no words for
    them."""
    if not trainer.foreign:
        return []
    told = mentioned(trainer.launch)
    default = flatten({"layout": to_dict(LayoutConfig())})
    out = []
    if not trainer.memory.whole_experts and layout.context * (layout.data or 1) % layout.expert:
        told = told | {"layout.expert": {"1"}}
    for name, value in flatten({"layout": to_dict(_without_equal(layout))}).items():
        if name in FREE or (name in SHARDED and (name in told or ZERO in told)):
            continue
        allowed = told.get(name, {yaml_word(default[name])})
        if allowed is not None and yaml_word(value) not in allowed:
            out.append(f"{name}={yaml_word(value)}")
    if ZERO in told and not set(SHARDED) & told.keys():
        stage, allowed = zero_stage(layout), told[ZERO]
        shared = trainer.launch.shards_context and layout.context > 1 and stage == 0
        if shared or stage is None or (allowed is not None and str(stage) not in allowed):
            out.append(f"layout.sharding={_factors(layout.sharding)}")
    return out


def _without_equal(layout: LayoutConfig) -> LayoutConfig:
    """Returns ``layout`` without a split in equal counts, which means the same as no split."""
    return dataclasses.replace(layout, stage_layers=None) if len(set(layout.stage_layers or ())) == 1 else layout


def _factors(sharding: ShardingConfig) -> str:
    return f"{{params: {sharding.params}, grads: {sharding.grads}, optimizer: {sharding.optimizer}}}"


def yaml_word(value: Any) -> str:
    """Writes a value as YAML and Hydra do."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # options that take whole numbers do not take 10000.0
    return {"None": "null", "True": "true", "False": "false"}.get(str(value), str(value))


# -- filling in -----------------------------------------------------------------------------------------------------------


def _text(word: str, values: Mapping[str, Any]) -> str:
    """Replaces every placeholder in ``word`` except those that only a rank knows."""
    return _PLACEHOLDER.sub(
        lambda match: match[0] if match[1] in AT_RUN_TIME and match[1] not in values else yaml_word(_value(match[1], values)), str(word)
    )


def _value(name: str, values: Mapping[str, Any]) -> Any:
    if name not in values:
        raise ConfigError(
            f"the trainer's profile uses {{{name}}}, which is not known{nearest(name, values)}; known are keys of the run "
            f"(layout.tensor) and {listed((*DERIVED, *NETWORK, 'script', *AT_RUN_TIME))}"
        )
    return values[name]


def _option(name: str, told: Any, values: Mapping[str, Any]) -> list[str]:
    """Returns the words of one option: ``[--flag, "{}"]`` with its value, or the words for the key's value."""
    value = _value(name, values)
    if isinstance(told, Mapping):
        told = _chosen(f"trainer.launch.options.{name}", {"by": name, "values": _without_null(told)}, values)
    if not isinstance(told, (list, tuple)):
        raise ConfigError(f"trainer.launch.options.{name}={told!r} is not a list of words; give a list, or a list for each value")
    return [_text(str(word).replace("{}", yaml_word(value)), values) for word in told]


def _chosen(where: str, choice: Any, values: Mapping[str, Any]) -> Any:
    """Returns the entry of ``{by: KEY, values: {VALUE: ANY}}`` for this run's value of the key."""
    if not isinstance(choice, Mapping) or set(choice) != {"by", "values"} or not isinstance(choice["values"], Mapping):
        raise ConfigError(f"{where}={choice!r} is not a choice; write {{by: KEY, values: {{VALUE: what it becomes}}}}")
    words = {yaml_word(word): found for word, found in choice["values"].items()}
    value = yaml_word(_value(str(choice["by"]), values))
    if value not in words and ELSE in words:
        value = ELSE
    if value not in words:
        raise ConfigError(f"{where} has nothing for {choice['by']}={value}; it has {listed(words)}")
    return words[value]


def _data(content: Any, values: Mapping[str, Any]) -> Any:
    """Fills in structured ``content``. Text that consists of one placeholder keeps the value's type."""
    if isinstance(content, Mapping):
        return {str(name): _data(entry, values) for name, entry in content.items()}
    if isinstance(content, (list, tuple)):
        return [_data(entry, values) for entry in content]
    if not isinstance(content, str):
        return content
    whole = _PLACEHOLDER.fullmatch(content)
    return _value(whole[1], values) if whole and whole[1] not in AT_RUN_TIME else _text(content, values)


def _file(name: str, content: Any, values: Mapping[str, Any]) -> str:
    """Returns a file's text, in the format that its name ends in."""
    data = _data(content, values)
    if Path(name).name != name:
        raise ConfigError(f"trainer.launch.files: {name!r} is not a plain file name; files lie in {{folder}}")
    if isinstance(data, str):
        return data
    if name.endswith(".json"):
        return json.dumps(data, indent=1) + "\n"
    if name.endswith((".yaml", ".yml")):
        import yaml

        return str(yaml.safe_dump(data, sort_keys=False))
    if name.endswith(".toml"):
        import tomli_w

        return tomli_w.dumps(data)
    raise ConfigError(f"trainer.launch.files: {name!r} is of no known kind; end its name in .json, .yaml or .toml, or give its text")


def _digest(script: str | None) -> str | None:
    """Returns the digest of a program on this machine, so that a changed one makes another trial; None if it is only in the image."""
    try:
        return hashlib.sha256(Path(script).read_bytes()).hexdigest()[:12] if script else None
    except OSError:
        return None
