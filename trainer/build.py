"""Builds a rank's part of a run from its configuration: its part of the model, its share of the state, and its pipeline."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace

import torch

from trainer.comm.clock import Clock
from trainer.comm.collectives import World
from trainer.comm.groups import Groups
from trainer.measure.memory import ActivationMeter, check_room
from trainer.measure.meter import Recorder
from trainer.models.attention import kernels_by_preference
from trainer.models.encoder_decoder import network
from trainer.models.transformer import Transformer
from trainer.models.tuned import add_tuning
from trainer.pipeline.compile import compile_blocks, compiles
from trainer.pipeline.recompute import apply_recompute
from trainer.pipeline.runtime import Boundary, Chunk, PipelineRuntime
from trainer.shared.parallel.actions import Action
from trainer.shared.parallel.balance import blocks_per_chunk, slices_of
from trainer.shared.parallel.boundary import shapes_between
from trainer.shared.parallel.placement import FOLDED
from trainer.shared.parallel.schedule import build
from trainer.shared.parallel.shards import Factors
from trainer.shared.run.derived import micro_batches
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.phases import phases_of
from trainer.shared.run.resolved import ResolvedTrainConfig
from trainer.state.bucket import BucketSettings, Precision
from trainer.state.buffers import CollectiveQueue, Pool
from trainer.state.gathering import Gathering
from trainer.state.host import HostMemory
from trainer.state.parameters import ModelParameter, OptimizerShard
from trainer.state.sharding import ShardedState
from trainer.tensor.context import EXCHANGE_CLASSES, ContextExchange
from trainer.tensor.dropout import Noise
from trainer.tensor.eight_bits import EightBitProduct
from trainer.tensor.experts import ExpertBalance
from trainer.tensor.fused import FusedProducts
from trainer.tensor.parallelize import Parallelizer
from trainer.tensor.placed import hide_padding, separate_texts
from trainer.tensor.region import Region, SequenceSlices
from trainer.tensor.slices import EarlierKeys

FORWARD_TASKS = ("evaluate", "generate", "inference")
"""Values of ``run.task`` that take weights as they are given and change nothing: there are no initial weights, gradients and moments."""


@dataclass(frozen=True)
class Rank:
    """This rank's part of a run: what it holds of the model, and what computes with it."""

    config: ResolvedTrainConfig
    world: World
    groups: Groups
    region: Region
    precision: Precision
    positions: int  # that weights are made for
    state: ShardedState
    shards: list[OptimizerShard]  # of all parameters, frozen ones too
    balance: ExpertBalance | None  # of mixtures of experts
    pipeline: PipelineRuntime
    recorder: Recorder
    activations: ActivationMeter
    kernels: contextlib.ExitStack  # the preference among kernels of attention, which holds as long as this lives

    @property
    def device(self) -> torch.device:
        return self.world.device

    @property
    def clock(self) -> Clock:
        return self.recorder.clock

    @property
    def base_shards(self) -> list[OptimizerShard]:
        """Lists the shards whose weights are a base's: all but those that tuning adds."""
        return [shard for shard in self.shards if self.config.tune.method == "full" or not shard.record.trainable]

    def draw_weights(self) -> None:
        """Makes the weights of step 0, but for those of a base, which are read. Collective: every rank draws what it keeps."""
        for bucket in self.state.buckets:
            if not (bucket.frozen and self.config.tune.base):
                bucket.initialize(self.config.run.seed)
        self.state.publish_updates()
        self.state.settle()
        self.world.ledger.clear()  # what counts is what steps send

    def resize(self, config: ResolvedTrainConfig) -> None:
        """Makes the steps that follow those of ``config``, which is this rank's but for ``run.global_batch`` and ``model.seq``."""
        if config.layout.slices > 1:
            self.region.slices.runs = slices_of(config.model, config.layout)
        if self.balance is not None:
            self.balance.seq = config.model.seq
        boundary = _boundary(config, self.region, self.precision, self.device)
        self.pipeline.resize(_actions(config, self.groups), boundary)

    def memory(self) -> dict[str, int]:
        """Returns counted bytes by part: weights, gradients, optimizer, activations."""
        return self.state.nbytes | {"activations": self.activations.peak}

    def peak_memory(self) -> int:
        """Returns the device's own peak, or the counted bytes on a device that keeps none."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return sum(self.memory().values())


def build_rank(config: ResolvedTrainConfig, world: World, positions: int | None = None) -> Rank:
    """Returns this rank's part. Collective. ``positions``: how many the weights are made for, if more than those of a row."""
    mixes, trains = bool(config.model.mixtures), config.run.task not in FORWARD_TASKS
    one_moment = config.optimizer.one_moment
    groups = Groups.make(world, config.layout, config.model.tied, mixes, exchanges=trains and bool(one_moment))
    precision = Precision.of(config.run.precision, trains, config.run.moments)
    slices = SequenceSlices(slices_of(config.model, config.layout) if config.layout.slices > 1 else ())
    region, noise = Region(groups.tensor, config.layout.sequence_parallel, groups.context, slices), Noise(config.run.seed)
    recorder, positions = Recorder(world.ledger.clock, world.ledger), positions or config.model.seq
    share = config.layout.sharding.offload if trains else 0.0
    host = HostMemory.of(share, world, config.run.offload_path) if share else None
    state = _state(config, groups, precision, trains, world.device, host)
    parallelizer = _parallelizer(config, groups, region, state, noise, precision)
    if mixes:
        first = groups.at["tensor"] == groups.at["context"] == groups.at["data"] == 0
        parallelizer.balance = ExpertBalance(config.model, precision.master, world.device, first)
    parts = [
        _model_part(config, parallelizer, positions, chunk * config.layout.pipeline + groups.at["pipeline"])
        for chunk in range(config.layout.virtual_pipeline)
    ]
    for _, parameters in reversed(parts):  # backward starts in the last part
        state.add_model_part(parameters)
    there = state.planned_host
    check_room(state.planned_bytes, config.run.memory_gb, world, there.memory)
    if host is not None:
        world.group.together(lambda: host.reserve(there.file), (ConfigError,))
    state.make()
    chunks = [Chunk(part, Gathering(state, list(part.units()), part.embedding is not None), noise) for part, _ in parts]
    boundary = _boundary(config, region, precision, world.device)
    return Rank(
        config,
        world,
        groups,
        region,
        precision,
        positions,
        state,
        state.optimizer_shards() + ([] if parallelizer.balance is None else parallelizer.balance.shards),
        parallelizer.balance,
        _pipeline(config, groups, chunks, state, boundary, recorder),
        recorder,
        _activation_meter(config, state),
        _kernels(world.device),
    )


