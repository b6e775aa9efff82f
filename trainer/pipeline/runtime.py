"""Runs a pipeline schedule, which is a list of actions (``trainer.shared.parallel.schedule``).

Receives are posted where the list says and waited for by the computation that needs them. Sends are waited for at the end of
the step. A boundary tensor that is replicated over the tensor ranks is sent only once: each tensor rank sends its part of the
sequence, and the parts are gathered on arrival (Narayanan et al. 2021, section 4.1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from trainer.comm.collectives import Group, Pending
from trainer.measure.meter import Recorder
from trainer.models.transformer import Transformer
from trainer.shared.parallel.actions import Action, Kind
from trainer.shared.parallel.boundary import BY_HEADS, boundary_shapes
from trainer.shared.parallel.boundary import Boundary as BoundaryTensors
from trainer.state.gathering import Gathering
from trainer.state.sharding import Deferred, ShardedState
from trainer.tensor.dropout import DropoutKey, Noise
from trainer.tensor.region import Region, SequenceSlices, ready

WorkItem = tuple[int, int, int]
"""A chunk, a micro-batch and a slice of its sequences."""


class Batch(Protocol):
    """The data of a step (``trainer.batches.TokenBatch``); the pipeline does not know the meaning of its tensors."""

    def tokens(self, micro_batch: int) -> Any:
        """Returns the input of the first chunk, of the slice that is computed."""

    def loss(self, x: Tensor, head: nn.Module, micro_batch: int) -> Tensor:
        """Returns the scalar from which backward starts, for x [s, b, h] and the ``head`` that makes logits of it. Its value is set once
        backward has begun."""

    def dropout_key(self, micro_batch: int) -> DropoutKey:
        """Returns the key of the micro-batch's dropout masks."""


@dataclass
class Chunk:
    """A model part on this rank."""

    model: Transformer
    gathering: Gathering
    noise: Noise


