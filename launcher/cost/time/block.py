"""Time of one transformer block: forward, backward and what recomputation repeats, by part.

Matrix products by shape (``matmul``), the attention core by kernel, memory-bound operations by the bytes they move,
tensor-, context- and expert-parallel communication with what of it hides behind which product.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from launcher.cost.inputs.case import Case
from launcher.cost.inputs.device import BYTES
from launcher.cost.inputs.shape import Array
from launcher.cost.parts import ATTENTION, CONTEXT, EXPERT, HOST, MATRICES, POINTWISE, TENSOR, ForwardBackward, Parts, total
from launcher.cost.time import adapters, attention, collectives, matmul, pointwise, recompute
from launcher.cost.time.products import products


@dataclass(frozen=True)
class BlockTimes:
    """Seconds of one block and micro-batch on one rank, by part."""

    forward: Parts
    backward: Parts
    again: Parts  # forward work repeated before backward
    behind_host: Parts  # of all that, what the device does while it waits for its host anyway


def matrix_seconds(case: Case) -> tuple[Array, Array, Array]:
    """Seconds of the weight products: forward, input gradient, weight gradient."""
    device, precision, constants = case.device, case.precision, case.constants
    wide = case.vector_precision if case.trainer.numbers.wide_weight_gradients else precision
    forward: Array = 0.0
    inputs: Array = 0.0
    weights: Array = 0.0
    for _, m, n, k, batch, share in products(case):
        slow = share * np.where(np.asarray(batch) > 1, 1 / constants.grouped, 1.0)
        uneven = slow * matmul.on_lines(device, precision, constants, n, k)
        forward = forward + uneven * matmul.seconds(device, precision, constants, m, n, k, batch)
        inputs = inputs + uneven * matmul.seconds(device, precision, constants, m, k, n, batch)
        if case.shape.frozen:
            continue
        uneven = slow * matmul.on_lines(device, wide, constants, n, k)
        weights = weights + uneven * matmul.seconds(device, wide, constants, k, n, m, batch) + slow * _accumulate(case, batch * n * k)
    return forward, inputs, weights


ONE_KERNEL, EAGER = (6, 1), (35, 2)
"""Bytes that a cast moves per element, and those of the copy for the product's transpose among them. One kernel: 2 + 2 + 1 and the copy's
1; tensor operations: 2 + 2, 2, 2 + 4, 4 + 4, 4 + 4, 4 + 1 and the copy's 1 + 1."""


TRANSPOSED = 2
"""Bytes per element to transpose a matrix of 8 bits."""


def casts(case: Case) -> Array:
    """Seconds to bring the operands of a block's products into 8 or 4 bits, each way: read for the scale, read, write twice (the
    product's transpose needs its own copy). Written in tensor operations every step of that reads and writes: absolute value, maximum, 4
    bytes, times the scale, clamp, 8 bits (torchao.float8: tensor_to_scale, hp_tensor_and_scale_to_float8). Beside frozen weights the copies
    of inputs and output gradients that only a weight gradient reads are not made (Transformer Engine, pytorch/module/linear.py:
    ``columnwise=backward_needs_input``, which is ``weight.requires_grad``; ``not ctx.requires_wgrad: ... columnwise=False``). Weights that
    are stored in 8 bits are only transposed, for input gradients, and frozen ones keep that copy for good (pytorch/tensor/float8_tensor.py:
    ``update_usage`` makes it where ``_transpose_invalid``)."""
    if case.precision not in ("fp8", "fp4"):
        return np.zeros_like(case.tokens)
    kept = case.trainer.kernels.cast_weights_once
    once = 1 / case.micro_batches if kept else 1.0
    whole, copy = EAGER if case.trainer.kernels.eager_casts else ONE_KERNEL
    both = whole * (2 if case.trainer.numbers.block_scaled else 1)
    read = whole - copy if case.shape.frozen else both
    weight = both
    if case.stored_in_8_bits:
        weight = 0 if case.shape.frozen and kept else TRANSPOSED
    moved = sum(share * batch * (read * m * k + weight * once * n * k / 2) for _, m, n, k, batch, share in products(case))
    return moved / ONE_KERNEL[0] * case.constants.cast_bytes / (case.device.bandwidth * case.constants.bandwidth)


