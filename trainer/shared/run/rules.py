"""Rules that span several fields of a run, and values that are derived from others. Pure.

``resolve`` is called before anything is submitted; in the types that it returns, derived values are never None. ``check`` raises
``ConfigError`` on the first broken rule. The launcher only adds the rules of the cluster itself.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Any, TypeVar

from trainer.shared.families.family import BASE
from trainer.shared.families.registry import FAMILIES
from trainer.shared.run.errors import ConfigError, divisors, listed
from trainer.shared.run.phases import PhaseTable, resolve_phases
from trainer.shared.run.read import flatten, from_record, to_dict
from trainer.shared.run.schema import (
    GATED,
    ExpertsConfig,
    GroupConfig,
    GroupsConfig,
    LatentConfig,
    LayoutConfig,
    ModelConfig,
    MuonConfig,
    PhaseConfig,
    ResolvedLayoutConfig,
    ResolvedModelConfig,
    ResolvedOptimizerConfig,
    ResolvedTrainConfig,
    RopeConfig,
    TrainConfig,
)
from trainer.shared.run.spans import written_tokens
from trainer.shared.run.tuning import PROMPTS, check_tasks, check_tune, virtual_tokens

T = TypeVar("T")

FIRST_KEYS = (
    "family", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq", "tied", "activation", "dropout", "attention", "rope_theta",
    "norm_eps", "init_std",
)  # fmt: skip
"""Keys of the model that every version writes. A record that lacks a later one means its family's value."""

TRACKING_REMEDY = "leave it out and set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN, in the environment"
"""Remedy for a secret in ``tracking.uri``."""


def resolve(config: TrainConfig, world_size: int) -> ResolvedTrainConfig:
    """Returns ``config`` with every derived value, checked for ``world_size`` ranks."""
    check_model(config.model)
    model = resolve_model(config.model)
    _check_split(model, config.layout)  # the model's limits on any cluster are reported before those of this cluster
    layout = _with(ResolvedLayoutConfig, config.layout, data=_data_degree(config.layout, world_size))
    run = dataclasses.replace(config.run, phases=_resolve_phases(config, model.seq))
    resolved = _with(ResolvedTrainConfig, config, model=model, layout=layout, optimizer=_resolve_optimizer(config), run=run)
    check(resolved, world_size)
    return resolved


def _with(cls: type[T], config: Any, **derived: Any) -> T:
    """Makes a ``cls`` of the fields of ``config`` and its ``derived`` values."""
    return cls(**{f.name: getattr(config, f.name) for f in dataclasses.fields(config)} | derived)


def _resolve_phases(config: TrainConfig, seq: int) -> list[PhaseConfig]:
    """Returns the phases of a training; other tasks have none."""
    if config.run.task != "train":
        return []
    check_phases(config)
    return resolve_phases(config.run, seq)


def _resolve_optimizer(config: TrainConfig) -> ResolvedOptimizerConfig:
    given = config.optimizer
    optimizer = _with(
        ResolvedOptimizerConfig,
        given,
        min_lr=given.lr / 10 if given.min_lr is None else given.min_lr,
        decay_steps=config.run.steps if given.decay_steps is None else given.decay_steps,
    )
    groups = {}
    for f in dataclasses.fields(GroupsConfig):
        group: GroupConfig = getattr(given.groups, f.name)
        lr = None if group.lr == given.lr else group.lr
        groups[f.name] = GroupConfig(lr, None if group.weight_decay == optimizer.usual_decay(f.name) else group.weight_decay)
    optimizer.groups = GroupsConfig(**groups)
    return optimizer


