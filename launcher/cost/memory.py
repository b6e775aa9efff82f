"""Memory of one rank by part, for the kind of stage that needs most.

States: bytes per parameter over their sharding factors. Activations: Korthikanti et al. 2022 (arXiv 2205.05198), section 4,
with their terms for whatever the model and the kernels really keep; times the micro-batches in flight that the schedule implies.
"""

from __future__ import annotations

import numpy as np

from launcher.cost.attention import FLASH, score_count
from launcher.cost.block import Parts, total
from launcher.cost.case import Case
from launcher.cost.pointwise import inner_width
from launcher.cost.shape import Number
from launcher.cost.stages import Held

WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS = "weights", "gradients", "optimizer states", "activations"
LOGITS, UPDATE, BUFFERS = "logits and loss", "optimizer temporaries", "communication buffers"
CONTEXT, FRAGMENTS = "device context", "fragmentation"
ALLOCATED = (WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS, LOGITS, UPDATE, BUFFERS)
"""What a trainer's allocator counts as allocated; with ``FRAGMENTS`` it is what the allocator reserves, with ``CONTEXT`` what the device shows."""


def peak(case: Case, held: Held) -> Parts:
    """Bytes of the rank that needs most, by part."""
    block, kept = block_bytes(case)
    stages = [_stage(case, held, kind, block, kept) for kind in ("first", "middle", "last")]
    sums = np.stack([np.broadcast_to(total(parts), case.tokens.shape) for parts in stages])
    sums[1] = np.where(case.pipeline > 2, sums[1], 0.0)
    worst = np.argmax(sums, axis=0)
    return {name: np.choose(worst, [np.broadcast_to(parts[name], case.tokens.shape) for parts in stages]) for name in stages[0]}


def _stage(case: Case, held: Held, kind: str, block: Number, kept: Number) -> Parts:
    blocks, dense, expert = (getattr(part, kind) for part in (held.blocks, held.dense, held.expert))
    parts = states(case, dense, expert)
    flying = in_flight(case, kind)
    stored = np.where(case.recomputed_blocks > 0, 0.0, kept) if case.framework.offloaded else kept
    parts[ACTIVATIONS] = blocks * flying * stored + np.where(case.recomputed_blocks > 0, block, 0.0) + _ends(case, kind)
    parts[LOGITS] = logits(case) if kind == "last" else np.where(case.pipeline > 1, 0.0, logits(case))
    parts[BUFFERS] = buffers(case, dense + expert, blocks)
    parts[UPDATE] = temporaries(case, dense, expert, parts)
    stays = parts[WEIGHTS] + parts[GRADIENTS] + parts[OPTIMIZER]
    parts[FRAGMENTS] = case.constants.fragmentation * (total(parts) - stays) + case.constants.padding * stays
    groups = sum((size > 1).astype(float) for size in (case.tensor, case.pipeline, case.data, case.context))
    parts[CONTEXT] = (case.constants.context_gb + case.constants.communicator_gb * groups) * 1e9
    return parts


def temporaries(case: Case, dense: Number, expert: Number, parts: Parts) -> Number:
    """4-byte copies of 2-byte gradients during the update, as far as they need more room than the activations that are gone by then."""
    if case.wide or case.framework.gradient_bytes >= 4 or case.shape.frozen:
        return np.zeros_like(case.tokens)
    shard = dense / case.shards("optimizer") + expert / np.maximum(case.shards("optimizer") / case.expert, 1)
    return np.maximum(4 * shard - parts[ACTIVATIONS] - parts[LOGITS], 0.0)


def states(case: Case, dense: Number, expert: Number) -> Parts:
    """Bytes of weights, gradients and optimizer states of one rank."""
    f = case.framework
    weight, gradient, optimizer = (
        (case.width, case.width, 2 * case.width) if case.wide else (f.weight_bytes, f.gradient_bytes, f.optimizer_bytes)
    )
    if case.shape.frozen:
        gradient, optimizer = 0, 0
    if f.offloaded:
        optimizer = 0
    replicas = {name: np.maximum(case.shards(name) / case.expert, 1) for name in ("params", "grads", "optimizer")}
    parts = {}
    for name, factor, size in ((WEIGHTS, "params", weight), (GRADIENTS, "grads", gradient), (OPTIMIZER, "optimizer", optimizer)):
        parts[name] = size * (dense / case.shards(factor) + expert / replicas[factor])
    return parts