def _accumulate(case: Case, elements: Array) -> Array:
    """Seconds to add a weight gradient to its buffer: inside the product (one more read and write), or by a kernel of its own that reads
    both."""
    buffer = case.gradient_bytes
    moved = 2 * buffer if case.trainer.kernels.accumulate_fused else case.width + 2 * buffer
    repeated = np.where(case.micro_batches > 1, 1.0, 0.5)
    return elements * moved * repeated / (case.device.bandwidth * case.constants.streaming)


def times(case: Case) -> BlockTimes:
    """Seconds of one block and micro-batch."""
    forward, inputs, weights = matrix_seconds(case)
    attention_forward, attention_backward = attention.seconds(case)
    point_forward, point_backward = pointwise.seconds(case)
    cast = casts(case)
    low_forward, low_backward = adapters.seconds(case)
    tensor_forward, tensor_backward = (
        shared + own for shared, own in zip(tensor_seconds(case, forward, inputs, weights), adapters.tensor_seconds(case))
    )
    context_forward, context_backward = context_seconds(case, attention_forward, attention_backward)
    expert = expert_seconds(case)
    ahead = {MATRICES: forward + low_forward, ATTENTION: attention_forward, POINTWISE: point_forward + cast}
    back = {MATRICES: inputs + weights + low_backward, ATTENTION: attention_backward, POINTWISE: point_backward + cast}
    ahead |= {TENSOR: tensor_forward, CONTEXT: context_forward, EXPERT: exposed(case, expert, forward)}
    back |= {TENSOR: tensor_backward, CONTEXT: context_backward, EXPERT: exposed(case, expert, inputs + weights)}
    sparse = case.shape.expert_layers / case.shape.layers
    kernels = (
        case.trainer.kernels.launches_per_block * case.shape.added_to_residual / 2 + sparse * case.trainer.kernels.launches_per_mixture
    )
    started = collectives_started(case)
    host = case.trainer.kernels.host_forward, case.trainer.kernels.host_backward
    ahead[HOST] = launching(case, kernels, started[0], total(ahead), host[0])
    back[HOST] = launching(case, 2 * kernels, started[1], total(back), host[1])
    return BlockTimes(ahead, back, recompute.again(case, ahead), behind_host(case, ahead, back))


def of_stacks(case: Case) -> list[BlockTimes]:
    """Seconds of a block of each stack."""
    return [times(stack) for stack in case.stacks]


def collectives_started(case: Case) -> ForwardBackward:
    """Launches that it takes to start a block's collectives, forward and backward: those of its tensor ranks, and of its sharded parameters
    gathers each way and a reduction back. On a host, what it takes to start one is in the time of the collective. The least is five calls
    of the driver: an event recorded and waited for before it, the kernel, and the same after it (torch/csrc/distributed/c10d/
    ProcessGroupNCCL.cpp: syncStream, collective, WorkNCCL::synchronizeStream)."""
    if case.device.host:
        return 0.0, 0.0
    tensor, sharded = case.tensor > 1, (case.field("params") > 1) & ~case.kept_whole
    again = regathers(case)
    each = np.where(case.table["sequence_parallel"], 4, 2)
    states = np.where(sharded, case.trainer.overlap.gathers_per_block * case.trainer.kernels.host_shards, 0)
    back = each + np.where(case.table["sequence_parallel"], again, 0)
    one = case.trainer.kernels.host_tensor
    return one * np.where(tensor, each, 0) + states, one * np.where(tensor, back, 0) + 2 * states


MEASURED_LAUNCHES = 1.4 * 3 * 40
"""Host time of a block of this project's trainer, both ways, in kernel launches of plain PyTorch (``benchmarks.host_work``): the time that
``trireme doctor`` takes when it measures a block's operations."""


