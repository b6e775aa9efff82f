"""Time of the two ends of the model: embedding at the start, head and loss at the end."""

from __future__ import annotations

import numpy as np

from launcher.cost.inputs.case import Case
from launcher.cost.inputs.groups import PlacedGroup
from launcher.cost.inputs.shape import Array
from launcher.cost.parts import ForwardBackward
from launcher.cost.time import collectives, matmul


def embedding(case: Case) -> ForwardBackward:
    """Forward and backward seconds of the input embedding: a gather of rows, one reduction over the tensor ranks, a scatter, unless it is
    frozen."""
    if len(case.stacks) > 1:
        both = [embedding(stack) for stack in case.stacks]
        return sum(ahead for ahead, _ in both), sum(back for _, back in both)
    payload = case.tokens * case.shape.hidden * case.width
    move = payload / (case.device.bandwidth * case.constants.bandwidth)
    reduce = collectives.all_reduce(case.device, case.constants, case.tensor_group, payload)
    scatter = 0.0 * move if case.shape.frozen else 6 * move
    return 3 * move + reduce + issued(case, 3 * move), scatter + issued(case, scatter)


def by_stage(case: Case) -> tuple[ForwardBackward, ForwardBackward, ForwardBackward]:
    """Seconds of the model's ends on the first, a middle and the last pipeline rank. A single rank is the last one."""
    front, back = embedding(case), head(case)
    forward, backward = np.asarray(front[0]) + back[0], np.asarray(front[1]) + back[1]
    if case.trainer.pipeline.spreads_vocabulary:
        added = _added_up(case) if case.trainer.pipeline.vocabulary_waits else 0.0
        each = forward / case.pipeline + added, backward / case.pipeline + added
        return each, each, each
    alone = case.pipeline == 1
    return front, (0.0, 0.0), (np.where(alone, forward, back[0]), np.where(alone, backward, back[1]))


def _added_up(case: Case) -> Array:
    """Seconds, each way, to hand the hidden state to all pipeline ranks, or to add up its gradient over them."""
    group = PlacedGroup.of(case.device, case.pipeline, case.tensor * case.context * case.data)
    return collectives.all_reduce(case.device, case.constants, group, case.tokens * case.shape.hidden * case.width)


def issued(case: Case, busy: Array) -> Array:
    """Seconds of the host for an end's operations, one way, where they were measured: a fourth of what they take in a micro-batch. A
    device that they keep ``busy`` for longer does not wait for them."""
    if case.device.measured is None:
        return 0.0
    host = case.device.measured.micro_batch_s / 4
    return host if case.device.host else np.maximum(host - busy, 0.0)


def head(case: Case) -> ForwardBackward:
    """Forward and backward seconds of final norm, head and loss, once more for each further token that is predicted, whose block has a
    projection of two hidden states in front (DeepSeek-V3, arXiv 2412.19437, section 2.2).

    A frozen head has no weight gradient (Megatron Core,
    tensor_parallel/layers.py: ``linear_with_frozen_weight``; trainer/tensor/cross_entropy.py)."""
    case = case.stacks[-1]
    s, c, device = case.shape, case.constants, case.device
    precision, passes = case.vector_precision, 1 + s.predicted_tokens  # the head stays in 16 bits
    mine = case.vocabulary
    forward = matmul.seconds(device, precision, c, case.tokens, mine, s.hidden)
    backward = matmul.seconds(device, precision, c, case.tokens, s.hidden, mine)
    if not s.frozen:
        backward = backward + matmul.seconds(device, precision, c, mine, s.hidden, case.tokens)
    held = mine if case.trainer.memory.sharded_logits else s.vocab
    move = case.tokens * held * (2 if case.trainer.kernels.fused_loss else 4) / (device.bandwidth * c.bandwidth)
    spread = _communication(case) * passes
    kernels = case.trainer.kernels
    ahead, back = c.loss_passes_forward + kernels.loss_passes_forward, c.loss_passes_backward + kernels.loss_passes_backward
    forward, backward = (forward + ahead * move) * passes, (backward + back * move) * passes
    if np.any(s.predicted_tokens):
        project = s.predicted_tokens * matmul.seconds(device, precision, c, case.tokens, s.hidden / case.tensor, 2 * s.hidden)
        forward, backward = forward + project, backward + (1 if s.frozen else 2) * project
    if kernels.late_loss:
        forward, backward = 0.0 * forward, forward + backward
    return forward + spread + issued(case, forward), backward + spread + issued(case, backward)


def _communication(case: Case) -> Array:
    """Sharded logits need three reductions of one number per token, and backward sums the input gradient; whole logits are gathered."""
    hidden = collectives.all_reduce(case.device, case.constants, case.tensor_group, case.tokens * case.shape.hidden * case.width)
    if case.trainer.memory.sharded_logits:
        few = collectives.all_reduce(case.device, case.constants, case.tensor_group, case.tokens * 4)
        return (hidden + 3 * few) / 2
    logits = collectives.all_gather(case.device, case.constants, case.tensor_group, case.tokens * case.shape.vocab * case.width)
    return np.maximum(hidden, logits) / 2
