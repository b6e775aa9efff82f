"""Time of the attention core (scores, softmax, weighted values) by kind of kernel.

A flash kernel computes tile by tile: its time is the matrix work at a fraction of the peak plus one exponential per score, and
it may leave out what lies above the diagonal (Dao 2023, arXiv 2307.08691, sections 3-4: backward has 2.5 times the products of
forward). Without one, scores are written to memory and read again by every operation between the two products.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from launcher.cost.inputs.case import Case
from launcher.cost.inputs.shape import Array
from launcher.cost.parts import ForwardBackward
from launcher.cost.time import matmul

FLASH = ("tiled", "flash1", "flash2")
SKIPPING, MASKED, OPERATIONS = (1.5, 2.0), (2.5, 3.0), (14.5, 20.5)
"""Reads and writes of the 16-bit score matrix between the two products: forward, backward (dropout not counted). A fused kernel loads the
unmasked part, half of a causal matrix, of each of its inputs, one forward and two backward, and stores all of its output (Megatron-LM,
megatron/fused_kernels/scaled_upper_triang_masked_softmax.h); one that is given a mask loads all of them, and forward its byte
(scaled_masked_softmax.h). Tensor operations in 4 bytes: cast 3, mask filled in 4.5, softmax 4, cast back 3; backward cast 3, softmax 6,
mask filled into a copy 8.5, cast 3 (Aleph-Alpha/scaling, core/nn/masked_softmax/masked_softmax.py, ``softmax_in_fp32``; PyTorch,
derivatives.yaml)."""
DROPOUT_PASSES = (2.5, 2.5)


def kernel(case: Case) -> str:
    """The attention kernel actually used. With an additive bias torch takes its memory-efficient kernel, not flash attention; on a CPU
    none, if the bias is learnt."""
    s, f = case.shape, case.trainer
    if not s.fused_attention or (s.dropout and not f.kernels.attention_dropout):
        return "unfused"
    if (s.linear_biases or np.any(s.buckets)) and f.kernels.attention in FLASH:
        return "unfused" if np.any(s.buckets) and case.device.host else "tiled"
    return f.kernels.attention


def in_blocks(case: Case) -> bool:
    """True if scores are computed a block of queries at a time, for the keys before them, and again in backward."""
    s, kernels = case.shape, case.trainer.kernels
    one_stack = not (s.bidirectional or np.any(s.crossed))
    return bool(s.fused_attention and s.dropout and kernels.dropout_in_blocks and one_stack and not kernels.attention_dropout)


def seconds(case: Case) -> ForwardBackward:
    """Forward and backward seconds of one block's attention core."""
    name = kernel(case)
    own = _flash(case, name) if name in FLASH else _scores(case, name)
    if not np.any(case.shape.crossed):
        return own
    whole, share = seconds(across(case)), case.shape.seq / case.shape.crossing
    return own[0] + share * whole[0], own[1] + share * whole[1]


def across(case: Case) -> Case:
    """The attention of an encoder's output to itself, without biases."""
    return replace(case, shape=replace(case.shape, seq=case.shape.crossing, crossed=0, crossing=0, bidirectional=True, buckets=0))


def skips(case: Case) -> bool:
    """Returns whether the kernel leaves out the scores of keys behind a query."""
    return case.trainer.kernels.causal_skip and not case.shape.bidirectional


def score_count(case: Case) -> Array:
    """Scores of one block and micro-batch on one rank, without regard to causality: a slice of a sequence has none for keys behind it."""
    return case.tokens * case.shape.seq * case.reach * case.shape.heads / case.tensor


def _flash(case: Case, name: str) -> ForwardBackward:
    s, constants, device = case.shape, case.constants, case.device
    forward_rate, backward_rate = (getattr(constants, f"{name}_{way}") for way in ("forward", "backward"))
    packed = np.asarray(s.text) > 0
    text = np.where(packed, s.text, s.seq)
    seen = np.where(packed, text, s.attended)
    scores = score_count(case) * seen / s.seq * (0.5 / case.reach if skips(case) else 1.0)
    # short sequences leave units idle and waste the diagonal tiles; a text ends anywhere, so half of its last tile is empty
    ragged = np.where(packed, constants.flash_ramp / 2, 0.0) / text
    fill = (1 + ragged) * (1 + ragged + constants.flash_ramp / text)
    # heads that do not fill the kernel's power-of-two tiles run as the next one
    head = np.maximum(2 ** np.ceil(np.log2(np.maximum(s.head_width, 32))), 32)
    if s.latent is not None:  # queries and keys are wider than values: the mean of both products
        value = s.head_width if s.latent.value is None else s.latent.value
        head = (head + s.latent.rotary + np.maximum(2 ** np.ceil(np.log2(value)), 32)) / 2
    peak = device.peak(case.vector_precision) * (1.0 if case.trainer.kernels.newest_attention else device.legacy_kernel_factor)
    exponential = scores / (device.units * device.exp_throughput * constants.exponentials)
    products = 4 * scores * head / peak
    forward = (products / forward_rate + exponential) * fill + constants.kernel
    backward = (2.5 * products / backward_rate + exponential) * fill + 3 * constants.kernel
    least_forward, least_backward = _streams(case)
    return np.maximum(forward, least_forward), np.maximum(backward, least_backward)


def _streams(case: Case) -> ForwardBackward:
    """Seconds to move what a flash kernel reads and writes, which no text is too short for. Forward: Q, K, V in, O out. Backward: dO and O
    for their row sums; Q, K, V and dO; dQ as a sum in 4 bytes, cleared, added to and made 16 bits again; dK and dV (Dao 2023, algorithm 2;
    flash_attn, flash_bwd_kernel.h: ``dq_accum``)."""
    s = case.shape  # outputs are as wide as queries, values as keys, but for those from latents
    wide = (s.turned_width + s.value_width) / 2, (s.key_width + s.read_width) / 2
    queries, keys = (case.tokens * width / case.tensor for width in wide)
    keys = keys * case.reach * case.slices  # of all slices up to one's own
    rate = case.device.bandwidth * case.constants.streaming
    return (2 * queries + 2 * keys) * case.width / rate, (
        queries * (4 * case.width + 4 + 8 + 4 + case.width) + 4 * keys * case.width
    ) / rate


def score_passes(case: Case, name: str) -> ForwardBackward:
    """How often the scores are read or written between the two products."""
    if name == "unfused":
        return OPERATIONS
    return SKIPPING if skips(case) else MASKED


def _scores(case: Case, name: str) -> ForwardBackward:
    s, constants, device = case.shape, case.constants, case.device
    batch = case.micro_batch * s.heads / case.tensor
    rows, seen = s.seq / case.context / case.slices, s.seq * case.reach
    precision = case.vector_precision
    keys, values = s.turned_width / s.heads, s.value_width / s.heads
    product = matmul.seconds(device, precision, constants, rows, seen, keys, batch)
    product = (product + matmul.seconds(device, precision, constants, rows, values, seen, batch)) * matmul.aligned(s.head_width)
    # each tensor operation streams through one long array; a fused kernel does more to every element that it moves
    rate = constants.streaming if name == "unfused" else constants.bandwidth
    dropped = DROPOUT_PASSES if s.dropout else (0.0, 0.0)
    ahead, back = (moved / rate + more / constants.dropout for moved, more in zip(score_passes(case, name), dropped))
    once = score_count(case) * case.width / device.bandwidth
    forward, backward = product + ahead * once, 2 * product + back * once
    return (forward / 2, (backward + forward) / 2) if in_blocks(case) else (forward, backward)