def launching(case: Case, kernels: Array, started: Array, busy: Array, factor: float) -> Array:
    """Seconds that the device waits for the host to launch ``kernels`` and what starts collectives, which keep it ``busy``, where a
    trainer's modules take ``factor`` times as long as plain ones. The host itself does one or the other."""
    if case.trainer.kernels.launch_blocking and not case.device.host:
        return (kernels + started) * case.constants.blocking
    known = case.device.measured
    each = case.constants.host if known is None else known.block_s / MEASURED_LAUNCHES
    calls = (kernels * factor + started) * each
    return calls if case.device.host else np.maximum(calls - busy, 0.0)


def behind_host(case: Case, ahead: Parts, back: Parts) -> Parts:
    """Seconds of the device's work, by part, in directions in which it waits for the host to launch more: were they shorter, the device
    would wait longer, and the block take as long."""
    if case.trainer.kernels.launch_blocking or case.device.host:
        return {}
    first, second = ahead[HOST] > 0, back[HOST] > 0
    if not (np.any(first) or np.any(second)):
        return {}
    repeated = recompute.of_whole_blocks(case, ahead)
    return {name: first * (ahead[name] + repeated[name]) + second * back[name] for name in ahead if name != HOST}


def regathers(case: Case) -> int:
    """Inputs that backward gathers again, for weight gradients (Transformer Engine, pytorch/module/linear.py:
    ``backward_input_needs_gather``, which is ``weight.requires_grad and ...``)."""
    return 2 if case.trainer.overlap.regathers_inputs and not case.shape.frozen else 0


def gathered_width(case: Case) -> float:
    """Bytes of an activation element, or of its gradient, that tensor ranks gather for a product."""
    return BYTES[case.precision] if case.trainer.numbers.gathers_low_precision else case.width


def tensor_seconds(case: Case, forward: Array, inputs: Array, weights: Array) -> ForwardBackward:
    """Exposed tensor-parallel communication of a block: forward, backward.

    Without sequence parallelism two all-reduces each way, with it two all-gathers and two reduce-scatters, and backward gathers the
    saved inputs again (Korthikanti et al. 2022, section 4.2). The backward ones can overlap with weight- and input-gradient products.
    """
    c, device = case.constants, case.device
    payload = case.tokens * case.shape.hidden * case.width
    reduce = c.skew * collectives.all_reduce(device, c, case.tensor_group, payload)
    gather = c.skew * collectives.all_gather(device, c, case.tensor_group, payload * gathered_width(case) / case.width)
    scatter = c.skew * collectives.reduce_scatter(device, c, case.tensor_group, payload)
    sequence, times = case.table["sequence_parallel"], case.shape.added_to_residual
    ahead = np.where(sequence, times * (gather + scatter), times * reduce)
    again = regathers(case)
    back = np.where(sequence, (times + again) * gather + times * scatter, times * reduce)
    entered = _entered(case)
    ahead, back = ahead + entered[0], back + entered[1]
    overlap = case.trainer.overlap.tensor
    if overlap == "none" or not device.overlaps:
        return ahead, back
    beside_weights = np.where(sequence, 2 * gather, 2 * reduce)
    beside_inputs = np.where(sequence, (again + (2 if overlap == "all" else 0)) * gather, 0.0)
    hidden = np.minimum(beside_weights * c.tensor_hidden, weights) + np.minimum(beside_inputs * c.tensor_hidden, inputs)
    if overlap == "all":
        ahead = ahead - np.minimum(ahead * c.tensor_hidden, forward)
    return ahead, back - hidden


def _entered(case: Case) -> ForwardBackward:
    """Communication of the encoder's output, which each part of the decoder gathers once for all of its blocks, and whose gradient it sums
    once: the share of one block."""
    if not np.any(case.shape.crossed):
        return 0.0, 0.0
    machine, payload = (
        (case.device, case.constants, case.tensor_group),
        case.micro_batch * case.shape.crossing * case.shape.hidden * case.width,
    )
    parts = 1 / np.maximum(case.blocks_per_chunk, 1)
    sequence = case.table["sequence_parallel"]
    back = np.where(sequence, collectives.reduce_scatter(*machine, payload), collectives.all_reduce(*machine, payload))
    return parts * np.where(sequence, collectives.all_gather(*machine, payload), 0.0), parts * back


