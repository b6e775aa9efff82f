"""The weight matrix products of a transformer block."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from launcher.cost.inputs.case import Case
from launcher.cost.inputs.shape import Array
from launcher.cost.time import matmul
from trainer.shared.families import block
from trainer.shared.families.block import Matrix


class Product(NamedTuple):
    """``batch`` products (rows x inner) (inner x columns), in a ``share`` of the blocks."""

    name: str
    rows: Array
    columns: Array
    inner: Array
    batch: Array = 1
    share: Array = 1.0


def products(case: Case) -> list[Product]:
    """Weight matrix products of a block's forward, by the names of their matrices; those of a router are too small to count."""
    s, tokens, t = case.shape, case.tokens, case.tensor
    out = [_product(each, tokens, t) for each in s.attention if np.any(each.inputs)]
    if np.any(s.crossed):
        out += [_product(each, case.micro_batch * s.crossing if each.encoded else tokens, t) for each in block.crossing(s)]
    sparse = s.expert_layers / s.layers
    dense = 1 - sparse
    if np.any(np.asarray(dense) > 0):
        out += [_product(each, tokens, t, share=dense) for each in block.mlp(s)]
    if (experts := s.experts) is not None:
        local = experts.count / case.expert
        # every expert of the busiest rank gets its share of all ranks' tokens
        rows = tokens * experts.active / local * case.imbalance * (case.expert_tensor / t)
        out += [_product(each, rows, case.expert_tensor, local, sparse) for each in s.routed]
        if np.any(np.asarray(experts.shared_ffn) > 0):
            out += [_product(each, tokens, t, share=sparse) for each in block.shared(s, experts)]
    return out


def _product(matrix: Matrix, rows: Array, ranks: Array, batch: Array = 1, share: Array = 1.0) -> Product:
    """The product of ``rows`` tokens with a matrix that so many ``ranks`` share."""
    inner, columns = (matrix.inputs / ranks, matrix.outputs) if matrix.reduces else (matrix.inputs, matrix.outputs / ranks)
    return Product(matrix.name, rows, columns + matrix.whole, inner, batch, share)


def off_lines(case: Case) -> list[int]:
    """Sizes on a rank, of any layout of ``case``, at which rows of its weight products begin between lines (``matmul.on_lines``)."""
    if case.device.host:
        return []
    sizes = np.concatenate([np.ravel(size) for each in products(case) for size in (each.columns, each.inner)])
    return sorted({int(size) for size in sizes if size % matmul.per_line(case.precision)})
