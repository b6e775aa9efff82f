"""Memory of one rank by part, for the kind of stage that needs most.

States: bytes per parameter over their sharding factors. Activations (``activations``): times the micro-batches in flight that the
schedule implies, and the recomputed ones of one block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from launcher.cost.inputs.case import Case
from launcher.cost.inputs.shape import Array
from launcher.cost.inputs.slices import HeldSlices
from launcher.cost.inputs.stages import StageShare
from launcher.cost.memory import activations
from launcher.cost.memory.activations import SavedActivations
from launcher.cost.parts import Parts, total
from launcher.cost.time import offload, orthogonal

WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS = "weights", "gradients", "optimizer states", "activations"
LOGITS, PASSING, UPDATE, BUFFERS = "logits and loss", "gradients in passing", "optimizer temporaries", "communication buffers"
CONTEXT, FRAGMENTS = "device context", "fragmentation"
COPIES = "gradients and weights on their way"
COUNTED = (WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS, LOGITS)
"""Parts that the project's trainer counts, and holds against run.memory_gb."""
KINDS = ("first", "middle", "last")
ROUND = 1 << 26
"""Elements of matrices that a rank of the project's trainer orthogonalises at a time (``trainer/state/matrices.py``)."""


def peak(case: Case, held: StageShare) -> Parts:
    """Bytes of the rank that needs most, by part."""
    kept = {kind: _kept(case, held, kind) for kind in (KINDS if case.recomputes_some else KINDS[:1])}
    stages = [_stage(case, held, kind, kept.get(kind, kept["first"])) for kind in KINDS]
    sums = np.stack([np.broadcast_to(total(parts), case.tokens.shape) for parts in stages])
    sums[1] = np.where(case.pipeline > 2, sums[1], 0.0)
    worst = np.argmax(sums, axis=0)
    return {name: np.choose(worst, [np.broadcast_to(parts[name], case.tokens.shape) for parts in stages]) for name in stages[0]}


def _kept(case: Case, held: StageShare, kind: str) -> list[SavedActivations]:
    """The activations of a block of each stack, on a rank of this kind where ranks differ in what they recompute."""
    own = [getattr(blocks, kind) if case.recomputes_some else None for blocks in held.stacks]
    return [activations.block(dataclasses.replace(stack, stage_blocks=count)) for stack, count in zip(case.stacks, own)]


def _stage(case: Case, held: StageShare, kind: str, kept: Sequence[SavedActivations]) -> Parts:
    dense, expert = (getattr(part, kind) for part in (held.dense, held.expert))
    parts = states(case, dense, expert)
    copies = _only_momentum(case, parts, held, kind)
    _add_whole(case, parts, held, kind)
    blocks = [getattr(stack, kind) for stack in held.stacks]
    begins = 0.0 if held.borders is None else getattr(held.borders, kind)
    parts |= flying(case, kind, blocks, kept, activations.streams(case, kind == "first", blocks, begins))
    freed = sum(count * stored(case, each) for count, each in zip(blocks, kept))
    parts[PASSING] = passing(case) + freed_late(case, sum(blocks), freed)
    update(case, parts, freed, 4 * case.shard("optimizer", dense, expert), copies)
    stays = parts[WEIGHTS] + parts[GRADIENTS] + parts[OPTIMIZER]
    parts[FRAGMENTS] = case.constants.fragmentation * (total(parts) - stays) + case.constants.padding * stays
    parts[CONTEXT] = 0.0 if case.device.host else context(case)
    return parts


def context(case: Case) -> Array:
    """Bytes that driver, libraries and communicators take before the trainer allocates anything: more where a group crosses the network."""
    c = case.constants
    size: Array = c.context_gb
    spans = (case.tensor_group.far > 1, case.stages_apart, case.data_group(case.data).far > 1, case.context_group.far > 1)
    degrees = (case.tensor, case.pipeline, case.data, case.context)
    opened = case.trainer.memory.communicators
    for count, degree, far in zip((opened.tensor, opened.pipeline, opened.data, opened.context), degrees, spans):
        size = size + np.where(degree > 1, count * np.where(far, c.far_communicator_gb, c.communicator_gb), 0.0)
    return size * 1e9