def context_seconds(case: Case, forward: Array, backward: Array) -> ForwardBackward:
    """Exposed communication of context ranks: keys and values that pass around a ring behind attention itself (Liu et al. 2023, arXiv
    2310.01889; what hides was held against published steps of trainers with kernels of their own for it), or are gathered before it, again
    in backward of a block that was not recomputed, and have their gradients scattered; or heads that change places (Jacobs et al. 2023,
    arXiv 2309.14509)."""
    machine, each = (case.device, case.constants, case.context_group), case.tokens / case.tensor * case.width
    payload = each * (case.shape.key_width + case.shape.read_width)
    if case.trainer.overlap.context == "all_to_all":
        there = collectives.all_to_all(*machine, payload + each * case.shape.turned_width)
        both = there + collectives.all_to_all(*machine, each * case.shape.value_width)
        return both, both
    ring = collectives.all_gather(*machine, payload * case.context)
    if case.trainer.overlap.context == "all_gather":
        return ring, (1 - case.recomputed_blocks) * ring + collectives.reduce_scatter(*machine, payload * case.context)
    if not case.trainer.kernels.eager_ring:
        return np.maximum(ring - forward, 0.1 * ring), np.maximum(2 * ring - backward, 0.2 * ring)
    others, merged = np.maximum(case.context - 1, 1), merging(case)
    front = np.maximum(ring - forward * others / (others + 1), 0.1 * ring) + merged  # nothing travels beside the last part
    home = ring / others  # the last gradient, beside nothing
    back = np.maximum(2 * ring - backward, np.maximum(home, 0.2 * ring)) + merged
    return front, back + np.where(case.recomputes("selective"), front, 0.0)


def merging(case: Case) -> Array:
    """Seconds to add what queries find in one rank's keys to what they have found, once for every other rank, either way: outputs, or
    gradients of queries, are read, and added to sums of 4 bytes. Of the ranks before all queries see keys, of those behind the second
    half (zig-zag)."""
    s = case.shape
    moved = (case.context - 1) * 0.75 * case.tokens * (s.turned_width + s.value_width) / 2 / case.tensor * (case.width + 8)
    return moved / (case.device.bandwidth * case.constants.streaming)


def exposed(case: Case, expert: Array, products: Array) -> Array:
    """The part of ``expert`` seconds of dispatch that is not hidden behind the matrix products of another micro-batch."""
    if not case.trainer.overlap.experts:
        return expert
    return expert - np.minimum(case.constants.tensor_hidden * expert, products)


def expert_seconds(case: Case) -> Array:
    """Dispatch and return of tokens to their experts, one way of the block."""
    if case.shape.experts is None:
        return np.zeros_like(case.tokens)
    active, group = case.shape.experts.active, case.expert_group
    payload = case.tokens / case.expert_split * active * case.imbalance * case.shape.hidden * case.width
    beyond: Array = 1.0  # of the copies that leave the domain, those that really travel
    if case.trainer.overlap.dispatch_by_domain:
        beyond = np.where(group.far > 1, group.far / active * (1 - (1 - 1 / group.far) ** active), 1.0)
    once = collectives.all_to_all(case.device, case.constants, group, payload, beyond)
    return (2 * once + _cut_expert_seconds(case)) * case.shape.expert_layers / case.shape.layers


def _cut_expert_seconds(case: Case) -> Array:
    """Gathers of tokens, their choices and weights (8 and 4 bytes for each of a token's experts), and the sum of what the parts of experts
    give, one way of a mixture. A trainer that cuts all its experts sends, in place of tokens, copies that have come to a rank; none is
    counted."""
    assert case.shape.experts is not None
    if not case.trainer.memory.whole_experts:
        return np.zeros_like(case.tokens)
    machine, tokens = (case.device, case.constants, case.expert_tensor_group), case.tokens / case.expert_split
    payload, chosen = tokens * case.shape.hidden * case.width, tokens * case.shape.experts.active
    seconds = collectives.reduce_scatter(*machine, payload)
    for gathered in (payload, 8 * chosen, 4 * chosen):
        seconds = seconds + collectives.all_gather(*machine, gathered)
    return seconds
