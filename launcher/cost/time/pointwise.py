"""Memory-bound operations of a block: norms, activation, residuals, dropout, rotary embedding, by the bytes they move."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.cost.inputs.case import Case
from launcher.cost.inputs.shape import Array
from launcher.cost.parts import ForwardBackward


@dataclass(frozen=True)
class Passes:
    """Times that an element is read or written (in units of its own width, 2 bytes): forward, backward."""

    norm: tuple[float, float]
    residual: tuple[float, float]  # the branch and the sum; backward, the gradients of both branches
    bias: tuple[float, float]  # of the branch
    dropout: tuple[float, float]  # of the branch
    activation: tuple[float, float]  # GELU, per element of the MLP's inner width
    gate: tuple[float, float]  # SwiGLU, per element of the inner width
    rotary: tuple[float, float]  # per element of queries and keys


PASSES = {
    "eager": Passes((2, 5), (3, 3), (2, 1), (2.5, 2.5), (4, 5), (8, 12), (9, 9)),
    "fused": Passes((2, 5), (3, 3), (0, 0), (0.5, 0.5), (2, 3), (3, 5), (4, 4)),
    "compiled": Passes((2, 4), (2, 2), (0, 0), (0.5, 0.5), (2, 3), (3, 5), (2, 2)),
}
"""A bias that a kernel of its own adds is read with a whole tensor, of which another is written; its gradient is a sum that reads once.
Dropout reads, writes, and writes a mask of one byte an element; backward it reads the gradient and the mask and writes the gradient of
what it dropped (PyTorch: ``aten::native_dropout`` and ``native_dropout_backward``). Of what a compiler fuses with the addition
(Megatron-LM, ``bias_dropout_add_fused_train``) the least is counted, the mask: sequence parallelism, which divides all of it, made the
backward pass of a measured block shorter by less than a hundredth (arXiv 2205.05198, table 4)."""


def seconds(case: Case) -> ForwardBackward:
    """Forward and backward seconds of one block's memory-bound operations."""
    s, kernels = case.shape, case.trainer.kernels
    passes = PASSES[kernels.pointwise]
    c = case.constants
    norm = passes.norm if kernels.fused_norm else (c.eager_norm_forward, c.eager_norm_backward)
    rows, normed = case.tokens / case.sequence_split, normed_heads(case)
    times = []
    for way in (0, 1):
        added = passes.residual[way] + s.output_biases / 2 * passes.bias[way] + s.dropout * passes.dropout[way]
        hidden = rows * s.hidden * (s.block_norms * norm[way] + s.added_to_residual * added) + normed * norm[way]
        each = (passes.gate if s.gated else passes.activation)[way] + drops_inside(case) * passes.dropout[way]
        inner = case.tokens * inner_width(case) / case.tensor * each
        turned = case.tokens * turning_width(case) / case.tensor * passes.rotary[way] if s.rotary else 0.0
        times.append((hidden + inner + turned + sorted_tokens(case)) * case.width / (case.device.bandwidth * case.constants.bandwidth))
    return times[0], times[1]


def sorted_tokens(case: Case) -> Array:
    """Elements read and written to put tokens in the order of their experts and back: each copy twice each way."""
    s = case.shape
    if s.experts is None:
        return 0.0
    copies = s.experts.active * case.imbalance
    return 4 * case.tokens / case.expert_split * copies * s.hidden * s.expert_layers / s.layers


def normed_heads(case: Case) -> Array:
    """Elements of queries and keys, or of the latents that they are made from, that have norms of their own."""
    return sum(case.tokens * each.normed / (1 if each.whole else case.tensor) for each in case.shape.head_norms)


def turning_width(case: Case) -> Array:
    """Width of queries and keys that turns with positions."""
    s = case.shape
    return s.query_width + s.kv_width if s.latent is None else 2 * s.heads * s.latent.rotary


def drops_inside(case: Case) -> bool:
    """Returns whether there is dropout between the matrices of an MLP."""
    return case.shape.inner_dropout and case.trainer.kernels.mlp_dropout


def inner_width(case: Case) -> Array:
    """Inner width of the MLP that a token passes, averaged over dense and expert blocks; on the rank with the busiest experts."""
    s = case.shape
    if s.experts is None:
        return s.ffn
    sparse = s.expert_layers / s.layers
    return (1 - sparse) * s.ffn + sparse * (s.experts.active * case.imbalance * s.experts.ffn + s.experts.shared_ffn)
