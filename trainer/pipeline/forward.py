"""Forward alone, through the same ranks, chunks and messages as a step of training: for evaluation.

Only the forward actions of the schedule run. Any schedule's order stays possible without the others: a forward waits only for forwards.
Sequences are whole, for nothing is kept of them: of slices, the first stands for all.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from trainer.measure.meter import Recorder
from trainer.pipeline.runtime import Batch, PipelineRuntime
from trainer.shared.parallel.actions import Action, Kind
from trainer.tensor.region import SequenceSlices

FORWARD = (Kind.FORWARD, Kind.SEND_FORWARD, Kind.RECV_FORWARD, Kind.GATHER)


class ForwardPipeline(PipelineRuntime):
    """A pipeline that keeps nothing for backward."""

    @classmethod
    def of(cls, trained: PipelineRuntime, recorder: Recorder) -> ForwardPipeline:
        """Returns the forward part of ``trained``, with its chunks and links."""
        actions = [action for action in trained.actions if action.kind in FORWARD and not action.slice]
        return cls(actions, trained.chunks, trained.state, trained.boundary, SequenceSlices(), trained.up, trained.down, recorder)

    @torch.no_grad()
    def losses_of(self, batch: Batch) -> list[Tensor]:
        """Returns the loss of every micro-batch, on the ranks of the last part. Collective over the pipeline and the tensor ranks."""
        return self.step(batch)

    def _forward(self, action: Action) -> None:
        item, chunk = action.item, self.chunks[action.chunk]
        first = chunk.model.embedding is not None
        x = self.batch.tokens(action.micro_batch) if first else self._arrived(Kind.RECV_FORWARD, item)
        with chunk.noise.at(self.batch.dropout_key(action.micro_batch)):
            y = chunk.model(x, partial(self.batch.loss, micro_batch=action.micro_batch))
        if chunk.model.head is None:
            self.outputs[item] = list(y)
        else:
            self.losses.append(y)
