"""Batches: which rows of the data a replica computes in a step, and the loss of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trainer.build import Rank
from trainer.data import Dataset
from trainer.data.pieces import SequencePieces
from trainer.data.prefetch import Prefetch
from trainer.pipeline.compile import compiles
from trainer.prompts import task_shares, with_task
from trainer.shared.parallel.boundary import PairTokens
from trainer.shared.parallel.sequence import Runs
from trainer.shared.parallel.shards import vocabulary_rows
from trainer.shared.run.derived import micro_batches
from trainer.shared.run.phases import Phase
from trainer.shared.run.resolved import ResolvedTrainConfig
from trainer.shared.run.schema import LOSS_CHUNK_MB
from trainer.tensor.cross_entropy import Targets, answered, head_loss
from trainer.tensor.dropout import DropoutKey
from trainer.tensor.layers import ColumnLinear
from trainer.tensor.placed import PackedTextStarts, ReadTokens
from trainer.tensor.region import rows_at


@dataclass(frozen=True)
class TokenBatch:
    """A replica's tokens of one step (``trainer.pipeline.runtime.Batch``)."""

    rows: Tensor | None  # [micro-batches, s + 1, b]; a position without a target holds the complement of its token
    runs: Callable[[], Runs]  # positions of this rank's tokens, now
    step: int
    first_row: int  # in the global batch
    size: int  # b
    weight: float  # of one token in the loss, times the loss scale
    columns: int  # of this rank's logits, without padding
    chunk_mb: float  # logits at once
    fused: bool  # the loss of them, by compiled kernels
    texts: Callable[[Tensor], Any] | None  # of a micro-batch's rows: which tokens belong together, where not all of a row do
    logit_cap: float | None = None
    shares: Tensor | None = None  # [micro-batches, b]: what a target of each row counts, where tasks are tuned at once
    tasks: int = 1  # in the global batch
    read: int = 0  # tokens that an encoder reads: the first of a row, before those that are written

    def tokens(self, micro_batch: int) -> Tensor | PairTokens:
        assert self.rows is not None
        row, runs = self.rows[micro_batch], self.runs()
        written = known(rows_at(row[self.read :], runs))
        return PairTokens(known(row[: self.read]), written) if self.read else written

    def wanted(self, micro_batch: int) -> Tensor:
        """Returns the targets of those tokens, negative where there is none."""
        assert self.rows is not None
        return rows_at(self.rows[micro_batch, self.read + 1 :], self.runs())

    @property
    def targets(self) -> Tensor:
        """Returns the number of targets of this rank's tokens."""
        return (self.every_wanted >= 0).sum()

    @property
    def every_wanted(self) -> Tensor:
        """Returns the targets of all micro-batches, [s, micro-batches, b]."""
        assert self.rows is not None
        return rows_at(self.rows[:, self.read + 1 :].transpose(0, 1), self.runs())

    def loss(self, x: Tensor, head: nn.Module, micro_batch: int) -> Tensor:
        return head_loss(x, *self.compared(head, micro_batch))

    def compared(self, head: nn.Module, micro_batch: int) -> tuple[ColumnLinear, Targets]:
        """The head, and what its logits are compared with."""
        assert isinstance(head, ColumnLinear)
        weight = self.weight if self.shares is None else self.weight * self.shares[micro_batch]
        return head, Targets(self.wanted(micro_batch), weight, self.columns, self.chunk_mb, self.fused, self.logit_cap)

    def dropout_key(self, micro_batch: int) -> DropoutKey:
        texts = None if self.texts is None or self.rows is None else self.texts(self.rows[micro_batch])
        return DropoutKey(self.step, self.first_row + micro_batch * self.size, texts)


@dataclass(frozen=True)
class AskedBatch(TokenBatch):
    """Examples: the loss of their answers, and how many of these are the likeliest words, [2]."""

    def loss(self, x: Tensor, head: nn.Module, micro_batch: int) -> Tensor:
        loss, right = super().loss(x, head, micro_batch), answered(x, *self.compared(head, micro_batch)).sum()
        return torch.stack((loss.double(), right.double()))


