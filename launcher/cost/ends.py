"""Time of the two ends of the model: embedding at the start, head and loss at the end."""

from __future__ import annotations

import numpy as np

from launcher.cost import collectives, matmul
from launcher.cost.case import Case
from launcher.cost.shape import Number


def embedding(case: Case) -> tuple[Number, Number]:
    """Forward and backward seconds of the input embedding: a gather of rows, one reduction over the tensor ranks, a scatter."""
    payload = case.tokens * case.shape.hidden * case.width
    move = payload / (case.device.bandwidth * case.constants.bandwidth)
    reduce = collectives.all_reduce(case.device, case.constants, case.tensor_group, payload)
    return 3 * move + reduce + issued(case), 6 * move + issued(case)


def issued(case: Case) -> Number:
    """Seconds of the host for an end's operations, one way, where the host itself computes: a fourth of what they take in a micro-batch."""
    return case.device.measured.micro_batch_s / 4 if case.device.host and case.device.measured else 0.0


def head(case: Case) -> tuple[Number, Number]:
    """Forward and backward seconds of final norm, head and loss."""
    s, c, device = case.shape, case.constants, case.device
    precision = case.vector_precision  # the head stays in 16 bits
    mine = s.vocab / case.tensor
    forward = matmul.seconds(device, precision, c, case.tokens, mine, s.hidden)
    backward = matmul.seconds(device, precision, c, case.tokens, s.hidden, mine) + matmul.seconds(
        device, precision, c, mine, s.hidden, case.tokens
    )
    held = mine if case.framework.sharded_logits else s.vocab
    move = case.tokens * held * (2 if case.framework.fused_loss else 4) / (device.bandwidth * c.bandwidth)
    spread = _communication(case)
    spread = spread + issued(case)
    ahead, back = (usual + more for usual, more in zip(c.loss_passes, case.framework.loss_passes))
    return forward + ahead * move + spread, backward + back * move + spread


def _communication(case: Case) -> Number:
    """Sharded logits need three reductions of one number per token, and backward sums the input gradient; whole logits are gathered."""
    hidden = collectives.all_reduce(case.device, case.constants, case.tensor_group, case.tokens * case.shape.hidden * case.width)
    if case.framework.sharded_logits:
        few = collectives.all_reduce(case.device, case.constants, case.tensor_group, case.tokens * 4)
        return (hidden + 3 * few) / 2
    logits = collectives.all_gather(case.device, case.constants, case.tensor_group, case.tokens * case.shape.vocab * case.width)
    return np.maximum(hidden, logits) / 2
