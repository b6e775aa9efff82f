"""The named tensors that one part of a model hands to the next, with shapes and sizes from one declaration. Pure numbers."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from trainer.shared.run.resolved import ResolvedModelConfig
from trainer.shared.run.schema import LayoutConfig


class BoundaryTensors(NamedTuple):
    """One field for each tensor, or for its shape. Their gradients go the other way."""

    hidden: Any  # the residual stream


class StreamTensors(NamedTuple):
    """The tensors of a network with two stacks, at every boundary: blocks of one stack leave the other's stream as it is."""

    encoder: Any  # the residual stream of the encoder; behind its last block, its output
    decoder: Any  # likewise; before its first block, the embedded tokens


class BiasedStreamTensors(NamedTuple):
    """Those, and tables of relative positions, which all blocks of a stack share."""

    encoder: Any
    decoder: Any
    tables: Any  # [stacks, buckets, heads]


class PairTokens(NamedTuple):
    """The tokens that the first part of such a network embeds."""

    read: Any  # by the encoder, [e, b]
    written: Any  # [d, b], of which each predicts the next


Boundary = BoundaryTensors | StreamTensors | BiasedStreamTensors
BY_HEADS = frozenset({"tables"})
"""Fields of which each tensor rank has the part of its heads. Of the others all have the same, or parts of the sequence."""


def boundary_shapes(seq: Any, rows: Any, hidden: Any) -> BoundaryTensors:
    """Returns the shapes for ``rows`` sequences of a model of this width, numbers or arrays: [s, b, h]."""
    return BoundaryTensors(hidden=(seq, rows, hidden))


def stream_shapes(seq: Any, targets: Any, rows: Any, hidden: Any, tables: tuple[int, int, Any] | None) -> Boundary:
    """Returns the shapes of a network with two stacks: [e, b, h], [d, b, h] and those of its tables, if it has any."""
    streams = (seq, rows, hidden), (targets, rows, hidden)
    return StreamTensors(*streams) if tables is None else BiasedStreamTensors(*streams, tables)


def shapes_between(model: ResolvedModelConfig, layout: LayoutConfig, parts: int) -> Boundary:
    """Returns the shapes on a rank that has one of so many ``parts`` of each sequence, and its heads of tables."""
    if not model.encoder_layers:
        return boundary_shapes(model.seq // parts, layout.micro_batch, model.hidden)
    tables = (2, model.relative_buckets, model.heads // layout.tensor) if model.positions == "relative" else None
    return stream_shapes(model.seq // parts, model.decoder_seq // parts, layout.micro_batch, model.hidden, tables)


def elements(shapes: Boundary) -> Any:
    """Returns the number of elements of all tensors of these shapes."""
    return sum(math.prod(shape) for shape in shapes)


def boundary_elements(seq: Any, rows: Any, hidden: Any) -> Any:
    """Returns the number of elements that a network with one stack hands on."""
    return elements(boundary_shapes(seq, rows, hidden))
