"""Sharding factors: all that are allowed, and those at which the cost of a collective changes."""

from __future__ import annotations

import pytest

from launcher.planning.sharding_chains import node_levels, sharding_chains


@pytest.mark.parametrize("data", [1, 2, 6, 12, 64])
def test_chains_are_all_and_only_the_allowed_factors(data: int) -> None:
    allowed = {
        (p, g, o)
        for p in range(1, data + 1)
        for g in range(1, data + 1)
        for o in range(1, data + 1)
        if data % o == 0 and o % g == 0 and g % p == 0
    }
    chains = sharding_chains(data)
    assert set(chains) == allowed and len(chains) == len(allowed)


def test_levels_are_one_the_node_and_all() -> None:
    assert node_levels(64, 8) == [1, 8, 64] and node_levels(4, 8) == [1, 4] and node_levels(6, 4) == [1, 2, 6] and node_levels(1, 8) == [1]
