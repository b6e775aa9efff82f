"""The weight matrix products of a transformer block."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from launcher.cost.inputs.case import Case
from launcher.cost.inputs.shape import Array
from launcher.cost.time import matmul


class Product(NamedTuple):
    """``batch`` products (rows x inner) (inner x columns), in a ``share`` of the blocks."""

    name: str
    rows: Array
    columns: Array
    inner: Array
    batch: Array = 1
    share: Array = 1.0


def products(case: Case) -> list[Product]:
    """Weight matrix products of a block's forward: ``queries`` (keys and values too), ``output`` of attention, ``gates`` and ``down`` of
    a dense MLP, ``experts``."""
    s, t, tokens = case.shape, case.tensor, case.tokens
    out: list[Product] = []
    if s.latent is None:
        out.append(Product("queries", tokens, (s.query_width + 2 * s.kv_width) / t, s.hidden))
    else:
        out += _latent_products(case)
    out.append(Product("output", tokens, s.hidden, s.value_width / t))
    if np.any(s.crossed):
        out.append(Product("crossing", tokens, s.query_width / t, s.hidden))
        out.append(Product("crossing", case.micro_batch * s.crossing, 2 * s.kv_width / t, s.hidden))
        out.append(Product("crossing", tokens, s.hidden, s.value_width / t))
    sparse = s.expert_layers / s.layers
    dense = 1 - sparse
    gates = s.mlp_matrices - 1
    if np.any(np.asarray(dense) > 0):
        out.append(Product("gates", tokens, gates * s.ffn / t, s.hidden, share=dense))
        out.append(Product("down", tokens, s.hidden, s.ffn / t, share=dense))
    if s.experts is not None:
        out += _expert_products(case, sparse, gates)
    return out


def off_lines(case: Case) -> list[int]:
    """Sizes on a rank, of any layout of ``case``, at which rows of its weight products begin between lines (``matmul.on_lines``)."""
    if case.device.host:
        return []
    sizes = np.concatenate([np.ravel(size) for each in products(case) for size in (each.columns, each.inner)])
    return sorted({int(size) for size in sizes if size % matmul.per_line(case.precision)})


def _latent_products(case: Case) -> list[Product]:
    s, t, tokens, latent = case.shape, case.tensor, case.tokens, case.shape.latent
    assert latent is not None
    turned, direct = s.heads * (s.head_width + latent.rotary) / t, np.asarray(latent.query_rank) == 0
    made = [
        Product("queries", tokens, np.where(direct, turned, latent.query_rank) + latent.kv_rank + latent.rotary, s.hidden),
        Product("queries", tokens, (s.query_width + s.value_width) / t, latent.kv_rank),
    ]
    return made if np.all(direct) else [*made, Product("queries", tokens, turned, latent.query_rank)]


def _expert_products(case: Case, sparse: Array, gates: int) -> list[Product]:
    s, t, experts = case.shape, case.tensor, case.shape.experts
    assert experts is not None
    local = experts.count / case.expert
    # every expert of the busiest rank gets its share of all ranks' tokens
    rows = case.tokens * experts.active / local * case.imbalance * (case.expert_tensor / t)
    widths = [(rows, experts.ffn / case.expert_tensor, local)]
    if np.any(np.asarray(experts.shared_ffn) > 0):
        widths.append((case.tokens, experts.shared_ffn / t, 1))
    out = []
    for n, ffn, batch in widths:
        out.append(Product("experts", n, gates * ffn, s.hidden, batch, sparse))
        out.append(Product("experts", n, s.hidden, ffn, batch, sparse))
    return out
