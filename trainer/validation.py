"""The loss of the weights that an engine holds now, on held-out text: the forward part of a step, without dropout."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trainer.batches import AskedBatch, BatchReader
from trainer.build import Rank
from trainer.data.dataset import HeldOut, HeldOutExamples
from trainer.measure.meter import Recorder
from trainer.pipeline.forward import ForwardPipeline
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.resolved import ResolvedTrainConfig


@dataclass(frozen=True)
class Sums:
    """Over some targets: the sum of ``-ln p``, their number, and their bytes as text; of examples, how many rows there are and how many are
    answered word by word."""

    nats: float = 0.0
    tokens: int = 0
    bytes: int = 0
    rows: int = 0
    exact: int = 0

    def __add__(self, other: Sums) -> Sums:
        both = (self.tokens + other.tokens, self.bytes + other.bytes, self.rows + other.rows, self.exact + other.exact)
        return Sums(self.nats + other.nats, *both)

    @property
    def loss(self) -> float:
        return self.nats / self.tokens

    @property
    def bits_per_byte(self) -> float | None:
        return self.nats / math.log(2) / self.bytes if self.bytes else None


def whole_batches(config: ResolvedTrainConfig, text: HeldOut | HeldOutExamples) -> int:
    """Batches of ``run.global_batch`` sequences in the text; ``ConfigError`` if there is not one."""
    found = text.windows // config.run.global_batch
    if not found:
        raise ConfigError(
            f"run.global_batch={config.run.global_batch} is more than the {text.windows} sequences of model.seq={config.model.seq} "
            f"that data.path={config.data.path} has to evaluate on; lower run.global_batch, or raise data.held_out"
        )
    return found


class Validation:
    """Reads ``text`` in batches of the run's size, in the order of the text. Nothing of a training changes by it."""

    def __init__(self, rank: Rank, text: HeldOut | HeldOutExamples):
        self.rank, self.text, self.asks = rank, text, isinstance(text, HeldOutExamples)
        self.batches = BatchReader(rank, text)
        self.pipeline = ForwardPipeline.of(rank.pipeline, Recorder(rank.clock, rank.world.ledger))
        self.bytes_of = torch.from_numpy(text.token_bytes()).to(rank.device)

    def first(self, batches: int) -> Sums:
        """Sums of the first ``batches`` batches, or of all."""
        there = whole_batches(self.rank.config, self.text)
        return sum((self.batch(number) for number in range(min(batches, there))), Sums())

    def batch(self, number: int) -> Sums:
        """Sums of one batch, over all ranks. Collective."""
        rank, global_batch = self.rank, self.rank.config.run.global_batch
        for chunk in self.pipeline.chunks:
            chunk.model.eval()
        batch = replace(self.batches.read(number * global_batch), weight=1.0)
        if self.asks:
            batch = AskedBatch(**vars(batch))
        losses = self.pipeline.losses_of(batch)
        for chunk in self.pipeline.chunks:
            chunk.model.train()
        own: Tensor = torch.zeros(4, dtype=torch.float64, device=rank.device)
        if losses and rank.groups.tensor.index == 0 and batch.rows is not None:
            found = torch.stack(losses).double().view(len(losses), -1).sum(0)
            own[0], own[3] = found[0], found[1] if self.asks else 0
            targets = batch.every_wanted
            own[1], own[2] = self.bytes_of[targets[targets >= 0]].sum(), batch.targets
        rank.world.group.all_reduce(own).wait()
        nats, size, targets_there, exact = own.tolist()
        return Sums(nats, int(targets_there), int(size), global_batch, int(exact))
