"""Bytes that autograd keeps are those of Korthikanti et al. 2022, table 2, plus the statistics of the two LayerNorms."""

from __future__ import annotations

from typing import Any

import pytest

from tests.farm import Farm
from tests.small_runs import ranks, small

pytestmark = pytest.mark.slow

S, B, H, A = 32, 2, 64, 4
STATISTICS = 2 * 2 * 2  # two norms, mean and deviation, 16 bits: bytes per token


def paper(t: int, cut: bool, core: bool) -> float:
    """Bytes per layer with dropout, unfused attention and 16-bit activations; ``core``: the s x s matrices are kept."""
    attention = 5 * A * S / H if core else 0
    return S * B * H * ((34 + attention) / t if cut else 10 + (24 + attention) / t)


CASES = [
    ({}, paper(1, False, True), 1),
    ({"tensor": 2}, paper(2, False, True), 1),
    ({"tensor": 2, "sequence_parallel": True}, paper(2, True, True), 2),
    ({"recompute": "selective"}, paper(1, False, False), 1),
    ({"tensor": 2, "recompute": "selective"}, paper(2, False, False), 1),
    ({"tensor": 2, "sequence_parallel": True, "recompute": "selective"}, paper(2, True, False), 2),
]


@pytest.mark.parametrize("layout, expected, cut", CASES, ids=lambda value: str(value))
def test_saved_bytes_of_a_layer_are_the_papers(farm: Farm, layout: dict[str, Any], expected: float, cut: int) -> None:
    assert bytes_per_layer(farm, layout) == expected + S * B * STATISTICS / cut


@pytest.mark.parametrize(
    "layout, expected",
    [
        ({"recompute": "full"}, 2 * S * B * H),
        ({"recompute": "full", "tensor": 2}, 2 * S * B * H),
        ({"recompute": "full", "tensor": 2, "sequence_parallel": True}, S * B * H),
    ],
    ids=str,
)
def test_full_recomputation_keeps_one_input_per_layer(farm: Farm, layout: dict[str, Any], expected: int) -> None:
    assert bytes_per_layer(farm, layout) == expected


def test_recomputing_every_second_layer_keeps_half_of_both(farm: Farm) -> None:
    assert bytes_per_layer(farm, {"recompute": "full", "recompute_every": 2}) == (
        (2 * S * B * H + paper(1, False, True) + S * B * STATISTICS) / 2
    )


def bytes_per_layer(farm: Farm, layout: dict[str, Any]) -> float:
    """The peak of a deeper model less that of a shallower one. Both end on a layer that is treated alike."""
    return (peak(farm, layout, 4) - peak(farm, layout, 2)) / 2


def peak(farm: Farm, layout: dict[str, Any], layers: int) -> int:
    model = {"layers": layers, "hidden": H, "heads": A, "seq": S, "vocab": 64, "dropout": 0.1, "attention": "unfused"}
    config = small(steps=2, precision="bf16", model=model, run={"global_batch": B}, **{"micro_batch": B} | layout)
    return farm.train(config, ranks(layout)).checked().result["memory"]["activations"]