def resolve_model(model: ModelConfig) -> ResolvedModelConfig:
    """Fills in the family's defaults. An MLP with a gate has 8/3 hidden rounded up to 64, any other 4 hidden."""
    family = FAMILIES[model.family]
    chosen = {name: family.default(name) if (given := getattr(model, name)) is None else given for name in BASE}
    gated = chosen["activation"] in GATED
    head = model.head_width or max(1, model.hidden // model.heads)
    further = model.latent.rotary if model.latent.kv_rank else 0
    ffn = model.ffn or (64 * math.ceil(8 * model.hidden / 3 / 64) if gated else 4 * model.hidden)
    return _with(
        ResolvedModelConfig,
        model,
        **chosen,
        kv_heads=model.kv_heads or model.heads,
        ffn=ffn,
        init_std=family.init_scale / math.sqrt(model.hidden) if model.init_std is None else model.init_std,
        head_width=head,
        attention_scale=model.attention_scale or family.attention_scale or 1 / math.sqrt(head + further),
        encoder_layers=(model.layers // 2 if family.encoder_decoder else 0) if model.encoder_layers is None else model.encoder_layers,
        decoder_seq=model.decoder_seq or (written_tokens(model.seq) if family.encoder_decoder else 0),
    )


def recorded_model(saved: Mapping[str, Any]) -> ResolvedModelConfig:
    """Returns the model that any version has recorded."""
    return resolve_model(from_record(ModelConfig, saved))


def world_size_of(layout: LayoutConfig) -> int:
    """Returns the ranks that a resolved layout occupies: tensor x pipeline x context x data. Expert ranks are data ranks."""
    return layout.tensor * layout.pipeline * layout.context * (layout.data or 1)


def shared_ranks(layout: LayoutConfig) -> int:
    """Returns how many ranks hold the same parameters of a resolved layout, and may share them out: data x context."""
    return (layout.data or 1) * layout.context


def micro_batches(config: TrainConfig) -> int:
    """Returns the micro-batches that each replica runs per step: global_batch / (micro_batch x data)."""
    return config.run.global_batch // (config.layout.micro_batch * (config.layout.data or 1))


def check(config: ResolvedTrainConfig, world_size: int) -> None:
    """Raises ``ConfigError`` on the first broken rule of a resolved ``config`` on ``world_size`` ranks."""
    check_model(config.model)
    if config.command is None and (name := untrained(config.model)) is not None:
        raise ConfigError(f"{name} can be planned but not trained here yet; use trainer=NAME of another trainer, or leave it out")
    _check_own_experts(config)
    _check_own_stacks(config)
    _check_own_latents(config)
    _check_split(config.model, config.layout)
    _check_context(config)
    _check_world(config.layout, world_size)
    _check_schedule(config)
    _check_slices(config.model, config.layout)
    _check_own_slices(config)
    _check_batch(config)
    _check_sharding(config.layout)
    _check_offload(config)
    check_tracking_uri(config.tracking.uri)
    _check_validation(config)
    _check_optimizer(config.optimizer)
    _check_moments(config)
    _check_eight_bits(config)
    _check_async_tensor(config)
    _check_packing(config)
    check_tune(config.tune, config.model)
    check_tasks(config)
    if config.command is not None:
        _check_own_keys(config, config.command.trainer)
    if config.run.warmup_steps >= config.run.steps:
        most = config.run.steps - 1
        raise ConfigError(
            f"run.warmup_steps={config.run.warmup_steps} leaves no step of run.steps={config.run.steps} to measure; "
            f"use {f'{most} or less' if most else most}, or more steps"
        )
    if config.run.task == "train":
        _check_each_phase(config, world_size)


OWN_KEYS = (
    *("run.phases", "run.deterministic", "run.async_tensor", "run.context_exchange", "model.zero_init"),
    *("layout.sharding.offload", "run.offload_path"),
    *("optimizer.kind", "optimizer.stable_steps", "optimizer.decay_style", "optimizer.groups.", "optimizer.muon."),
    "optimizer.cautious",
)
"""Beginnings of keys that our own trainer alone knows."""


def _check_own_keys(config: ResolvedTrainConfig, trainer: str) -> None:
    usual = flatten(TrainConfig())
    for name, value in flatten(config).items():
        if name.startswith(OWN_KEYS) and value != usual[name]:
            raise ConfigError(f"{name}={str(value).lower()} is for our own trainer; leave it out for trainer={trainer}")


def check_tracking_uri(uri: str | None) -> None:
    """Raises ``ConfigError`` on a user name or password in the address."""
    if uri is not None and "@" in uri.partition("://")[2].partition("/")[0]:
        raise ConfigError(
            f"tracking.uri contains a user name or password, which would be written into every trial's folder; {TRACKING_REMEDY}"
        )


def _data_degree(layout: LayoutConfig, world_size: int) -> int:
    if layout.data is not None:
        return layout.data
    model_ranks = layout.tensor * layout.pipeline * layout.context
    if world_size < model_ranks:
        raise _too_many_ranks(layout, model_ranks, world_size)
    if world_size % model_ranks:
        raise ConfigError(
            f"{_model_axes(layout)} = {model_ranks} ranks do not divide the cluster's "
            f"{world_size}; change one of them, or set layout.data to use only part of the cluster"
        )
    return world_size // model_ranks


def _too_many_ranks(layout: LayoutConfig, needed: int, world_size: int) -> ConfigError:
    return ConfigError(
        f"{_model_axes(layout)} x layout.data={layout.data or 1} needs {needed} ranks, "
        f"but the cluster has {world_size}; lower one of them, or raise cluster.nodes or cluster.gpus_per_node"
    )


def _model_axes(layout: LayoutConfig) -> str:
    """Names the axes of one replica for a message: context ranks where there are any."""
    words = [f"layout.tensor={layout.tensor}", f"layout.pipeline={layout.pipeline}"]
    return " x ".join(words + [f"layout.context={layout.context}"] * (layout.context > 1))


def _check_context(config: ResolvedTrainConfig) -> None:
    """Checks what our own trainer does with context ranks: they train and evaluate, and may exchange heads."""
    layout, run, model = config.layout, config.run, config.model
    if config.command is not None or layout.context == 1:
        return
    if run.task in ("generate", "inference"):
        raise ConfigError(
            f"layout.context={layout.context}: context ranks share sequences of training, and texts are generated token by token; use 1"
        )
    each = model.kv_heads // layout.tensor
    if run.context_exchange == "all_to_all" and each % layout.context:
        raise ConfigError(
            f"run.context_exchange=all_to_all deals out the {each} key and value heads of a tensor rank to layout.context={layout.context} "
            f"ranks, which do not divide them; use {listed(divisors(each))}, all_gather or ring"
        )
    for name, factor in (("params", layout.sharding.params), ("grads", layout.sharding.grads), ("optimizer", layout.sharding.optimizer)):
        if layout.order != "tensor-data-pipeline" and factor % layout.context and layout.context % factor:
            raise ConfigError(
                f"layout.sharding.{name}={factor} neither divides layout.context={layout.context} nor is a multiple of it, which "
                f"layout.order={layout.order} needs; change one of them"
            )


def _check_own_experts(config: ResolvedTrainConfig) -> None:
    """Checks what our own trainer does with experts: they are tuned whole, and replicas that answer requests work on their own."""
    tune, layout = config.tune, config.layout
    if config.command is not None or not config.model.experts.count:
        return
    inside = [target for target in tune.targets if target in ("up", "down")] if tune.method == "lora" else []
    if inside or tune.method == "ia3":
        named = f"tune.targets={tune.targets}" if inside else f"tune.method={tune.method}"
        raise ConfigError(
            f"{named} adds to the matrices of an MLP, and the model has experts there; use tune.targets=[qkv,output] with lora"
        )
    near = {"layout.tensor": layout.tensor}
    if layout.order != "tensor-data-pipeline":
        near["layout.tensor x layout.context"] = layout.tensor * layout.context  # from here on, ranks are a pipeline apart
    axes = ("layout.expert_tensor", layout.expert_tensor), (_expert_axes(layout), folded_experts(layout))
    for (name, ranks), (unit, size) in itertools.product(axes, near.items()):
        if size % ranks and ranks % size:
            raise ConfigError(
                f"{name}={ranks} neither divides {unit}={size} nor is a multiple of it; use {size}, a divisor or a multiple of it, or "
                f"{unit}=1"
            )
    if config.run.task in ("generate", "inference") and layout.tensor % folded_experts(layout):
        raise ConfigError(
            f"{_expert_axes(layout)}={folded_experts(layout)} does not divide layout.tensor={layout.tensor}, and replicas that answer "
            f"requests share no experts; use {listed(divisors(layout.tensor))}"
        )


def _check_own_latents(config: ResolvedTrainConfig) -> None:
    """Checks what our own trainer does where queries, keys and values are made from latents."""
    model, tune, rank = config.model, config.tune, config.model.latent.kv_rank
    if config.command is not None or not rank:
        return
    unlike = {
        f"model.kv_heads={model.kv_heads}": model.kv_heads != model.heads,
        f"model.qk_norm={model.qk_norm}": model.qk_norm != "none",
        f"model.biases={model.biases}": "qkv" in model.biases,
    }
    if name := next((name for name, there in unlike.items() if there), None):
        raise ConfigError(
            f"{name} does not go with model.latent.kv_rank={rank}: keys and values of all heads are made from one latent, which "
            "alone has a norm, and no bias; leave it out"
        )
    among = tune.method == "lora" and "qkv" in tune.targets
    if among or tune.method == "ia3":
        named = f"tune.targets={tune.targets}" if among else f"tune.method={tune.method}"
        raise ConfigError(
            f"{named} adds to the one matrix of queries, keys and values, and model.latent.kv_rank={rank} has several; use "
            "tune.targets=[output] with lora, or another method"
        )


def _check_world(layout: LayoutConfig, world_size: int) -> None:
    needed = world_size_of(layout)
    if needed > world_size:
        raise _too_many_ranks(layout, needed, world_size)
    folded = layout.tensor * layout.context * (layout.data or 1)
    if folded % folded_experts(layout):
        raise ConfigError(
            f"{_expert_axes(layout)}={folded_experts(layout)} does not divide the {folded} ranks of layout.tensor x layout.context x "
            f"layout.data, to which experts are dealt out; use {listed(d for d in divisors(folded) if d <= 64)}"
        )


def folded_experts(layout: LayoutConfig) -> int:
    """Returns how many of the ranks of tensor, context and data together have all experts."""
    return layout.expert_tensor * layout.expert


def _expert_axes(layout: LayoutConfig) -> str:
    """Names the axes of those for a message: that of parts of an expert where there are any."""
    return "layout.expert_tensor x layout.expert" if layout.expert_tensor > 1 else "layout.expert"


def check_model(given: ModelConfig) -> None:
    """Raises ``ConfigError`` on the first rule that a model breaks in any layout."""
    if given.head_width is None and given.hidden % given.heads:
        raise ConfigError(
            f"model.heads={given.heads} does not divide model.hidden={given.hidden}; use {_few_divisors(given.hidden)}, or set "
            "model.head_width"
        )
    model = resolve_model(given)
    if model.heads % model.kv_heads:
        raise ConfigError(f"model.kv_heads={model.kv_heads} does not divide model.heads={model.heads}; use {listed(divisors(model.heads))}")
    if model.dropout >= 1:
        raise ConfigError(f"model.dropout={model.dropout:g} drops everything; use a value from 0 to below 1")
    if model.positions == "rotary":
        _check_rope(model)
    if model.window is None and model.full_every:
        raise ConfigError(f"model.full_every={model.full_every} says which blocks ignore a window, and there is none; set model.window")
    if model.score_cap is not None and model.positions == "alibi":
        raise ConfigError(
            f"model.score_cap={model.score_cap:g} would cap the linear biases of model.positions=alibi, which are told up to a constant of "
            "each row; leave the cap out or use model.positions=rotary"
        )
    if "head" in model.biases and model.tied:
        raise ConfigError("model.biases has a bias of the head, which model.tied=true shares with the embedding; leave one of them out")
    if "head" in model.zero_init and model.tied:
        raise ConfigError("model.zero_init has the head, which model.tied=true shares with the embedding; leave one of them out")
    _check_latent(model)
    _check_experts(model)
    _check_stacks(given, model)


ONE_STACK: dict[str, Any] = {
    "window": None, "full_every": 0, "score_cap": None, "qk_norm": "none", "norm_at": "before", "residual": "sequential",
    "residual_scale": 1.0, "predicted_tokens": 0, "rope": RopeConfig(), "experts": ExpertsConfig(), "latent": LatentConfig(),
}  # fmt: skip
"""Keys of the model that a network with an encoder leaves at these values."""


def _check_stacks(given: ModelConfig, model: ResolvedModelConfig) -> None:
    """Checks the keys of an encoder and its decoder, and those that only a network with one stack has."""
    if not FAMILIES[model.family].encoder_decoder:
        theirs = {"encoder_layers": model.encoder_layers, "decoder_seq": given.decoder_seq}
        for name, value in theirs.items():
            if value:
                raise ConfigError(
                    f"model.{name}={value} is for a family with an encoder, and model.family={model.family} has none; leave it out"
                )
        if model.positions == "relative":
            raise ConfigError(f"model.positions=relative is for model.family=t5, not {model.family}; use learned, rotary, alibi or none")
        return
    if not 0 < model.encoder_layers < model.layers:
        raise ConfigError(
            f"model.encoder_layers={model.encoder_layers} of model.layers={model.layers} leaves a stack without a block; "
            + (f"use 1 to {model.layers - 1}" if model.layers > 1 else "raise model.layers")
        )
    for name, usual in ONE_STACK.items():
        if (value := getattr(model, name)) != usual:
            key, value = _first_other(name, value, usual)
            raise ConfigError(
                f"model.{key}={value} is for families without an encoder, and model.family={model.family} has one; leave it out"
            )
    if model.positions in ("rotary", "alibi"):
        raise ConfigError(f"model.positions={model.positions} is for families without an encoder; use relative, learned or none")
    if model.kv_heads != model.heads:
        raise ConfigError(f"model.kv_heads={model.kv_heads}: model.family={model.family} has a key and a value for each head; leave it out")
    if model.positions == "relative" and model.relative_distance <= model.relative_buckets // 2:
        raise ConfigError(
            f"model.relative_distance={model.relative_distance} is not beyond the {model.relative_buckets // 2} exact distances of "
            f"model.relative_buckets={model.relative_buckets}; raise it, or lower the buckets"
        )


def _first_other(name: str, value: Any, usual: Any) -> tuple[str, Any]:
    """Returns the key that is not as usual, and its value: of a group of keys, the first such one in it."""
    if not dataclasses.is_dataclass(value):
        return name, value
    return next((f"{name}.{f.name}", own) for f in dataclasses.fields(value) if (own := getattr(value, f.name)) != getattr(usual, f.name))


def _check_own_stacks(config: ResolvedTrainConfig) -> None:
    """Checks what our own trainer does with an encoder and its decoder."""
    model, layout = config.model, config.layout
    if config.command is not None or not model.encoder_layers:
        return
    wrong = {
        f"layout.context={layout.context}": layout.context > 1,
        f"layout.slices={layout.slices}": layout.slices > 1,
        "data.pack=true": config.data.pack,
        "run.compile=true": config.run.compile,
        "run.task=inference": config.run.task == "inference",
        f"tune.method={config.tune.method}": config.tune.method in PROMPTS,
    }
    for named, there in wrong.items():
        if there:
            raise ConfigError(f"{named} is not offered for model.family={model.family}, which has an encoder; leave it out")
    if layout.sequence_parallel and model.decoder_seq % layout.tensor:
        raise ConfigError(
            f"layout.sequence_parallel shards model.decoder_seq={model.decoder_seq} over layout.tensor={layout.tensor}, which does not "
            f"divide it; set model.decoder_seq={-(-model.decoder_seq // layout.tensor) * layout.tensor}, or layout.sequence_parallel=false"
        )


def _check_latent(model: ResolvedModelConfig) -> None:
    if model.latent.kv_rank and model.positions == "rotary" and not model.latent.rotary:
        raise ConfigError("model.latent.rotary=0 leaves no number for model.positions=rotary; set one of them, as model.latent.rotary=64")


def _check_rope(model: ResolvedModelConfig) -> None:
    rope, width = model.rope, model.turning
    if rope.share > 1:
        raise ConfigError(f"model.rope.share={rope.share:g} is more than a head has; use a value from above 0 to 1")
    if not width.is_integer() or width % 2:
        name = "model.latent.rotary" if model.latent.kv_rank else "model.head_width"
        raise ConfigError(
            f"{name}={width / rope.share:g} x model.rope.share={rope.share:g} is {width:g} dimensions, which turn in pairs; "
            "change one of them (model.head_width is model.hidden / model.heads unless it is given)"
        )
    if rope.kind in ("yarn", "llama3", "longrope") and rope.original is None:
        raise ConfigError(f"model.rope.kind={rope.kind} needs the sequence length before scaling; set model.rope.original")
    if rope.kind == "llama3" and rope.high < rope.low:
        raise ConfigError(f"model.rope.high={rope.high:g} must not be below model.rope.low={rope.low:g}; change one of them")
    for name in ("short", "long") if rope.kind == "longrope" else ():
        if len(getattr(rope, name)) != width / 2:
            raise ConfigError(f"model.rope.{name} has {len(getattr(rope, name))} factors; give one for each of the {width / 2:g} pairs")


def _check_experts(model: ResolvedModelConfig) -> None:
    experts = model.experts
    if not experts.count:
        return
    if experts.active > experts.count:
        raise ConfigError(f"model.experts.active={experts.active} is more than model.experts.count={experts.count}; lower it")
    if experts.dense_layers >= model.layers or experts.every > model.layers:
        raise ConfigError(
            f"model.experts.dense_layers={experts.dense_layers} and model.experts.every={experts.every} leave no block of "
            f"model.layers={model.layers} with experts; lower one of them, or set model.experts.count=0"
        )
    _check_expert_groups(experts)


def _check_expert_groups(experts: ExpertsConfig) -> None:
    if experts.count % experts.groups:
        allowed = listed(d for d in divisors(experts.count) if d <= 64)
        raise ConfigError(f"model.experts.groups={experts.groups} does not divide model.experts.count={experts.count}; use {allowed}")
    if experts.active_groups > experts.groups:
        raise ConfigError(
            f"model.experts.active_groups={experts.active_groups} is more than model.experts.groups={experts.groups}; lower it"
        )
    each = experts.count // experts.groups
    if experts.active > experts.active_groups * each:
        raise ConfigError(
            f"model.experts.active={experts.active} is more than the {experts.active_groups * each} experts of "
            f"model.experts.active_groups={experts.active_groups}; raise that, or lower model.experts.active"
        )
    if experts.groups > 1 and experts.correction is not None and each == 1:
        raise ConfigError(
            f"model.experts.groups={experts.groups} leaves one expert in each group, and with model.experts.correction a group is as good "
            "as its best two; lower it"
        )


def untrained(model: ResolvedModelConfig) -> str | None:
    """Returns the key of a resolved model that our own trainer cannot train; None if it can train all."""
    mixes = model.experts.count > 0
    first = {
        f"model.biases={model.biases} with model.experts.count={model.experts.count}": mixes and {"up", "down"}.intersection(model.biases),
        f"model.predicted_tokens={model.predicted_tokens}": model.predicted_tokens,
        f"model.family={model.family} (attention sinks)": FAMILIES[model.family].attention_sinks,
        f"model.family={model.family} (further positions)": FAMILIES[model.family].further_positions,
    }
    return next((name for name, there in first.items() if there), None)


def _few_divisors(n: int) -> str:
    found = divisors(n)
    return listed(found if len(found) <= 12 else found[:12])


def _check_split(model: ModelConfig, layout: LayoutConfig) -> None:
    tensor, chunks = layout.tensor, layout.pipeline * layout.virtual_pipeline
    for name in ("heads", "kv_heads", "ffn"):
        value = getattr(model, name)
        if value % tensor:
            allowed = listed(d for d in divisors(value) if d <= 64)
            raise ConfigError(f"layout.tensor={tensor} does not divide model.{name}={value}; use {allowed}")
    _check_expert_split(model, layout)
    if layout.context > 1 and model.seq % (2 * layout.context):
        allowed = listed(d for d in divisors(model.seq) if d == 1 or (d <= 64 and model.seq % (2 * d) == 0))
        raise ConfigError(
            f"layout.context={layout.context} cuts model.seq={model.seq} in two pieces for each rank, one near its start and one near its "
            f"end, and {2 * layout.context} pieces do not divide it; use {allowed}, or change model.seq"
        )
    if layout.sequence_parallel and model.seq // layout.context % tensor:
        whose = f"model.seq={model.seq}" + f" / layout.context={layout.context}" * (layout.context > 1)
        raise ConfigError(
            f"layout.sequence_parallel shards {whose} over layout.tensor={tensor}, which does not divide it; "
            "change model.seq or set layout.sequence_parallel=false"
        )
    if layout.stage_layers is not None:
        if len(layout.stage_layers) != chunks or sum(layout.stage_layers) != model.layers or min(layout.stage_layers) < 0:
            raise ConfigError(
                f"layout.stage_layers={layout.stage_layers} must hold {chunks} counts (pipeline x virtual_pipeline) "
                f"that add up to model.layers={model.layers}"
            )
    elif chunks > model.layers:
        raise ConfigError(
            f"layout.pipeline={layout.pipeline} x layout.virtual_pipeline={layout.virtual_pipeline} = {chunks} stages "
            f"for model.layers={model.layers}; "
            f"use at most {model.layers} stages, or raise model.layers"
        )
    elif model.layers % chunks and layout.balance == "equal":
        raise ConfigError(
            f"layout.pipeline={layout.pipeline} x layout.virtual_pipeline={layout.virtual_pipeline} = {chunks} stages do not divide "
            f"model.layers={model.layers}; use {listed(d for d in divisors(model.layers) if d <= 64)} stages, layout.balance=cost, "
            "or give the split in layout.stage_layers"
        )


def _check_expert_split(model: ModelConfig, layout: LayoutConfig) -> None:
    experts = model.experts
    if not experts.count and folded_experts(layout) > 1:
        what = f"layout.expert={layout.expert} deals out" if layout.expert > 1 else f"layout.expert_tensor={layout.expert_tensor} cuts"
        raise ConfigError(
            f"{what} the experts of a block, and the model has none (model.experts.count=0); use 1, or set model.experts.count"
        )
    width = experts.ffn or model.ffn or 0
    if width % layout.expert_tensor:
        allowed = listed(d for d in divisors(width) if d <= 64)
        raise ConfigError(f"layout.expert_tensor={layout.expert_tensor} does not divide model.experts.ffn={width}; use {allowed}")
    if experts.count % layout.expert:
        allowed = listed(d for d in divisors(experts.count) if d <= 64)
        raise ConfigError(f"layout.expert={layout.expert} does not divide model.experts.count={experts.count}; use {allowed}")
    if experts.count and experts.shared_ffn % layout.tensor:
        raise ConfigError(
            f"layout.tensor={layout.tensor} does not divide model.experts.shared_ffn={experts.shared_ffn}; use "
            f"{listed(d for d in divisors(experts.shared_ffn) if d <= 64)}"
        )


def _check_schedule(config: TrainConfig) -> None:
    layout = config.layout
    if (layout.schedule == "interleaved") != (layout.virtual_pipeline > 1):
        raise ConfigError(
            f"layout.schedule={layout.schedule} with layout.virtual_pipeline={layout.virtual_pipeline}: "
            "interleaving needs both layout.schedule=interleaved and layout.virtual_pipeline of 2 or more"
        )
    if layout.virtual_pipeline > 1 and layout.pipeline == 1:
        raise ConfigError(
            f"layout.virtual_pipeline={layout.virtual_pipeline} needs layout.pipeline of 2 or more; set layout.virtual_pipeline=1"
        )


def _check_slices(model: ModelConfig, layout: LayoutConfig) -> None:
    """Checks that slices are of the schedule that has them, and cut every sequence."""
    if (layout.schedule == "sliced_1f1b") != (layout.slices > 1):
        raise ConfigError(
            f"layout.schedule={layout.schedule} with layout.slices={layout.slices}: slices need both layout.schedule=sliced_1f1b and "
            "layout.slices of 2 or more"
        )
    unit = layout.tensor if layout.sequence_parallel else 1
    each = f", each a multiple of layout.tensor={unit}, which sequence_parallel shards it over" if unit > 1 else ""
    lengths = layout.slice_lengths
    if lengths is None and layout.slices * unit > model.seq:
        raise ConfigError(
            f"layout.slices={layout.slices} is more than model.seq={model.seq} has positions to cut{each}; use {model.seq // unit} or fewer"
        )
    if lengths is not None and (
        len(lengths) != layout.slices or sum(lengths) != model.seq or any(length < 1 or length % unit for length in lengths)
    ):
        raise ConfigError(
            f"layout.slice_lengths={lengths} must hold layout.slices={layout.slices} lengths of 1 or more that add up to "
            f"model.seq={model.seq}{each}; change them, or leave them out for slices of equal work"
        )


def _check_own_slices(config: ResolvedTrainConfig) -> None:
    """Checks what our own trainer does with slices: they train and evaluate, on one context rank, where losses are sums over tokens."""
    layout, run, experts = config.layout, config.run, config.model.experts
    if config.command is not None or layout.slices == 1:
        return
    what = f"layout.slices={layout.slices}"
    if run.task in ("generate", "inference"):
        raise ConfigError(f"{what} cuts sequences of training, and texts are generated token by token; use layout.slices=1")
    if layout.context > 1:
        raise ConfigError(f"{what} keeps keys on one rank, and layout.context={layout.context} ranks share them; use one or the other")
    if experts.count and experts.balance_loss:
        raise ConfigError(
            f"{what} with model.experts.balance_loss={experts.balance_loss:g}, which is a loss of whole sequences; use layout.slices=1, or "
            "balance_loss=0 and model.experts.correction"
        )
    if run.compile:
        raise ConfigError(f"run.compile=true compiles blocks for one length of sequences, and {what} has several; use one of them")


def _check_batch(config: TrainConfig) -> None:
    layout, batch = config.layout, config.run.global_batch
    unit = layout.micro_batch * (layout.data or 1)
    if batch % unit:
        raise ConfigError(
            f"run.global_batch={batch} is not divisible by layout.micro_batch={layout.micro_batch} x layout.data={layout.data} = {unit}; "
            f"use a multiple of {unit}, such as {max(unit, round(batch / unit) * unit)}"
        )


def check_phases(config: TrainConfig) -> None:
    """Raises ``ConfigError`` unless phases are in order, and each reads whole sequences of the data."""
    before = 0
    for number, given in enumerate(config.run.phases):
        name, seq = f"run.phases[{number}]", config.model.seq
        batch, length = given.global_batch or config.run.global_batch, given.seq or seq
        if given.until is None:
            raise ConfigError(f"{name}.until is missing; give the tokens of the run with which the phase ends")
        if given.until <= before:
            raise ConfigError(
                f"{name}.until={given.until} leaves it no step: the phase before ends with {before} tokens; give more, in ascending order"
            )
        if seq % length:
            shorter = listed(d for d in divisors(seq) if d * 64 >= seq)
            why = f"is longer than model.seq={seq}, the length at the end" if length > seq else f"does not divide model.seq={seq}"
            raise ConfigError(f"{name}.seq={length} {why}; use {shorter}, or change model.seq")
        if length < seq:
            _check_pieces(config, f"{name}.seq={length}")
        if batch * length % seq:
            unit = seq // length
            raise ConfigError(
                f"{name}.global_batch={batch} of {name}.seq={length} tokens are not whole sequences of model.seq={seq}, of which they are "
                f"pieces; use a multiple of {unit}, such as {max(unit, round(batch / unit) * unit)}"
            )
        before += -(-(given.until - before) // (batch * length)) * batch * length


def _check_each_phase(config: ResolvedTrainConfig, world_size: int) -> None:
    """Checks every other rule with the sizes of each phase."""
    for number, phase in enumerate(PhaseTable.of(config.run, config.model.seq).phases[:-1]):
        try:
            check(phase.of(config), world_size)
        except ConfigError as error:
            where = f"run.phases[{number}], of run.global_batch={phase.global_batch} and model.seq={phase.seq}"
            raise ConfigError(f"{where}: {error}") from None


def _check_pieces(config: TrainConfig, name: str) -> None:
    """Checks that sequences can be cut in pieces."""
    if config.data.kind == "instructions":
        raise ConfigError(f"{name} would cut examples of data.kind=instructions; give global_batch alone, or use another data.kind")
    if FAMILIES[config.model.family].encoder_decoder or config.model.encoder_layers:
        raise ConfigError(f"{name} would cut what an encoder reads from what its decoder writes; give global_batch alone")
    if virtual_tokens(config.tune):
        raise ConfigError(f"{name} would cut virtual tokens of tune.method={config.tune.method} from their text; give global_batch alone")
    if config.layout.slice_lengths is not None:
        raise ConfigError(f"{name} is cut in slices of its own; leave layout.slice_lengths out for slices of equal work")


def _check_validation(config: TrainConfig) -> None:
    data, every = config.data, config.run.eval_every
    if every and config.run.task == "train" and (data.kind == "synthetic" or not data.held_out):
        raise ConfigError(
            f"run.eval_every={every} has no text to validate on: data.kind={data.kind}, data.held_out={data.held_out:g}; "
            "set data.held_out, such as 0.02, or run.eval_every=0"
        )


def _check_packing(config: TrainConfig) -> None:
    """Checks packing: packed rows mark an example's beginning by the answer before it; virtual tokens stand at the beginning of a row."""
    if not config.data.pack:
        return
    if config.data.kind != "instructions":
        raise ConfigError(f"data.pack=true packs examples, and data.kind={config.data.kind} has none; use data.pack=false")
    if virtual_tokens(config.tune):
        raise ConfigError(
            f"data.pack=true leaves no place before each example for the virtual tokens of tune.method={config.tune.method}; "
            "use data.pack=false"
        )
    if config.data.task is not None:
        raise ConfigError(f"data.pack=true packs examples of one task, and data.task={config.data.task} tells them apart; use one of them")
    if config.run.compile:
        raise ConfigError(
            "run.compile=true compiles blocks for which all rows are alike, and those of data.pack=true are not; use one of them"
        )


def _check_optimizer(optimizer: ResolvedOptimizerConfig) -> None:
    for name, value in to_dict(MuonConfig()).items() if optimizer.kind != "muon" else ():
        if (given := getattr(optimizer.muon, name)) != value:
            raise ConfigError(
                f"optimizer.muon.{name}={str(given).lower()} is for optimizer.kind=muon, not {optimizer.kind}; leave one of them out"
            )
    if optimizer.muon.momentum >= 1:
        raise ConfigError(
            f"optimizer.muon.momentum={optimizer.muon.momentum:g} never learns from a gradient; use a value from 0 to below 1"
        )
    start = optimizer.warmup_steps + optimizer.stable_steps
    if optimizer.stable_steps and start > optimizer.decay_steps:
        raise ConfigError(
            f"optimizer.warmup_steps={optimizer.warmup_steps} and optimizer.stable_steps={optimizer.stable_steps} end after "
            f"optimizer.decay_steps={optimizer.decay_steps}, by which the rate has fallen; lower one of them, or raise that"
        )
    for f in dataclasses.fields(GroupsConfig):
        own = getattr(optimizer.groups, f.name).lr
        if own is not None and optimizer.lr == 0:
            raise ConfigError(f"optimizer.groups.{f.name}.lr={own:g} has the schedule of optimizer.lr=0, which has none; set optimizer.lr")


def _check_moments(config: ResolvedTrainConfig) -> None:
    """Checks the format of moments: bf16 has 8 significant bits, so an average that moves by less than a part in 256 would stand still."""
    run, optimizer = config.run, config.optimizer
    if run.moments == "fp32":
        return
    if run.precision not in ("bf16", "fp16", "fp8"):
        raise ConfigError(f"run.moments=bf16 is for run.precision=bf16, fp16 or fp8, and it is {run.precision}; leave one of them out")
    shares = {"beta1": optimizer.beta1, "beta2": optimizer.beta2} | (
        {"muon.momentum": optimizer.muon.momentum} if optimizer.one_moment else {}
    )
    for name, share in shares.items():
        if 1 - share < 2**-8:
            raise ConfigError(
                f"optimizer.{name}={share:g} moves a moment by less than bf16 can hold; use {1 - 2**-8:g} or less, or run.moments=fp32"
            )


def _check_eight_bits(config: ResolvedTrainConfig) -> None:
    """Checks sizes for products of 8-bit numbers, which take sixteen of them at a time (torch._scaled_mm)."""
    model, layout = config.model, config.layout
    if config.run.precision != "fp8" or config.command is not None:
        return
    for name, width in (*_widths_of_attention(model), ("model.hidden", model.hidden), ("model.ffn", model.ffn)):
        if width % (16 * layout.tensor):
            raise ConfigError(
                f"run.precision=fp8 wants widths of a multiple of 16 on each tensor rank, and {name} has {width} on {layout.tensor}; use "
                "another width, fewer tensor ranks or run.precision=bf16"
            )


def _widths_of_attention(model: ResolvedModelConfig) -> list[tuple[str, int]]:
    """Returns inner and outer widths, with names, of attention's matrices that tensor ranks share."""
    latent = model.latent
    output = ("model.heads x width of a value", model.value_width)
    if not latent.kv_rank:
        return [output, ("queries, keys and values", model.query_width + 2 * model.kv_width)]
    queries = model.query_width + model.heads * latent.rotary
    ranks = [(f"model.latent.{name}", rank) for name in ("kv_rank", "query_rank") if (rank := getattr(latent, name))]
    return [output, *ranks, ("queries", queries), ("keys and values", model.query_width + model.value_width)]


def _check_async_tensor(config: TrainConfig) -> None:
    """Checks asynchronous tensor parallelism: it fuses the gathers and reduce-scatters of sequence parallelism with products in the format
    of the activations."""
    layout, run = config.layout, config.run
    if not run.async_tensor:
        return
    if layout.tensor == 1 or not layout.sequence_parallel:
        raise ConfigError(
            "run.async_tensor=true is for layout.sequence_parallel=true on several tensor ranks, and the layout has "
            f"layout.tensor={layout.tensor}, layout.sequence_parallel={str(layout.sequence_parallel).lower()}; change the layout or use "
            "run.async_tensor=false"
        )
    if run.precision == "fp8":
        raise ConfigError("run.async_tensor=true has no products of run.precision=fp8; use run.precision=bf16 or run.async_tensor=false")


def _check_sharding(layout: LayoutConfig) -> None:
    sharding, whole = layout.sharding, "layout.data" + " x layout.context" * (layout.context > 1)
    replicas = shared_ranks(layout)
    chain = [("params", sharding.params), ("grads", sharding.grads), ("optimizer", sharding.optimizer), ("", replicas)]
    for (name, value), (above, limit) in itertools.pairwise(chain):
        if limit % value:
            upper = f"layout.sharding.{above}={limit}" if above else f"{whole}={limit}"
            raise ConfigError(
                f"layout.sharding.{name}={value} does not divide {upper} (each of params, grads, optimizer, data must divide the next); "
                f"use {listed(divisors(limit))}"
            )


def check_offload(share: float, optimizer: str) -> None:
    """Raises ``ConfigError`` for a ``share`` of states in host memory of an ``optimizer`` that cannot have them there."""
    if share and optimizer != "adamw":
        raise ConfigError(
            f"layout.sharding.offload={share:g} moves states of AdamW to the host, and optimizer.kind={optimizer} needs its momentum where "
            "matrices are multiplied; use layout.sharding.offload=0 or optimizer.kind=adamw"
        )


def _check_offload(config: ResolvedTrainConfig) -> None:
    share = config.layout.sharding.offload
    check_offload(share, config.optimizer.kind)
    if config.run.offload_path is not None and not share:
        raise ConfigError(
            f"run.offload_path={config.run.offload_path} is for states of layout.sharding.offload, which is 0; raise it, or leave the path "
            "out"
        )
