"""The optimizer step of a rank."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.batches import BatchReader, TokenBatch
from trainer.build import build_rank
from trainer.comm.collectives import World
from trainer.data import Dataset
from trainer.launch.failure import NonFinite
from trainer.models.tuned import task_of
from trainer.pipeline.nonfinite import find
from trainer.shared.run.phases import Phase, phases_of
from trainer.shared.run.resolved import ResolvedTrainConfig
from trainer.shared.run.transfer import transferred
from trainer.state.average import TailAverage
from trainer.state.loss_scale import LossScale
from trainer.state.muon import make_optimizer
from trainer.state.optimizer import learning_rate, squared_norm, sum_partial


@dataclass(frozen=True)
class StepResult:
    """The outcome of a step, the same on every rank."""

    loss: float  # mean over the targets of the global batch; of several tasks, the mean of theirs
    grad_norm: float
    lr: float
    stop: bool  # some rank was asked to stop
    skipped: bool  # the loss or the norm was not finite, and the weights are unchanged
    seconds: float
    busiest: float | None = None  # tokens of the busiest expert of a block over their mean


@dataclass(frozen=True)
class QueuedStep:
    """A step that the device has still to compute, or is computing."""

    batch: TokenBatch
    phase: Phase  # that it is a step of
    tokens: int  # targets that it can have
    lr: float
    sums: Tensor  # loss, stop requests, targets, squared norm of each task's gradient, busiest expert; on the host once ``end`` has passed
    measured: bool  # the recorder has its parts
    start: Any  # stamps of the clock
    end: Any


class Engine:
    """Trains this rank's part of a run: each step computes gradients, and then new weights."""

    def __init__(self, config: ResolvedTrainConfig, world: World, dataset: Dataset, draws: bool = True, positions: int | None = None):
        """Without ``draws``, weights come from a checkpoint, or are drawn later. ``positions``: as of ``build_rank``."""
        self.config, self.dataset, self.rank = config, dataset, build_rank(config, world, positions)
        self.phases = phases_of(config)
        self.phase = self.phases.phases[-1]  # that the rank is ready for
        self.batches = BatchReader(self.rank, dataset)
        self.saved = [shard for shard in self.rank.shards if shard.record.trainable]
        self.trained = [shard for shard in self.saved if shard.record.learned]
        self.tasks = [[shard for shard in self.trained if task_of(shard.record.name) == task] for task in range(config.tune.tasks)]
        products = self.rank.precision.products
        self.optimizer = make_optimizer(transferred(config), self.tasks, world.device, self.rank.groups.sharers, products)
        self.saved += self.optimizer.shards
        self.rank.state.beside = sum(shard.weight.nbytes for shard in self.optimizer.shards)
        self.average = TailAverage(config.optimizer.average_from, self.trained)
        self.scale = LossScale.of(config.run.precision)
        self.reads_late = self.rank.clock.on_device and not self.scale.dynamic and config.run.on_nonfinite == "stop"
        self.halted = torch.zeros((), device=world.device)  # 1 after a step that was not finite, where that ends the run
        self.samples = 0  # consumed by the steps before
        self.updates = 0  # optimizer updates; skipped steps do not count, nor do they advance the learning rate
        if draws:
            self.rank.draw_weights()

    def step(self, step: int, stop: bool = False, watch: bool = False) -> StepResult:
        """Optimizer step number ``step``, from 0. ``stop`` asks all ranks to stop after it; ``watch`` counts activations."""
        return self.read(self.queue(step, stop, watch))

    def queue(self, step: int, stop: bool = False, watch: bool = False) -> QueuedStep:
        """Give the device all work of a step. The host waits for none of it (on a GPU; a CPU computes at once).

        The next step may be queued before this one is ``read`` if ``reads_late``: otherwise it needs to know whether this one counts.
        """
        recorder, state, activations = self.rank.recorder, self.rank.state, self.rank.activations
        self._enter(self.phases.at(step))
        recorder.begin()
        start = recorder.start
        with recorder.span("data"):
            batch = self.batches.next(self.samples, step, self.scale.value)
        state.counted = activations.track if watch else None
        with activations.watching() if watch else contextlib.nullcontext():
            losses = self.gradients(batch)
        with recorder.span("communication"):
            state.finish()
        with recorder.span("optimizer"):
            lr, sums = self._update(batch, losses, stop, step)
        self.samples += self.phase.stride
        self.updates += 1
        return QueuedStep(batch, self.phase, self.batches.tokens, lr, sums, recorder.clock.marking, start, recorder.clock.stamp())

    def read(self, queued: QueuedStep) -> StepResult:
        """Wait for a step, the only wait of the host for the device. Its outcome."""
        self.rank.clock.wait(queued.end)
        loss, stops, targets, *squares = queued.sums.tolist()
        busiest = None if self.rank.balance is None else squares.pop()
        ratio = queued.tokens / max(targets, 1)
        loss, squared = loss * ratio / queued.batch.tasks, sum(squares) * ratio**2
        skipped = not (math.isfinite(loss) and math.isfinite(squared))
        if skipped:
            self.updates -= 1
            self._enter(queued.phase)
            self._not_finite(queued.batch, loss)
        else:
            self.scale.succeeded()
        norm = math.sqrt(squared) if squared >= 0 else squared
        return StepResult(loss, norm, queued.lr, stops > 0, skipped, self.rank.clock.seconds(queued.start, queued.end), busiest)

    def _enter(self, phase: Phase) -> None:
        """Makes the steps that follow those of ``phase``."""
        if phase is not self.phase:
            self.batches = BatchReader(self.rank, self.dataset, phase)
            self.rank.resize(self.batches.config)
            self.phase = phase

    def gradients(self, batch: TokenBatch) -> list[Tensor]:
        """Computes forward and backward of all micro-batches. Gradient reductions may still be running when it returns."""
        self.rank.state.begin(self.batches.micro_batches * self.config.layout.slices)
        if self.rank.balance is not None:
            self.rank.balance.begin(batch.weight)
        return self.rank.pipeline.step(batch)

    def _update(self, batch: TokenBatch, losses: list[Tensor], stop: bool, step: int) -> tuple[float, Tensor]:
        """Clip by the global norm, each task by its own, and update: the rate, and loss, stops, targets and squared norms, which a single
        all-reduce combines."""
        lr = learning_rate(self.config.optimizer, self.updates, self.phases.consumed) * self.phase.lr
        clip, scale = self.config.optimizer.clip, self.scale.value
        groups, device = self.rank.groups, self.rank.device
        sum_partial(self.trained, groups.axes)
        self.rank.state.send_late()
        balance, known = self.rank.balance, 3 + len(self.tasks)
        own = torch.zeros(known, dtype=torch.float64, device=device)
        if losses and groups.tensor.index == 0:
            own[0] = torch.stack(losses).double().sum() / scale
            own[2] = batch.targets
        own[1] = float(stop)
        own[3:] = torch.stack([squared_norm(pieces, device) for pieces in self.tasks]) / scale**2
        if balance is not None:
            own = torch.cat((own, balance.load.flatten()))
        groups.world.all_reduce(own).wait()
        own, load = own[:known], own[known:]
        mean = self.batches.tokens / own[2].clamp(min=1)  # gradients were computed as if every token was a target
        norms = own[3:].sqrt() * mean
        skip = torch.maximum((~(torch.isfinite(norms).all() & torch.isfinite(own[0]))).float(), self.halted)
        if self.reads_late:
            self.halted = skip
        factors = (clip / (norms + 1e-6)).clamp(max=1.0) if clip else torch.ones_like(norms)
        self.optimizer.step(lr, factors * mean / scale, skip)
        self.average.add(step + 1)
        self.rank.state.publish_updates()
        if balance is not None:
            own = torch.cat((own, balance.end(load, skip).view(1)))
        sums = torch.empty(len(own), dtype=torch.float64, pin_memory=device.type == "cuda")
        return lr, sums.copy_(own, non_blocking=True)

    def _not_finite(self, batch: TokenBatch, loss: float) -> None:
        """Lower the loss scale if it can be the cause. Otherwise name the origin of the value, and stop if that is the policy."""
        if math.isfinite(loss) and self.scale.overflowed():
            return
        rank = self.rank
        rank.state.counted = None
        origin = find(rank.groups.world, rank.state, rank.pipeline, self.config.layout.pipeline, lambda: self._again(batch))
        if origin is None:
            what = "the loss or the gradient was not finite, but is when computed again: a device or its memory may be at fault"
        else:
            what = f"the {origin.what} on rank {origin.rank} is not finite"
        message = f"step {batch.step + 1}: {what}"
        if self.config.run.on_nonfinite == "stop":
            raise NonFinite(f"{message}; lower optimizer.lr, or set run.on_nonfinite=skip")
        if rank.world.rank == 0:
            print(f"warning: {message}; the step is skipped", flush=True)

    def _again(self, batch: TokenBatch) -> list[Tensor]:
        """Compute a step again: its losses. Its gradients are dropped."""
        losses = self.gradients(batch)
        self.rank.state.finish()
        return losses

    def extra(self) -> dict[str, float]:
        """State that a checkpoint holds in addition to the owned state."""
        scale = {"loss_scale": self.scale.value, "good_steps": self.scale.good_steps}
        averaged = {"averaged": self.average.count} if self.average.count else {}
        return {"samples": self.samples, "updates": self.updates, **scale, **averaged}

    def resume(self, extra: dict[str, float]) -> None:
        """Continue from a checkpoint that was read into ``trained``. ``extra`` of an imported model has no loss scale."""
        self.samples, self.updates = int(extra["samples"]), int(extra["updates"])
        self.optimizer.begin(self.updates)
        self.average.count = int(extra.get("averaged", 0))
        if self.scale.dynamic and "loss_scale" in extra:
            self.scale.value, self.scale.good_steps = extra["loss_scale"], int(extra["good_steps"])
        self.rank.state.publish_updates()
