"""Blocks per pipeline chunk."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.shared.parallel.balance import blocks_per_chunk, by_cost, by_weights, head_weight
from trainer.shared.parallel.schedule import build
from trainer.shared.parallel.simulate import Times, makespan, simulate
from trainer.shared.run.derived import resolve_model
from trainer.shared.run.flops import block_flops, head_flops
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


@given(st.lists(st.sampled_from([1.0, 2.5, 0.3]), min_size=1, max_size=8), st.integers(1, 4), st.floats(0, 6))
def test_no_split_of_blocks_of_any_weights_has_a_lighter_heaviest_chunk(weights: list[float], chunks: int, head: float) -> None:
    chunks = min(chunks, len(weights))
    split = by_weights(tuple(weights), chunks, head)
    every = [c for c in itertools.product(range(len(weights) + 1), repeat=chunks) if sum(c) == len(weights) and min([*c[:-1], 1]) > 0]
    assert sum(split) == len(weights) and len(split) == chunks and min([*split[:-1], 1]) > 0
    assert heaviest(weights, split, head) == pytest.approx(min(heaviest(weights, c, head) for c in every))


def heaviest(weights: Sequence[float], split: Sequence[int], head: float) -> float:
    ends = [0, *itertools.accumulate(split)]
    loads = [sum(weights[start:stop]) for start, stop in itertools.pairwise(ends)]
    return max([*loads[:-1], loads[-1] + head])


@pytest.mark.parametrize(("stages", "gain"), [(2, 1.25), (4, 1.2), (8, 1.05)])
def test_stages_of_an_encoder_and_its_decoder_are_a_fifth_faster_cut_by_cost_than_half_and_half(stages: int, gain: float) -> None:
    """T5 3B, 512 tokens read and 128 written: a decoder's block is half as much work. Simulated 1F1B of 16 micro-batches."""
    model = resolve_model(
        ModelConfig(family="t5", layers=48, hidden=2048, heads=32, head_width=64, ffn=5120, vocab=29184, seq=512, decoder_seq=128)
    )
    steps = []
    for balance in ("equal", "cost"):
        ends = [0, *itertools.accumulate(blocks_per_chunk(model, LayoutConfig(pipeline=stages, balance=balance)))]
        work = [sum(block_flops(model, i) for i in range(start, stop)) for start, stop in itertools.pairwise(ends)]
        work[-1] += head_flops(model)
        steps.append(makespan(simulate(build("1f1b", stages, 1, 16), Times(forward=work, backward=[2 * w for w in work]))))
    assert steps[0] / steps[1] > gain


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