class BatchReader:
    """Reads this replica's rows of global batches of ``dataset``: those of a phase of the run, if one is given."""

    def __init__(self, rank: Rank, dataset: Dataset, phase: Phase | None = None):
        self.rank, self.pieces = rank, 1 if phase is None else phase.pieces
        self.dataset: Dataset = dataset if self.pieces == 1 else SequencePieces(dataset, self.pieces)
        self.config = rank.config if phase is None else phase.of(rank.config)
        self.micro_batches, self.size = micro_batches(self.config), self.config.layout.micro_batch
        self.first = rank.groups.at["data"] * self.micro_batches * self.size  # of this replica's rows, in the global batch
        self.tokens = self.config.run.global_batch * self.config.model.target_seq
        self.prefetch = Prefetch(self._rows, self.config.run.global_batch)

    def next(self, start: int, step: int, loss_scale: float) -> TokenBatch:
        """Returns the batch of a training step from sequence ``start`` of ``model.seq`` on. Its rows were read during the step before, if
        that was of the same size."""
        start *= self.pieces
        return self._with_shares(self._batch(None if self._idle else self.prefetch.rows(start), step, loss_scale), start)

    def read(self, start: int, step: int = 0) -> TokenBatch:
        """Returns the batch from sample ``start`` on; without a tensor on ranks that have neither embedding nor head."""
        return self._batch(None if self._idle else self._rows(start), step, 1.0)

    @property
    def _idle(self) -> bool:
        """True if this rank has neither embedding nor head, and reads nothing. Where texts begin in packed rows concerns every block."""
        ends = any(chunk.model.embedding is not None or chunk.model.head is not None for chunk in self.rank.pipeline.chunks)
        return not ends and texts_of(self.config) is None

    def _rows(self, start: int) -> Tensor:
        """Returns this replica's rows from sample ``start`` on, [micro-batches, s + 1, b]; on a GPU's host in pinned memory."""
        count, first = self.micro_batches * self.size, start + self.first
        array = torch.from_numpy(with_task(self.dataset.batch(first, count), first, self.config))
        rows = array.view(self.micro_batches, self.size, -1).transpose(1, 2).contiguous()
        return rows.pin_memory() if self.rank.device.type == "cuda" else rows

    def _batch(self, rows: Tensor | None, step: int, loss_scale: float) -> TokenBatch:
        run, device = self.config.run, self.rank.device
        here = None if rows is None else rows.to(device, non_blocking=True)
        chunk, fused = run.loss_chunk_mb or LOSS_CHUNK_MB[device.type], compiles(run.compile, device)
        weight = loss_scale / self.tokens
        sizes, cap = (step, self.first, self.size), self.config.model.logit_cap
        model = self.config.model
        own = partial(self.rank.region.whole_runs, model.target_seq // self.config.layout.context)
        width, read = self._vocabulary_width(), model.seq if model.encoder_layers else 0
        return TokenBatch(here, own, *sizes, weight, width, chunk, fused, texts_of(self.config), cap, read=read)

    def _with_shares(self, batch: TokenBatch, start: int) -> TokenBatch:
        """Returns ``batch`` with what a target of each row counts, where tasks are tuned at once: all rows of the global batch decide."""
        if self.config.tune.tasks == 1:
            return batch
        shares, tasks = task_shares(with_task(self.dataset.batch(start, self.config.run.global_batch), start, self.config))
        own = torch.from_numpy(shares).to(self.rank.device).view(-1, self.micro_batches, self.size)[self.rank.groups.at["data"]]
        return replace(batch, shares=own, tasks=tasks)

    def _vocabulary_width(self) -> int:
        """Returns the columns of this tensor rank's logits that are not padding."""
        tensor, vocab = self.rank.groups.tensor, self.config.model.vocab
        local = vocabulary_rows(vocab, tensor.size)
        return max(0, min(local, vocab - local * tensor.index))


def known(rows: Tensor) -> Tensor:
    """Returns the tokens of rows in which some are complements."""
    return torch.where(rows < 0, ~rows, rows)


def texts_of(config: ResolvedTrainConfig) -> Callable[[Tensor], Any] | None:
    """Returns a function that finds in a micro-batch's rows the tokens that belong together; None where all tokens of a row do."""
    if config.data.pack:
        return PackedTextStarts.of
    if config.model.encoder_layers and config.data.kind == "instructions":
        return partial(ReadTokens.of, config.model.seq)
    return None