def in_flight(case: Case, kind: str) -> Number:
    """Micro-batches whose activations a rank of this kind holds at once, in units of all its blocks."""
    p, v, m = case.pipeline, case.chunks, case.micro_batches
    rank = {"first": 0.0, "middle": 1.0, "last": p - 1}[kind]
    plain = np.minimum(p - rank, m)
    interleaved = np.minimum(2 * (p - 1 - rank) + (v - 1) * p + 1, m * v) / v
    held = np.where(v > 1, interleaved, plain)
    held = np.where(case.scheduled("gpipe"), m, held)
    return np.where(case.scheduled("zero_bubble"), np.minimum(p, m), held)


def block_bytes(case: Case) -> tuple[Number, Number]:
    """Bytes that one block keeps for backward for one micro-batch: without recomputation, and as the layout says."""
    everything, attention, norms = _activations(case)
    full, selective = case.recomputed_blocks, case.recomputes("selective")
    mode = case.framework.selective
    chosen = {"attention": everything - attention, "norms": everything - norms, "per_op": _per_op(case)}[mode]
    kept = np.where(selective, chosen, everything)
    split = np.maximum(case.sequence_split, case.tensor if case.framework.sharded_checkpoints else 1)
    checkpoint = case.tokens * case.shape.hidden * case.width / split
    return everything, full * checkpoint + (1 - full) * kept


def _per_op(case: Case) -> Number:
    """Torchtitan's policy keeps the block's input, the attention's output and every second product: queries, values, gate, MLP output."""
    s, w = case.shape, case.width
    split = case.tokens * (2 * s.query_width + s.kv_width + inner_width(case)) / case.tensor * w
    return split + 2 * case.tokens / case.sequence_split * s.hidden * w


def _activations(case: Case) -> tuple[Number, Number, Number]:
    """Bytes of one block: all of them, those of the attention core, those of norms and activation function."""
    s, f, w, t = case.shape, case.framework, case.width, case.tensor
    rows = case.tokens / case.sequence_split
    narrow = 1 if f.saves_low_precision and case.precision in ("fp8", "fp4") else w  # width of the saved inputs of products
    norm_input = rows * s.hidden * w  # input of each of two norms
    eager = 0.0 if f.fused_norm else 2 * rows * s.hidden * 8  # 4-byte copies of norms written in tensor operations
    hidden = 2 * norm_input + 2 * rows * s.hidden * narrow + eager + (2 * rows * s.hidden if s.dropout else 0)
    heads = case.tokens * ((s.query_width + 2 * s.kv_width) * w + s.query_width * narrow) / t
    inner = case.tokens * inner_width(case) / t * w
    mlp = inner * (2 if s.gated else 1) + inner * narrow / w
    if case.framework.pointwise == "eager" and s.gated:
        mlp = mlp + inner
    kernel = case.framework.attention if s.fused_attention else "unfused"
    if kernel in FLASH:
        core = case.tokens * s.heads / t * 4
    else:
        copies = {"fused_softmax": 1, "unfused": 2}[kernel] + (1.5 if s.dropout else 0)
        core = score_count(case) * w * copies
    if s.experts is not None:
        hidden = hidden + rows * s.experts.active * s.hidden * narrow  # tokens as dispatched: the input of the experts
    return hidden + heads + mlp + core, core, 2 * norm_input + eager + inner


def _ends(case: Case, kind: str) -> Number:
    """Embedding output and dropout mask on the first stage, norm and head inputs on the last."""
    rows = case.tokens / case.sequence_split * case.shape.hidden
    if kind == "first":
        return rows * (case.width + (1 if case.shape.dropout else 0))
    return 2 * rows * case.width if kind == "last" else 0.0


def logits(case: Case) -> Number:
    """Logits in 16 bits and the loss's 4-byte copies."""
    f = case.framework
    each = 2 * case.width if f.fused_loss else case.width + 4 * f.logit_copies
    if f.sharded_logits:
        return case.tokens * case.shape.vocab / case.tensor * each
    gathered = np.where(case.tensor > 1, case.constants.gathered_logits, 0.0)
    return case.tokens * case.shape.vocab * (each + gathered)


def buffers(case: Case, parameters: Number, blocks: Number) -> Number:
    """Communication buffers and what sharded parameters need while a block is whole."""
    one = parameters / np.maximum(blocks, 1)
    gathered = np.where(case.field("params") > 1, 2 * one * case.width, 0.0) + case.framework.bucket_bytes * (case.data > 1)
    received = 2 * case.tokens * case.shape.hidden * case.width
    return gathered + np.where((case.pipeline > 1) | (case.tensor > 1), received, 0.0)
