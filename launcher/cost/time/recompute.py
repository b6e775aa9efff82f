"""Forward work of a block that is done again before its backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from launcher.cost.inputs.case import Case
from launcher.cost.inputs.shape import Array
from launcher.cost.parts import ATTENTION, MATRICES, POINTWISE, TENSOR, Parts
from launcher.cost.time import matmul
from launcher.cost.time.products import products


@dataclass(frozen=True)
class RecomputePolicy:
    """The work that a selective mode repeats."""

    fractions: dict[str, float]  # of each kind of work
    keeps: Sequence[str] = ()  # products whose results are kept, or asked for by nothing in backward


EVERYTHING = {MATRICES: 1.0, ATTENTION: 1.0, POINTWISE: 1.0}
SELECTIVE = {
    "attention": RecomputePolicy({ATTENTION: 1.0}),  # Korthikanti et al. 2022, section 5
    # torchtitan keeps attention and every second product: keys, output, up are repeated
    "per_op": RecomputePolicy({MATRICES: 0.38, POINTWISE: 1.0}),
    "norms": RecomputePolicy({POINTWISE: 1.0}),
    # torchtitan's graph trainer keeps the results of all products and of attention (_get_default_save_ops)
    "products": RecomputePolicy({POINTWISE: 1.0}),
    "but_weights": RecomputePolicy({ATTENTION: 1.0, POINTWISE: 1.0}),  # Pax, SAVE_DOT_WITH_NO_BATCH_DIM: products with weights
    "but_queries": RecomputePolicy(EVERYTHING, ("qkv", "down")),  # MaxText, remat_policy=save_qkv_proj
    "but_projections": RecomputePolicy(EVERYTHING, ("qkv", "output", "down")),  # Paxml, SAVE_QKV_OUT_PROJ
}


def again(case: Case, forward: Parts) -> Parts:
    """Seconds by part: of whole blocks everything that the trainer does not spare, else what its selective mode repeats."""
    chosen = np.where(case.recomputes("selective"), 1.0, 0.0)
    policy = SELECTIVE[case.trainer.recompute.selective]
    kept = {MATRICES: results(case, policy.keeps)} if policy.keeps else {}
    whole = of_whole_blocks(case, forward)
    return {name: whole[name] + (value - kept.get(name, 0.0)) * chosen * policy.fractions.get(name, 0.0) for name, value in forward.items()}


def of_whole_blocks(case: Case, forward: Parts) -> Parts:
    """Repeated work of blocks that are recomputed whole, which launches them once more."""
    spare = spared(case, forward)
    return {name: (value - spare.get(name, 0.0)) * case.recomputed_blocks for name, value in forward.items()}


def spared(case: Case, forward: Parts) -> Parts:
    """Work that a trainer leaves out when it recomputes a whole block. One that stops early: the second product of a dense MLP, whose
    result nothing in backward asks for, and its sum over the tensor ranks, a part of the block's forward communication."""
    out: Parts = {ATTENTION: forward[ATTENTION]} if case.trainer.recompute.keeps_attention else {}
    if case.trainer.recompute.stops_early:
        out |= {MATRICES: results(case, ("down",)), TENSOR: forward[TENSOR] * np.where(case.table["sequence_parallel"], 0.25, 0.5)}
    return out


def results(case: Case, names: Sequence[str]) -> Array:
    """Seconds of a block's forward products of those names."""
    machine = case.device, case.precision, case.constants
    return sum(
        p.share * matmul.on_lines(*machine, p.columns, p.inner) * matmul.seconds(*machine, p.rows, p.columns, p.inner, p.batch)
        for p in products(case)
        if p.name in names
    )