def states(case: Case, dense: Array, expert: Array) -> Parts:
    """Bytes of weights, gradients and optimizer states of one rank."""
    f, w = case.trainer, case.width
    weight, gradient, optimizer = (w, w, 2 * w) if case.wide else (f.numbers.weight_bytes, case.gradient_bytes, f.numbers.optimizer_bytes)
    optimizer += case.average_bytes
    if f.memory.optimizer_on_host:
        optimizer = 0
    parts: Parts = {}
    for name, state, size in ((WEIGHTS, "params", weight), (GRADIENTS, "grads", gradient), (OPTIMIZER, "optimizer", optimizer)):
        parts[name] = size * case.shard(state, dense, expert) * (1.0 if name == WEIGHTS else case.shape.trained)
    parts[OPTIMIZER] = parts[OPTIMIZER] * (1 - case.field("offload"))
    return parts


def on_host(case: Case, held: StageShare) -> Parts:
    """Bytes of a rank in host memory: optimizer states (in a file, if they are given one), gradients and weights on their way."""
    count = offload.elements(case, held.dense.most(), held.expert.most())
    states, copied = offload.host_bytes(case)
    return {OPTIMIZER: states * count, COPIES: copied * count}


def _only_momentum(case: Case, parts: Parts, held: StageShare, kind: str) -> Array:
    """Takes the second moment of orthogonalised matrices away, but for that of rows. Returns the bytes of their directions and of the
    results of a round (``trainer/state/muon.py``)."""
    if not case.orthogonal:
        return 0.0
    dense, expert = getattr(held.blocks, kind) * held.matrices, getattr(held.expert, kind)
    owned = case.shard("optimizer", dense, expert) * case.shape.trained
    moment = case.width if case.wide else (case.trainer.numbers.optimizer_bytes - 4) / 2
    parts[OPTIMIZER] = parts[OPTIMIZER] - moment * owned + orthogonal.row_moments(case, orthogonal.matrices(case, held))
    size = case.width if case.wide else 2
    return size * (owned + 4 * np.minimum(owned, ROUND))


def _add_whole(case: Case, parts: Parts, held: StageShare, kind: str) -> None:
    """Sharded parameters are whole while they are computed with, and the next unit's are gathered; so are gradients before they are
    scattered.

    The project's trainer keeps buffers of every size of unit: two blocks, embedding, head; a tied matrix gets two gradients, the second
    of which fills for the next micro-batch while the first travels.
    """
    f, alone = case.trainer, case.pipeline == 1
    twice = alone & case.shape.tied & (case.micro_batches > 1)
    dense, blocks = getattr(held.dense, kind), getattr(held.blocks, kind)
    ends = _ends(case, kind)
    pair = np.minimum(blocks, 2) * np.maximum(dense - ends + getattr(held.expert, kind), 0) / np.maximum(blocks, 1)
    sharded = case.field("params") > 1
    live = pair if f.memory.live_parameters is None else np.minimum(pair, f.memory.live_parameters)
    every = dense + getattr(held.expert, kind)
    gathered = np.where(case.kept_whole, every, pair + ends if f.memory.pooled_buffers else live)
    parts[WEIGHTS] = parts[WEIGHTS] + np.where(sharded, gathered * case.width, 0.0)
    parts[GRADIENTS] = parts[GRADIENTS] + np.where(case.reduced_last, every * case.reduce_bytes * case.shape.trained, 0.0)
    if f.memory.pooled_buffers:
        expert = getattr(held.expert, kind)
        full = _filling(case, dense, pair / 2 - expert / np.maximum(blocks, 1), ends) + _filling_experts(case, expert, blocks)
        # of a block with experts those and the rest arrive in turn, and a buffer is free when its size comes again
        arriving = np.where(sharded, pair / (1 if case.shape.experts is None else 2) + ends * (1 + twice), full)
        parts[GRADIENTS] = parts[GRADIENTS] + np.where(case.field("grads") > 1, arriving, 0.0) * (
            case.width if case.wide else case.gradient_bytes
        )


