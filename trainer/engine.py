"""A rank's part of a run: its part of the model, its share of the state, and the optimizer step."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trainer.comm.collectives import World
from trainer.comm.groups import Groups
from trainer.data import Dataset
from trainer.data.prefetch import Prefetch
from trainer.launch.failure import NonFinite
from trainer.measure.memory import ActivationMeter, check_room
from trainer.measure.meter import Recorder
from trainer.models.attention import kernels_by_preference
from trainer.models.transformer import Transformer
from trainer.models.tuned import add_tuning, task_of
from trainer.pipeline.compile import compile_blocks, compiles
from trainer.pipeline.nonfinite import find
from trainer.pipeline.recompute import apply_recompute, chosen_blocks
from trainer.pipeline.runtime import Boundary, Chunk, PipelineRuntime
from trainer.shared.parallel.balance import blocks_per_chunk
from trainer.shared.parallel.schedule import build
from trainer.shared.parallel.shards import Factors, vocabulary_rows
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.flops import recomputed_flops
from trainer.shared.run.rules import micro_batches
from trainer.shared.run.schema import LOSS_CHUNK_MB, ResolvedTrainConfig
from trainer.shared.run.tuning import PROMPTS
from trainer.state.bucket import BucketSettings, Precision
from trainer.state.buffers import CollectiveQueue, Pool
from trainer.state.gathering import Gathering
from trainer.state.loss_scale import LossScale
from trainer.state.optimizer import AdamW, learning_rate, squared_norm, sum_partial
from trainer.state.sharding import ShardedState
from trainer.tensor.cross_entropy import Targets, answered, head_loss
from trainer.tensor.dropout import DropoutKey, Noise
from trainer.tensor.eight_bits import EightBitProduct
from trainer.tensor.fused import FusedProducts
from trainer.tensor.layers import ColumnLinear, Region
from trainer.tensor.parallelize import Parallelizer
from trainer.tensor.placed import Texts, separate_texts

PROCESS = contextlib.ExitStack()
"""What holds until this process ends."""
FORWARD_TASKS = ("evaluate", "generate", "inference")
"""Values of ``run.task`` that take weights as they are given and change nothing: there are no initial weights, gradients and moments."""


@dataclass(frozen=True)
class StepResult:
    """The outcome of a step, the same on every rank."""

    loss: float  # mean over the targets of the global batch; of several tasks, the mean of theirs
    grad_norm: float
    lr: float
    stop: bool  # some rank was asked to stop
    skipped: bool  # the loss or the norm was not finite, and the weights are unchanged
    seconds: float


@dataclass(frozen=True)
class QueuedStep:
    """A step that the device has still to compute, or is computing."""

    batch: TokenBatch
    lr: float
    sums: Tensor  # loss, stop requests, targets, squared norm of each task's gradient, on the host once ``end`` has passed
    measured: bool  # the recorder has its parts
    start: Any  # stamps of the clock
    end: Any


@dataclass(frozen=True)
class TokenBatch:
    """A replica's tokens of one step (``trainer.pipeline.runtime.Batch``)."""

    rows: Tensor | None  # [micro-batches, s + 1, b]; what is no target is given as its complement
    step: int
    first_row: int  # in the global batch
    size: int  # b
    weight: float  # of one token in the loss, times the loss scale
    columns: int  # of this rank's logits, without padding
    chunk_mb: float  # logits at once
    fused: bool  # the loss of them, by compiled kernels
    packed: bool  # rows hold several texts each
    shares: Tensor | None = None  # [micro-batches, b]: what a target of each row counts, where tasks are tuned at once
    tasks: int = 1  # in the global batch

    def tokens(self, micro_batch: int) -> Tensor:
        assert self.rows is not None
        rows = self.rows[micro_batch, :-1]
        return torch.where(rows < 0, ~rows, rows)

    @property
    def targets(self) -> Tensor:
        """How many targets the replica's rows have."""
        assert self.rows is not None
        return (self.rows[:, 1:] >= 0).sum()

    def loss(self, x: Tensor, head: nn.Module, micro_batch: int) -> Tensor:
        return head_loss(x, *self.wanted(head, micro_batch))

    def wanted(self, head: nn.Module, micro_batch: int) -> tuple[ColumnLinear, Targets]:
        """The head, and what its logits are compared with."""
        assert self.rows is not None and isinstance(head, ColumnLinear)
        weight = self.weight if self.shares is None else self.weight * self.shares[micro_batch]
        return head, Targets(self.rows[micro_batch, 1:], weight, self.columns, self.chunk_mb, self.fused)

    def dropout_key(self, micro_batch: int) -> DropoutKey:
        texts = Texts.of(self.rows[micro_batch]) if self.packed and self.rows is not None else None
        return DropoutKey(self.step, self.first_row + micro_batch * self.size, texts)


