"""Rules of a layout: how a model is cut, scheduled and sharded over ranks."""

from __future__ import annotations

import itertools

from trainer.shared.run.derived import folded_experts, shared_ranks, world_size_of
from trainer.shared.run.errors import ConfigError, divisors, listed
from trainer.shared.run.resolved import ResolvedTrainConfig
from trainer.shared.run.schema import LayoutConfig, ModelConfig, TrainConfig


def data_degree(layout: LayoutConfig, world_size: int) -> int:
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


def check_world(layout: LayoutConfig, world_size: int) -> None:
    needed = world_size_of(layout)
    if needed > world_size:
        raise _too_many_ranks(layout, needed, world_size)
    folded = layout.tensor * layout.context * (layout.data or 1)
    if folded % folded_experts(layout):
        raise ConfigError(
            f"{expert_axes(layout)}={folded_experts(layout)} does not divide the {folded} ranks of layout.tensor x layout.context x "
            f"layout.data, to which experts are dealt out; use {listed(d for d in divisors(folded) if d <= 64)}"
        )


def expert_axes(layout: LayoutConfig) -> str:
    """Names the axes of those for a message: that of parts of an expert where there are any."""
    return "layout.expert_tensor x layout.expert" if layout.expert_tensor > 1 else "layout.expert"


def check_split(model: ModelConfig, layout: LayoutConfig) -> None:
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


def check_schedule(config: TrainConfig) -> None:
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


def check_slices(model: ModelConfig, layout: LayoutConfig) -> None:
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


def check_sharding(layout: LayoutConfig) -> None:
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


def check_offloading(config: ResolvedTrainConfig) -> None:
    share = config.layout.sharding.offload
    check_offload(share, config.optimizer.kind)
    if config.run.offload_path is not None and not share:
        raise ConfigError(
            f"run.offload_path={config.run.offload_path} is for states of layout.sharding.offload, which is 0; raise it, or leave the path "
            "out"
        )
