"""The {params, grads, optimizer} sharding factors that a data-parallel degree allows (AMSP, Chen et al. 2023, arXiv 2311.00257, section
III)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from trainer.shared.run.errors import divisors


def sharding_chains(data: int, factors: Sequence[int] | None = None) -> list[tuple[int, int, int]]:
    """Returns (params, grads, optimizer) with params | grads | optimizer | data, from all divisors of ``data`` or from ``factors``."""
    allowed = factors or divisors(data)
    return [(p, g, o) for o in allowed for g in allowed if o % g == 0 for p in allowed if g % p == 0]


def node_levels(data: int, replicas_in_node: int) -> list[int]:
    """Returns 1, the replicas of one node, all replicas: a collective's cost per byte changes only at the node's boundary."""
    return sorted({1, math.gcd(data, replicas_in_node), data})