def _filling(case: Case, parameters: Array, block: Array, ends: Array) -> Array:
    """Elements of the buckets that gradients fill: one of every size, a second one of a single bucket, which fills for the next
    micro-batch while it travels.

    Matrices larger than a bucket are buckets of their own, equal from block to block; smaller ones make a few different sizes. Chunks that
    take turns with whole micro-batches fill the same buckets twice in a row: two of the end's size, two of all other chunks'.
    """
    capacity = case.trainer.memory.bucket_bytes / 4
    apart = (case.pipeline > 1) & case.shape.tied & (ends > 0)  # a matrix that two stages hold has a bucket of its own
    chunk = (parameters - ends) / case.chunks
    at_end = np.where(ends > 0, np.where(apart, 1, 2) * (ends + chunk), 0.0)
    single = np.where(case.chunks > 1, at_end + 2 * chunk, np.where(apart | (case.micro_batches == 1), 1, 2) * parameters)
    return np.where(parameters <= capacity, single, np.minimum(parameters, np.maximum(block, 4 * capacity) + ends))


def _filling_experts(case: Case, experts: Array, blocks: Array) -> Array:
    """Returns elements of the buckets that gradients of experts fill: each has travelled when the next of its size fills."""
    capacity = case.trainer.memory.bucket_bytes / 4
    return np.where(experts <= capacity, experts, np.minimum(experts, np.maximum(experts / np.maximum(blocks, 1), 2 * capacity)))


def _ends(case: Case, kind: str) -> Array:
    """Parameters of embedding and head on a rank of this kind."""
    s, alone = case.shape, case.pipeline == 1
    matrix = case.vocabulary * s.hidden
    first = np.where(alone | (kind == "first"), matrix + s.positions * s.hidden, 0.0)
    return first + np.where(alone & ~np.asarray(s.tied) | ~alone & (kind == "last"), matrix, 0.0)


def flying(case: Case, kind: str, blocks: Sequence[Array], kept: Sequence[SavedActivations], passed: Array) -> Parts:
    """Activations and logits of the micro-batches, or slices of them, in flight. ``blocks`` and ``kept`` are those of each stack, between
    which streams pass."""
    sliced = HeldSlices.of(case, _rank(case, kind))
    count, alone = np.where(case.slices > 1, sliced.slices, in_flight(case, kind)), case.pipeline == 1
    embedded = sum(activations.embedding(stack) for stack in case.stacks)
    entry = embedded if kind == "first" else np.where(alone, embedded, 0.0)
    if case.trainer.pipeline.keeps_outputs and kind != "last":
        entry = entry + np.where(alone, 0.0, activations.rows(case) * case.width)
    passes, end = 1 + case.shape.predicted_tokens, case.stacks[-1]  # each has its logits, and all losses wait for backward
    head, logits = passes * activations.one_norm(end), passes * activations.logits(end)
    if kind != "last":
        head, logits = np.where(alone, head, 0.0), np.where(alone | case.trainer.pipeline.spreads_vocabulary, logits, 0.0)
    if case.trainer.pipeline.spreads_vocabulary:
        logits = logits / case.pipeline
    waits = case.scheduled("gpipe") | (case.slices > 1)  # elsewhere the last stage's backward follows at once
    open_heads = np.where(waits, count, 1.0)
    again = kept[0].again
    if len(kept) > 1:  # when the encoder's blocks run backward, what the decoder's kept is gone
        gone = np.where(np.asarray(blocks[1]) > 0, blocks[1] * stored(case, kept[1]) + passed, 0.0)
        again = np.where(np.asarray(blocks[0]) > 0, np.maximum(again - gone, 0.0), 0.0)
        again = np.maximum(again, np.where(np.asarray(blocks[1]) > 0, kept[1].again, 0.0))
    if case.trainer.memory.frees_logits:  # the newest head is gone when the first recomputed block runs backward
        again = np.maximum(again - head - logits, 0.0)
    return {
        ACTIVATIONS: activations.rotary_tables(case)
        + count * sum(n * stored(case, each) for n, each in zip(blocks, kept))
        + sum(blocks) * activations.kept_keys(case, sliced.micro_batches, sliced.summed)
        + activations.distances(case)
        + count * passed
        + entered(case, count) * entry
        + open_heads * head
        + again,
        LOGITS: logits if case.trainer.kernels.late_loss else open_heads * logits,
    }


