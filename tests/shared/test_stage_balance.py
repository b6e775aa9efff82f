"""Blocks per pipeline chunk."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.shared.parallel.balance import blocks_per_chunk, by_cost, head_weight
from trainer.shared.run.schema import LayoutConfig, ModelConfig


@given(st.integers(1, 9), st.integers(1, 5), st.floats(0, 12))
def test_no_contiguous_split_has_a_lighter_heaviest_chunk(layers: int, chunks: int, head: float) -> None:
    chunks = min(chunks, layers)
    split = by_cost(layers, chunks, head)
    every = [c for c in itertools.product(range(layers + 1), repeat=chunks) if sum(c) == layers]
    best = min(max([*c[:-1], c[-1] + head]) for c in every)
    assert sum(split) == layers and len(split) == chunks
    assert max([*split[:-1], split[-1] + head]) == pytest.approx(best)


@given(st.integers(1, 60), st.integers(1, 12), st.floats(0, 30))
def test_only_the_last_chunk_differs_by_more_than_one_block_and_larger_ones_come_later(layers: int, chunks: int, head: float) -> None:
    *others, last = by_cost(layers, min(chunks, layers), head)
    assert others == sorted(others) and (not others or max(others) - min(others) <= 1)
    assert not others or last <= max(others) + 1


def test_a_head_that_outweighs_the_blocks_gets_a_chunk_to_itself() -> None:
    model = ModelConfig(layers=4, hidden=256, vocab=50304)
    assert head_weight(model) == pytest.approx(16.375)
    assert blocks_per_chunk(model, LayoutConfig(pipeline=2, balance="cost")) == [4, 0]


def test_a_head_worth_one_block_takes_the_place_of_one() -> None:
    model = ModelConfig(layers=31, hidden=4096, vocab=50304)
    assert blocks_per_chunk(model, LayoutConfig(pipeline=4, balance="cost")) == [8, 8, 8, 7]


def test_the_given_split_wins_and_equal_means_equal() -> None:
    model = ModelConfig(layers=8)
    assert blocks_per_chunk(model, LayoutConfig(pipeline=2, stage_layers=[5, 3], balance="cost")) == [5, 3]
    assert blocks_per_chunk(model, LayoutConfig(pipeline=2, virtual_pipeline=2)) == [2, 2, 2, 2]
    with pytest.raises(ValueError, match="3 chunks do not divide 8 blocks"):
        blocks_per_chunk(model, LayoutConfig(pipeline=3))