@dataclass(frozen=True)
class AskedBatch(TokenBatch):
    """Examples: the loss of their answers, and how many of these are the likeliest words, [2]."""

    def loss(self, x: Tensor, head: nn.Module, micro_batch: int) -> Tensor:
        loss, right = super().loss(x, head, micro_batch), answered(x, *self.wanted(head, micro_batch)).sum()
        return torch.stack((loss.double(), right.double()))


class Engine:
    """Built once per rank of ``world``, from a resolved configuration."""

    def __init__(self, config: ResolvedTrainConfig, world: World, dataset: Dataset, draws: bool = True, positions: int | None = None):
        """Without ``draws``, weights come from a checkpoint, or from ``draw_weights`` later. ``positions``: how many these are made for, if
        more than those of a row."""
        self.config, self.world, self.device, self.dataset = config, world, world.device, dataset
        layout, model = config.layout, config.model
        self.groups = Groups.make(world, layout, model.tied)
        if self.device.type == "cuda":
            PROCESS.enter_context(kernels_by_preference(torch.cuda.get_device_capability(self.device)))
        self.trains, self.positions = config.run.task not in FORWARD_TASKS, positions or model.seq
        self.precision = Precision.of(config.run.precision, self.trains, config.run.moments)
        self.clock = world.ledger.clock
        self.recorder = Recorder(self.clock, world.ledger)
        self.micro_batches = micro_batches(config)
        self.tokens_per_step = config.run.global_batch * model.seq
        self.region = Region(self.groups.tensor, layout.sequence_parallel)
        dense = BucketSettings(
            Factors.of(layout),
            self.groups.at["data"],
            self.groups.levels,
            self.precision,
            Pool(world.device),
            CollectiveQueue(),
            self.trains,
        )
        self.state = ShardedState({"data": dense}, int(config.run.bucket_mb * 2**20))
        self.added: set[str] = set()  # names of parameters that tuning has added to those of the model
        chunks = self._build_chunks()
        self.held = self.state.optimizer_shards()
        self.owned = [piece for piece in self.held if piece.record.trainable]
        tasks = range(config.tune.tasks)
        self.tasks = [[piece for piece in self.owned if task_of(piece.record.name) == task] for task in tasks]
        self.optimizer = AdamW(config.optimizer, self.tasks, world.device)
        self.scale = LossScale.of(config.run.precision)
        self.reads_late = self.clock.on_device and not self.scale.dynamic and config.run.on_nonfinite == "stop"
        self.halted = torch.zeros((), device=world.device)  # 1 after a step that was not finite, where that ends the run
        self.prefetch = Prefetch(self._read_rows, config.run.global_batch)
        self.samples = 0  # consumed by the steps before
        self.updates = 0  # optimizer updates; skipped steps do not count, nor do they advance the learning rate
        seq = model.seq // layout.tensor if layout.sequence_parallel else model.seq
        boundary = Boundary.of((seq, layout.micro_batch, model.hidden), self.region, self.precision.compute, world.device)
        schedule = build(layout.schedule, layout.pipeline, layout.virtual_pipeline, self.micro_batches)
        self.pipeline = PipelineRuntime(
            schedule[self.groups.at["pipeline"]], chunks, self.state, boundary, self.groups.up, self.groups.down, self.recorder
        )
        self.activations = self._activation_meter()
        if draws and self.trains:
            self.draw_weights()

    def draw_weights(self) -> None:
        """The weights of step 0. Collective: every rank draws what it keeps."""
        for bucket in self.state.buckets:
            if not (bucket.frozen and self.config.tune.base):  # the base's are read
                bucket.initialize(self.config.run.seed)
        self.state.publish_updates()
        self.state.settle()
        self.world.ledger.clear()  # what counts is what steps send

    def _build_chunks(self) -> list[Chunk]:
        """This rank's chunks; the last one's state is made first, because backward starts there."""
        layout, model, at = self.config.layout, self.config.model, self.groups.at
        counts, longest = blocks_per_chunk(model, layout), replace(model, seq=self.positions)
        stages, noise = layout.pipeline, Noise(self.config.run.seed)
        parallelizer = Parallelizer(self.groups.axes, self.region, self.state, noise, self.precision.compute, self.device)
        if self.config.run.precision == "fp8":
            parallelizer.eight_bits = EightBitProduct.on(self.device, compiles(self.config.run.compile, self.device))
        if self.config.run.async_tensor:
            rows = model.seq // layout.tensor * layout.micro_batch
            largest = rows * model.hidden * self.precision.compute.itemsize
            parallelizer.fused = FusedProducts.on(self.device, self.groups.tensor, self.groups.world, largest)
        models, members = [], []
        for chunk in range(layout.virtual_pipeline):
            stage = chunk * stages + at["pipeline"]
            start = sum(counts[:stage])
            with torch.device("meta"):
                model_part = Transformer(longest, range(start, start + counts[stage]), first=stage == 0, last=stage == len(counts) - 1)
                parallelizer.added = add_tuning(model_part, model, self.config.tune)
                self.added |= parallelizer.added or set()
            models.append(model_part)
            members.append(parallelizer.apply(model_part))
            if self.config.data.pack:
                separate_texts(model_part, noise.texts)
            apply_recompute(model_part, layout, noise)
            compile_blocks(
                model_part.blocks,
                False if self.config.data.pack else self.config.run.compile,
                self.config.run.compile_fallback,
                self.device,
            )
        for own in reversed(members):
            self.state.add_model_part(own)
        check_room(self.state.planned_bytes, self.config.run.memory_gb, self.world)
        self.state.make()
        return [
            Chunk(model_part, Gathering(self.state, list(model_part.units()), model_part.embedding is not None), noise)
            for model_part in models
        ]

    def _activation_meter(self) -> ActivationMeter:
        """Counts the first step's activations, which may take what the states leave of ``run.memory_gb``."""
        states, limit = sum(self.state.nbytes.values()), self.config.run.memory_gb
        resting = {bucket.shard.untyped_storage().data_ptr() for bucket in self.state.buckets}
        return ActivationMeter(resting, None if limit is None else round(limit * 1e9) - states)

    def step(self, step: int, stop: bool = False, watch: bool = False) -> StepResult:
        """Optimizer step number ``step``, from 0. ``stop`` asks all ranks to stop after it; ``watch`` counts activations."""
        return self.read(self.queue(step, stop, watch))

    def queue(self, step: int, stop: bool = False, watch: bool = False) -> QueuedStep:
        """Give the device all work of a step. The host waits for none of it (on a GPU; a CPU computes at once).

        The next step may be queued before this one is ``read`` if ``reads_late``: otherwise it needs to know whether this one counts.
        """
        self.recorder.begin()
        start = self.recorder.start
        with self.recorder.span("data"):
            batch = self._batch(None if self._idle() else self.prefetch.rows(self.samples), step)
            batch = self._with_shares(batch)
        self.state.counted = self.activations.track if watch else None
        with self.activations.watching() if watch else contextlib.nullcontext():
            losses = self._gradients(batch)
        with self.recorder.span("communication"):
            self.state.finish()
        with self.recorder.span("optimizer"):
            lr, sums = self._update(batch, losses, stop)
        self.samples += self.config.run.global_batch
        self.updates += 1
        return QueuedStep(batch, lr, sums, self.clock.marking, start, self.clock.stamp())

    def read(self, queued: QueuedStep) -> StepResult:
        """Wait for a step, the only wait of the host for the device. Its outcome."""
        self.clock.wait(queued.end)
        loss, stops, targets, *squares = queued.sums.tolist()
        ratio = self.tokens_per_step / max(targets, 1)
        loss, squared = loss * ratio / queued.batch.tasks, sum(squares) * ratio**2
        skipped = not (math.isfinite(loss) and math.isfinite(squared))
        if skipped:
            self.updates -= 1
            self._not_finite(queued.batch, loss)
        else:
            self.scale.succeeded()
        norm = math.sqrt(squared) if squared >= 0 else squared
        return StepResult(loss, norm, queued.lr, stops > 0, skipped, self.clock.seconds(queued.start, queued.end))

    def _gradients(self, batch: TokenBatch) -> list[Tensor]:
        """Forward and backward of all micro-batches. Gradient reductions may still be running when it returns."""
        self.state.begin(self.micro_batches)
        return self.pipeline.step(batch)

    def batch_of(self, dataset: Dataset, start: int, step: int = 0) -> TokenBatch:
        """This replica's rows of the global batch that begins with sample ``start``; without a tensor on ranks that have neither embedding
        nor head."""
        return self._batch(None if self._idle() else self._read_rows(start, dataset), step)

    def _idle(self) -> bool:
        """Whether this rank has neither embedding nor head, and reads nothing. Where texts begin in packed rows concerns every block."""
        ends = any(chunk.model.embedding is not None or chunk.model.head is not None for chunk in self.pipeline.chunks)
        return not (ends or self.config.data.pack)

    def _read_rows(self, start: int, dataset: Dataset | None = None) -> Tensor:
        """This replica's rows of the batch from sample ``start`` on, [micro-batches, s + 1, b]; on a GPU's host in pinned memory."""
        count = self.micro_batches * self.config.layout.micro_batch
        first = start + self.groups.at["data"] * count
        array = torch.from_numpy(self._with_task((dataset or self.dataset).batch(first, count), first))
        rows = array.view(self.micro_batches, self.config.layout.micro_batch, -1).transpose(1, 2).contiguous()
        return rows.pin_memory() if self.device.type == "cuda" else rows

    def _batch(self, rows: Tensor | None, step: int) -> TokenBatch:
        size = self.config.layout.micro_batch
        here = None if rows is None else rows.to(self.device, non_blocking=True)
        first, weight = self.groups.at["data"] * self.micro_batches * size, self.scale.value / self.tokens_per_step
        chunk = self.config.run.loss_chunk_mb or LOSS_CHUNK_MB[self.device.type]
        fused = compiles(self.config.run.compile, self.device)
        return TokenBatch(here, step, first, size, weight, self._vocabulary_width(), chunk, fused, self.config.data.pack)

    def _with_task(self, rows: NDArray[np.int64], first: int) -> NDArray[np.int64]:
        """``rows`` [count, s + 1] behind the places of virtual tokens, where tokens name the task of each row: that which stands before it
        (``data.task``), or else tasks take turns."""
        tune, named = self.config.tune, self.config.data.task is not None
        text = rows[:, 1:] if named else rows
        if tune.method not in PROMPTS:
            return text
        tasks = rows[:, :1] if named else ~(np.arange(first, first + len(rows), dtype=np.int64)[:, None] % tune.tasks)
        if (most := int((~tasks).max(initial=0))) >= tune.tasks:
            raise ConfigError(f"tune.tasks={tune.tasks}, but field '{self.config.data.task}' of an example is {most}; raise tune.tasks")
        return np.concatenate([np.repeat(tasks, tune.virtual_tokens, axis=1), text], axis=1)

    def _with_shares(self, batch: TokenBatch) -> TokenBatch:
        """``batch`` with what makes the loss of each task the mean over its own targets in the global batch, as if it was tuned alone."""
        if self.config.tune.tasks == 1:
            return batch
        rows = self._with_task(self.dataset.batch(self.samples, self.config.run.global_batch), self.samples)
        tasks, targets = ~rows[:, 0], (rows[:, 1:] >= 0).sum(1)
        counts = np.bincount(tasks, targets)
        shares = torch.from_numpy(targets.sum() / counts[tasks]).to(self.device)
        own = shares.view(-1, self.micro_batches, batch.size)[self.groups.at["data"]]
        return replace(batch, shares=own, tasks=int((counts > 0).sum()))

    def _vocabulary_width(self) -> int:
        """Columns of this tensor rank's logits that are not padding."""
        local = vocabulary_rows(self.config.model.vocab, self.groups.tensor.size)
        return max(0, min(local, self.config.model.vocab - local * self.groups.tensor.index))

    def _update(self, batch: TokenBatch, losses: list[Tensor], stop: bool) -> tuple[float, Tensor]:
        """Clip by the global norm, each task by its own, and update: the rate, and loss, stops, targets and squared norms, which a single
        all-reduce combines."""
        lr, clip, scale = learning_rate(self.config.optimizer, self.updates), self.config.optimizer.clip, self.scale.value
        sum_partial(self.owned, self.groups.axes)
        own = torch.zeros(3 + len(self.tasks), dtype=torch.float64, device=self.device)
        if losses and self.groups.tensor.index == 0:
            own[0] = torch.stack(losses).double().sum() / scale
            own[2] = batch.targets
        own[1] = float(stop)
        own[3:] = torch.stack([squared_norm(pieces, self.device) for pieces in self.tasks]) / scale**2
        self.groups.world.all_reduce(own).wait()
        mean = self.tokens_per_step / own[2].clamp(min=1)  # gradients were computed as if every token was a target
        norms = own[3:].sqrt() * mean
        skip = torch.maximum((~(torch.isfinite(norms).all() & torch.isfinite(own[0]))).float(), self.halted)
        if self.reads_late:
            self.halted = skip
        factors = (clip / (norms + 1e-6)).clamp(max=1.0) if clip else torch.ones_like(norms)
        self.optimizer.step(lr, factors * mean / scale, skip)
        self.state.publish_updates()
        sums = torch.empty(len(own), dtype=torch.float64, pin_memory=self.device.type == "cuda")
        return lr, sums.copy_(own, non_blocking=True)

    def _not_finite(self, batch: TokenBatch, loss: float) -> None:
        """Lower the loss scale if it can be the cause. Otherwise name the origin of the value, and stop if that is the policy."""
        if math.isfinite(loss) and self.scale.overflowed():
            return
        self.state.counted = None
        origin = find(self.groups.world, self.state, self.pipeline, self.config.layout.pipeline, lambda: self._again(batch))
        if origin is None:
            what = "the loss or the gradient was not finite, but is when computed again: a device or its memory may be at fault"
        else:
            what = f"the {origin.what} on rank {origin.rank} is not finite"
        message = f"step {batch.step + 1}: {what}"
        if self.config.run.on_nonfinite == "stop":
            raise NonFinite(f"{message}; lower optimizer.lr, or set run.on_nonfinite=skip")
        if self.world.rank == 0:
            print(f"warning: {message}; the step is skipped", flush=True)

    def _again(self, batch: TokenBatch) -> list[Tensor]:
        """Compute a step again: its losses. Its gradients are dropped."""
        losses = self._gradients(batch)
        self.state.finish()
        return losses

    def extra(self) -> dict[str, float]:
        """What a checkpoint holds in addition to the owned state."""
        scale = {"loss_scale": self.scale.value, "good_steps": self.scale.good_steps}
        return {"samples": self.samples, "updates": self.updates, **scale}

    def resume(self, extra: dict[str, float]) -> None:
        """Continue from a checkpoint that was read into ``owned``. ``extra`` of an imported model has no loss scale."""
        self.samples, self.updates = int(extra["samples"]), int(extra["updates"])
        self.optimizer.steps.fill_(self.updates)
        if self.scale.dynamic and "loss_scale" in extra:
            self.scale.value, self.scale.good_steps = extra["loss_scale"], int(extra["good_steps"])
        self.state.publish_updates()

    def memory(self) -> dict[str, int]:
        """Counted bytes by part: weights, gradients, optimizer, activations."""
        return self.state.nbytes | {"activations": self.activations.peak}

    def peak_memory(self) -> int:
        """The device's own peak, or the counted bytes on a device that keeps none."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return sum(self.memory().values())

    def recomputed_flops(self) -> float:
        """FLOPs per step, over all ranks, that recomputation adds."""
        layout, model = self.config.layout, self.config.model
        blocks = sum(sum(chosen_blocks(layout, count)) for count in blocks_per_chunk(model, layout))
        return recomputed_flops(model, layout, blocks, self.config.run.global_batch)


Saved = tuple[str, tuple[int, ...], Any, tuple[int, ...], int, Tensor]
"""Part of a parameter: its name and shape; the region of it that is this rank's, its shape here; where in that the part begins; values."""


def parts(engine: Engine) -> list[Saved]:
    """What this rank has of the parameters, frozen ones too, less what another rank has as well."""
    engine.state.settle()
    return [
        (p.record.name, p.record.shape, p.record.region, p.record.local_shape, p.offset, p.weight.cpu()) for p in engine.held if p.saves
    ]


def joined(ranks: Iterable[list[Saved]]) -> dict[str, Tensor]:
    """All parameters in full, of the ``parts`` of all ranks."""
    whole: dict[str, Tensor] = {}
    flats: dict[tuple, Tensor] = {}
    for name, shape, region, local_shape, offset, values in itertools.chain.from_iterable(ranks):
        flat = flats.setdefault((name, shape, region), values.new_zeros(local_shape).flatten())
        flat[offset : offset + len(values)] = values
        target = whole.setdefault(name, values.new_zeros(shape))
        size = tuple(slice(0, stop - start) for start, stop in region)
        target[tuple(slice(start, stop) for start, stop in region)] = flat.view(local_shape)[size]
    return whole


def parameters(engine: Engine) -> dict[str, Tensor]:
    """All parameters in full, on every rank: for small models. Collective."""
    return joined(engine.groups.world.gather_objects(parts(engine)))