def stored(case: Case, kept: SavedActivations) -> Array:
    """Bytes of a block that stay on the device until its backward."""
    f = case.trainer
    here = np.where(case.recomputed_blocks > 0, 0.0, kept.chosen) if f.recompute.inputs_on_host else kept.chosen
    return here * (1 - np.minimum(f.memory.host_layers / case.shape.layers, 1.0))


def entered(case: Case, count: Array) -> Array:
    """Micro-batches whose embedding output is still alive on the first rank, which has ``count`` in flight. With interleaving its first
    chunk has accepted up to 2p - 1 before the first backward."""
    return np.where(case.chunks > 1, np.minimum(2 * case.pipeline - 1, case.micro_batches), count)


def in_flight(case: Case, kind: str) -> Array:
    """Micro-batches whose activations a rank of this kind holds at once, in units of all its blocks, where sequences are whole."""
    p, v, m = case.pipeline, case.chunks, case.micro_batches
    rank = _rank(case, kind)
    more = np.where(p > 1, case.trainer.pipeline.extra_in_flight + case.trainer.pipeline.extra_in_flight_per_stage * p, 0.0)
    plain = np.minimum(p - rank + more, m)
    interleaved = np.minimum(2 * (p - 1 - rank) + (v - 1) * p + 1, m * v) / v
    held = np.where(v > 1, interleaved, plain)
    held = np.where(case.scheduled("gpipe"), m, held)
    return np.where(case.scheduled("zero_bubble"), np.minimum(p + more, m), held)


def _rank(case: Case, kind: str) -> Array:
    """The pipeline rank of this kind that holds most."""
    ranks: dict[str, Array] = {"first": 0.0, "middle": 1.0, "last": case.pipeline - 1}
    return ranks[kind]


def passing(case: Case) -> Array:
    """Gradients of activations while one block runs backward: of the hidden state and of the MLP's inner width, before and after an
    operation; and of keys and values that context ranks have gathered, beside those themselves and the order in which they came, or that
    pass around a ring."""
    inner = 2 * case.width * case.tokens * (case.shape.hidden + activations.inner_width(case) / case.tensor)
    return inner + 3 * activations.lent(case) + activations.travelling(case)


def freed_late(case: Case, blocks: Array, freed: Array) -> Array:
    """Returns bytes of input gradients of a block's two column-parallel products that the device has not summed over tensor ranks yet.

    The host runs ahead of the device and has allocated the activations of the next micro-batch by then. In a pipeline it waits for the
    device between micro-batches: there, and with one micro-batch, the ``freed`` bytes of backward make room.
    """
    if not case.trainer.memory.late_frees:
        return np.zeros_like(case.tokens)
    whole = 2 * blocks * case.tokens * case.shape.hidden * case.width
    again = (case.micro_batches > 1) & (case.pipeline == 1)
    return np.where(case.tensor > 1, np.where(again, whole, np.maximum(whole - freed, 0.0)), 0.0)


def update(case: Case, parts: Parts, freed: Array, copies: Array, directions: Array) -> None:
    """Adds the bytes that the end of a step needs beyond backward, whose activations are gone by then: all gradients, where backward
    allocates them while it frees the stored inputs of blocks (``freed`` bytes); ``copies`` of 2-byte gradients in 4 bytes; buckets that are
    filled only then; ``directions`` of matrices that are orthogonalised."""
    f = case.trainer
    size = np.zeros_like(case.tokens) if f.memory.pooled_buffers else f.memory.bucket_bytes * (case.data > 1)
    late = np.where(f.memory.buckets_at_end & (case.pipeline > 1), size, 0.0)
    copied = directions + (0.0 if case.wide or case.gradient_bytes >= 4 or case.shape.frozen else copies)
    whole = parts[GRADIENTS]
    if f.memory.late_gradients:
        parts[GRADIENTS] = np.maximum(whole - freed, 0.0)
    backward = parts[GRADIENTS] + parts[ACTIVATIONS] + parts[LOGITS] + parts[PASSING]
    more = np.maximum(whole + np.maximum(copied, late) - backward, 0.0)
    parts[BUFFERS] = np.where(late > copied, more, size - late)
    parts[UPDATE] = np.where(late > copied, 0.0, more)