def _state(
    config: ResolvedTrainConfig, groups: Groups, precision: Precision, trains: bool, device: torch.device, host: HostMemory | None
) -> ShardedState:
    pool, queue = Pool(device), CollectiveQueue()
    one_moment = config.optimizer.one_moment
    dense = BucketSettings(Factors.of(config.layout), groups.shared_at, groups.levels, precision, pool, queue, trains, one_moment, host)
    dense = replace(dense, averages=trains and config.optimizer.average_from is not None)
    settings = {"data": dense}
    if groups.expert_levels:
        factors = Factors.of_experts(config.layout)
        settings[FOLDED] = replace(dense, factors=factors, data_index=groups.experts_at, levels=groups.expert_levels)
    return ShardedState(settings, int(config.run.bucket_mb * 2**20))


def _parallelizer(
    config: ResolvedTrainConfig, groups: Groups, region: Region, state: ShardedState, noise: Noise, precision: Precision
) -> Parallelizer:
    layout, device = config.layout, state.pool.device
    exchange: ContextExchange | EarlierKeys | None = None
    if layout.slices > 1:
        exchange = EarlierKeys(region.slices, state)
    elif layout.context > 1:
        exchange = EXCHANGE_CLASSES[config.run.context_exchange](region, state)
    parallelizer = Parallelizer(groups.axes, region, state, noise, precision.compute, device, exchange=exchange)
    if config.run.precision == "fp8":
        parallelizer.eight_bits = EightBitProduct.on(device, compiles(config.run.compile, device))
    if config.run.async_tensor:
        rows = config.model.seq // layout.context // layout.tensor * layout.micro_batch
        largest = rows * config.model.hidden * precision.compute.itemsize
        parallelizer.fused = FusedProducts.on(device, groups.tensor, groups.world, largest)
    return parallelizer


def _model_part(
    config: ResolvedTrainConfig, parallelizer: Parallelizer, positions: int, stage: int
) -> tuple[Transformer, list[ModelParameter]]:
    """Returns part ``stage`` of the model in its parallel form, and its parameters, which have no storage yet."""
    counts, noise, layout = blocks_per_chunk(config.model, config.layout), parallelizer.noise, config.layout
    blocks = range(sum(counts[:stage]), sum(counts[: stage + 1]))
    with torch.device("meta"):
        part = network(replace(config.model, seq=positions), blocks, first=stage == 0, last=stage == len(counts) - 1)
        parallelizer.added = add_tuning(part, config.model, config.tune)
    parameters = parallelizer.apply(part)
    if config.data.pack:
        separate_texts(part, noise.texts)
    if config.model.encoder_layers and config.data.kind == "instructions":
        hide_padding(part, noise.texts)
    apply_recompute(part, layout, noise)
    eager = config.data.pack or layout.context > 1 or layout.slices > 1 or config.model.encoder_layers
    compiled = False if eager else config.run.compile
    lengths = len({phase.seq for phase in phases_of(config).phases})
    compile_blocks(part.blocks, compiled, config.run.compile_fallback, parallelizer.device, lengths)
    return part, parameters


def _pipeline(
    config: ResolvedTrainConfig, groups: Groups, chunks: list[Chunk], state: ShardedState, boundary: Boundary, recorder: Recorder
) -> PipelineRuntime:
    slices = boundary.region.slices
    return PipelineRuntime(_actions(config, groups), chunks, state, boundary, slices, groups.up, groups.down, recorder)


def _actions(config: ResolvedTrainConfig, groups: Groups) -> list[Action]:
    """Returns what this rank does in a step."""
    layout = config.layout
    schedule = build(layout.schedule, layout.pipeline, layout.virtual_pipeline, micro_batches(config), layout.slices)
    return schedule[groups.at["pipeline"]]


def _boundary(config: ResolvedTrainConfig, region: Region, precision: Precision, device: torch.device) -> Boundary:
    model, layout = config.model, config.layout
    shapes = shapes_between(model, layout, (layout.tensor if layout.sequence_parallel else 1) * layout.context)
    return Boundary.of(shapes, region, precision.compute, device)


def _activation_meter(config: ResolvedTrainConfig, state: ShardedState) -> ActivationMeter:
    """Returns the counter of the first step's activations, which may take what the states leave of ``run.memory_gb``."""
    states, limit = sum(state.nbytes.values()), config.run.memory_gb
    resting = {bucket.shard.untyped_storage().data_ptr() for bucket in state.buckets}
    return ActivationMeter(resting, None if limit is None else round(limit * 1e9) - states)


def _kernels(device: torch.device) -> contextlib.ExitStack:
    kernels = contextlib.ExitStack()
    if device.type == "cuda":
        kernels.enter_context(kernels_by_preference(torch.cuda.get_device_capability(device)))
    return kernels
