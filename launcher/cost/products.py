"""The weight matrix products of a transformer block."""

from __future__ import annotations

import numpy as np

from launcher.cost.case import Case
from launcher.cost.shape import Number


def products(case: Case) -> list[tuple[Number, Number, Number, Number, float]]:
    """Weight matrix products of a block's forward: (rows, columns, inner, batch, share of blocks)."""
    s, t, tokens = case.shape, case.tensor, case.tokens
    out = []
    if s.latent is None:
        out.append((tokens, (s.query_width + 2 * s.kv_width) / t, s.hidden, 1, 1.0))
    else:
        out += _latent_products(case)
    out.append((tokens, s.hidden, s.query_width / t, 1, 1.0))
    sparse = s.expert_layers / s.layers
    dense = 1 - sparse
    gates = s.mlp_matrices - 1
    if np.any(np.asarray(dense) > 0):
        out += [(tokens, gates * s.ffn / t, s.hidden, 1, dense), (tokens, s.hidden, s.ffn / t, 1, dense)]
    if s.experts is not None:
        out += _expert_products(case, sparse, gates)
    return out


def _latent_products(case: Case) -> list[tuple[Number, Number, Number, Number, float]]:
    s, t, tokens, latent = case.shape, case.tensor, case.tokens, case.shape.latent
    assert latent is not None
    return [
        (tokens, latent.query_rank + latent.kv_rank + latent.rotary, s.hidden, 1, 1.0),
        (tokens, s.heads * (s.head_width + latent.rotary) / t, latent.query_rank, 1, 1.0),
        (tokens, 2 * s.query_width / t, latent.kv_rank, 1, 1.0),
    ]


def _expert_products(case: Case, sparse: Number, gates: int) -> list[tuple[Number, Number, Number, Number, float]]:
    s, t, experts = case.shape, case.tensor, case.shape.experts
    assert experts is not None
    local = experts.count / case.expert
    rows = case.tokens * experts.active / local  # balanced routing: every expert gets its share of all ranks' tokens
    out = [(rows, gates * experts.ffn / t, s.hidden, local, sparse), (rows, s.hidden, experts.ffn / t, local, sparse)]
    if np.any(np.asarray(experts.shared_ffn) > 0):
        out += [
            (case.tokens, gates * experts.shared_ffn / t, s.hidden, 1, sparse),
            (case.tokens, s.hidden, experts.shared_ffn / t, 1, sparse),
        ]
    return out
