"""Rules of our own trainer alone: combinations that it does not offer, and keys that others do not know."""

from __future__ import annotations

import itertools

from trainer.shared.families.registry import FAMILIES
from trainer.shared.run.derived import folded_experts
from trainer.shared.run.errors import ConfigError, divisors, listed
from trainer.shared.run.limits.layout import expert_axes
from trainer.shared.run.read import flatten
from trainer.shared.run.resolved import ResolvedModelConfig, ResolvedTrainConfig
from trainer.shared.run.schema import TrainConfig
from trainer.shared.run.tuning import PROMPTS

OWN_KEYS = (
    *("run.phases", "run.deterministic", "run.async_tensor", "run.context_exchange", "model.zero_init", "model.transfer."),
    *("layout.sharding.offload", "run.offload_path"),
    *("optimizer.kind", "optimizer.stable_steps", "optimizer.decay_style", "optimizer.groups.", "optimizer.muon."),
    *("optimizer.cautious", "optimizer.average_from"),
)
"""Beginnings of keys that our own trainer alone knows."""


def check_own_keys(config: ResolvedTrainConfig, trainer: str) -> None:
    usual = flatten(TrainConfig())
    for name, value in flatten(config).items():
        if name.startswith(OWN_KEYS) and value != usual[name]:
            raise ConfigError(f"{name}={str(value).lower()} is for our own trainer; leave it out for trainer={trainer}")


def check_context(config: ResolvedTrainConfig) -> None:
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


def check_own_experts(config: ResolvedTrainConfig) -> None:
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
    axes = ("layout.expert_tensor", layout.expert_tensor), (expert_axes(layout), folded_experts(layout))
    for (name, ranks), (unit, size) in itertools.product(axes, near.items()):
        if size % ranks and ranks % size:
            raise ConfigError(
                f"{name}={ranks} neither divides {unit}={size} nor is a multiple of it; use {size}, a divisor or a multiple of it, or "
                f"{unit}=1"
            )
    if config.run.task in ("generate", "inference") and layout.tensor % folded_experts(layout):
        raise ConfigError(
            f"{expert_axes(layout)}={folded_experts(layout)} does not divide layout.tensor={layout.tensor}, and replicas that answer "
            f"requests share no experts; use {listed(divisors(layout.tensor))}"
        )


def check_own_latents(config: ResolvedTrainConfig) -> None:
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


def check_own_stacks(config: ResolvedTrainConfig) -> None:
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


def check_own_slices(config: ResolvedTrainConfig) -> None:
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


def check_eight_bits(config: ResolvedTrainConfig) -> None:
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


def check_async_tensor(config: TrainConfig) -> None:
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