@dataclass(frozen=True)
class Boundary:
    """The activations between two pipeline ranks, whose sequence is sharded with sequence parallelism."""

    shapes: BoundaryTensors  # as the chunks see them
    dtype: torch.dtype
    device: torch.device
    region: Region
    split: Region  # sharded if each tensor rank sends only its part

    @classmethod
    def of(cls, shapes: BoundaryTensors, region: Region, dtype: torch.dtype, device: torch.device) -> Boundary:
        """Makes a boundary of ``shapes`` local to the region. Replicated sequences are split if the tensor ranks divide their lengths."""
        lengths = [shape[0] for name, shape in shapes._asdict().items() if name not in BY_HEADS]
        splits = not region.sequence_sharded and all(length % region.group.size == 0 for length in lengths)
        return cls(shapes, dtype, device, region, replace(region, sequence_sharded=splits))

    def of_slice(self, run: range) -> Boundary:
        """Returns the boundary of a slice of the sequences of a decoder alone."""
        shapes = boundary_shapes(len(run) // self.region.parts, *self.shapes[0][1:])
        return self.of(shapes, self.region, self.dtype, self.device)

    @property
    def parts(self) -> list[int]:
        """Returns in how many parts the tensor ranks send each tensor."""
        return [1 if name in BY_HEADS else self.split.parts for name in self.shapes._fields]

    def sent(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns the parts of a boundary's tensors that this rank sends."""
        own = [tensor.chunk(parts)[self.split.group.index if parts > 1 else 0] for tensor, parts in zip(tensors, self.parts)]
        return [tensor.detach().contiguous() for tensor in own]

    def empty(self) -> list[Tensor]:
        """Returns the buffers that parts are received into."""
        sizes = [(seq // parts, *rest) for (seq, *rest), parts in zip(self.shapes, self.parts)]
        return [torch.empty(*size, dtype=self.dtype, device=self.device) for size in sizes]

    def unpack(self, received: list[Tensor]) -> BoundaryTensors:
        whole = [ready(self.split.gather(part)) if parts > 1 else part for part, parts in zip(received, self.parts)]
        return type(self.shapes)(*whole)


class PipelineRuntime:
    """The actions of this pipeline rank over its chunks."""

    def __init__(
        self,
        actions: list[Action],
        chunks: list[Chunk],
        state: ShardedState,
        boundary: Boundary,
        slices: SequenceSlices,
        up: Group,
        down: Group,
        recorder: Recorder,
    ):
        self.chunks, self.state, self.slices = chunks, state, slices
        self.resize(actions, boundary)
        self.up, self.down, self.recorder = up, down, recorder
        self.chunk = 0  # of the action that runs
        self.run: dict[Kind, Callable[[Action], None]] = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.INPUT_GRAD: self._input_gradient,
            Kind.WEIGHT_GRAD: self._weight_gradient,
            Kind.SEND_FORWARD: lambda a: self._send(a, self.outputs.pop(a.item)),
            Kind.SEND_BACKWARD: lambda a: self._send(a, self.input_gradients.pop(a.item)),
            Kind.RECV_FORWARD: self._receive,
            Kind.RECV_BACKWARD: self._receive,
            Kind.GATHER: lambda a: self.chunks[a.chunk].gathering.prefetch(0),
            Kind.REDUCE: lambda a: None,  # started by the arrival of the last gradient
        }
        self._clear()

    def resize(self, actions: list[Action], boundary: Boundary) -> None:
        """Makes the steps that follow those of ``actions``, with sequences as long as those of ``boundary`` and of slices, if they are
        cut."""
        self.actions, self.boundary = actions, boundary
        self.cut = [boundary.of_slice(run) for run in self.slices.runs]

    def _clear(self) -> None:
        self.inputs: dict[WorkItem, BoundaryTensors] = {}
        self.outputs: dict[WorkItem, Sequence[Tensor]] = {}  # to be sent
        self.edges: dict[WorkItem, list[GradientEdge | None]] = {}  # where backward starts; None: nothing is trained up to here
        self.input_gradients: dict[WorkItem, Sequence[Tensor]] = {}
        self.weight_work: dict[WorkItem, Deferred] = {}
        self.keys: dict[int, DropoutKey] = {}  # of micro-batches in flight
        self.arriving: dict[tuple[Kind, WorkItem], tuple[list[Tensor], list[Pending]]] = {}
        self.sent: list[Pending] = []
        self.losses: list[Tensor] = []
        self.slices.clear()

    def step(self, batch: Batch) -> list[Tensor]:
        """Runs forward and backward of every slice of every micro-batch. Returns the losses, on the rank that has the last chunk."""
        self._clear()
        self.batch = batch
        for action in self.actions:
            self.chunk = action.chunk
            with self.recorder.span(action), self.slices.at(*action.item):
                self.run[action.kind](action)
        for pending in self.sent:
            pending.wait()
        return self.losses

    def _forward(self, action: Action) -> None:
        item, chunk = action.item, self.chunks[action.chunk]
        model = chunk.model
        x: Any
        if model.embedding is None:
            x = self.inputs[item] = self._arrived(Kind.RECV_FORWARD, item)
            for tensor in x:
                tensor.requires_grad_()  # the leaf where backward ends
        else:
            x = self.batch.tokens(action.micro_batch)
        if action.micro_batch not in self.keys:  # slices share it
            self.keys[action.micro_batch] = self.batch.dropout_key(action.micro_batch)
        with chunk.noise.at(self.keys[action.micro_batch]):
            y = model(x, partial(self.batch.loss, micro_batch=action.micro_batch))
        ends = (y,) if isinstance(y, Tensor) else y
        if model.head is not None:
            self.losses += [end.detach() for end in ends]
        else:
            self.outputs[item] = [end.detach() for end in ends]
        self.edges[item] = [get_gradient_edge(end) if end.requires_grad else None for end in ends]

    def _backward(self, action: Action) -> None:
        item = action.item
        last = self.chunks[action.chunk].model.head is not None
        gradients = (None,) if last else self._arrived(Kind.RECV_BACKWARD, item)
        trained = [(edge, gradient) for edge, gradient in zip(self.edges.pop(item), gradients) if edge is not None]
        if trained:
            edges, wanted = zip(*trained)
            torch.autograd.backward(edges, wanted)
        self.chunks[action.chunk].gathering.leave_backward()
        if item in self.inputs:
            self.input_gradients[item] = [_gradient(tensor) for tensor in self.inputs.pop(item)]
        if not action.slice:
            self.slices.forget(action.chunk, action.micro_batch)
            self.keys.pop(action.micro_batch, None)

    def _input_gradient(self, action: Action) -> None:
        with self.state.deferring() as work:
            self._backward(action)
        self.weight_work[action.item] = work

    def _weight_gradient(self, action: Action) -> None:
        with torch.no_grad():
            pending = self.weight_work.pop(action.item)
            while pending:
                pending.pop(0)[0]()

    def _send(self, action: Action, tensors: Sequence[Tensor]) -> None:
        self.sent = [pending for pending in self.sent if not pending.over]  # frees tensors that have arrived
        self.sent += [self._toward(action.peer).send(part, action.peer) for part in self._boundary(action.slice).sent(tensors)]

    def _receive(self, action: Action) -> None:
        received = self._boundary(action.slice).empty()
        group = self.down if action.peer > self.up.index else self.up
        pending = [group.receive(tensor, action.peer) for tensor in received]
        self.arriving[action.kind, action.item] = received, pending

    def _boundary(self, number: int) -> Boundary:
        return self.cut[number] if self.cut else self.boundary

    def _toward(self, peer: int) -> Group:
        return self.up if peer > self.up.index else self.down

    def _arrived(self, kind: Kind, item: WorkItem) -> BoundaryTensors:
        received, pending = self.arriving.pop((kind, item))
        for one in pending:
            one.wait()
        tensors = self._boundary(item[2]).unpack(received)
        self.recorder.arrived()
        return tensors


def _gradient(tensor: Tensor) -> Tensor:
    """Returns the gradient of a part's input, zero where the part does not use it."""
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
