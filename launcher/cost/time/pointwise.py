"""Memory-bound operations of a block: norms, activation, residuals, dropout, rotary embedding, by the bytes they move."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.cost.inputs.case import Case
from launcher.cost.inputs.shape import Array
from launcher.cost.parts import ForwardBackward


@dataclass(frozen=True)
class Passes:
    """Times that an element is read or written (in units of its own width): forward, backward."""

    norm: tuple[float, float]
    residual: tuple[float, float]  # bias, dropout, addition
    activation: tuple[float, float]  # GELU, per element of the MLP's inner width
    gate: tuple[float, float]  # SwiGLU, per element of the inner width
    rotary: tuple[float, float]  # per element of queries and keys


PASSES = {
    "eager": Passes((2, 5), (5, 3), (4, 5), (8, 12), (9, 9)),
    "fused": Passes((2, 5), (3, 3), (2, 3), (3, 5), (4, 4)),
    "compiled": Passes((2, 4), (2, 2), (2, 3), (3, 5), (2, 2)),
}


def seconds(case: Case) -> ForwardBackward:
    """Forward and backward seconds of one block's memory-bound operations."""
    s, kernels = case.shape, case.trainer.kernels
    passes = PASSES[kernels.pointwise]
    c = case.constants
    norm = passes.norm if kernels.fused_norm else (c.eager_norm_forward, c.eager_norm_backward)
    rows = case.tokens / case.sequence_split
    times = []
    for way in (0, 1):
        hidden = rows * s.hidden * 2 * (norm[way] + passes.residual[way])
        inner = case.tokens * inner_width(case) / case.tensor * (passes.gate if s.gated else passes.activation)[way]
        turned = case.tokens * (s.query_width + s.kv_width) / case.tensor * passes.rotary[way] if s.rotary else 0.0
        times.append((hidden + inner + turned + sorted_tokens(case)) * case.width / (case.device.bandwidth * case.constants.bandwidth))
    return times[0], times[1]


def sorted_tokens(case: Case) -> Array:
    """Elements read and written to put tokens in the order of their experts and back: each copy twice each way."""
    s = case.shape
    if s.experts is None:
        return 0.0
    return 4 * case.tokens / case.sequence_split * s.experts.active * s.hidden * s.expert_layers / s.layers


def inner_width(case: Case) -> Array:
    """Inner width of the MLP that a token passes, averaged over dense and expert blocks."""
    s = case.shape
    if s.experts is None:
        return s.ffn
    sparse = s.expert_layers / s.layers
    return (1 - sparse) * s.ffn + sparse * (s.experts.active * s.experts.ffn + s.experts.shared_ffn)
