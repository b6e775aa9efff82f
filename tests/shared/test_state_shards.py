"""Sharding factors and buckets: every element owned as often as it should be, every parameter found again."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.shared.parallel.shards import ALIGNMENT, Bucket, Factors, plan_buckets
from trainer.shared.run.schema import LayoutConfig, ShardingConfig

factors = st.tuples(*(st.integers(1, 3) for _ in range(4))).map(lambda ratios: Factors(*itertools.accumulate(ratios, int.__mul__)))
sizes = st.lists(st.integers(1, 400), min_size=1, max_size=12).map(lambda numbers: [(f"p{i}", n) for i, n in enumerate(numbers)])
states = st.sampled_from(["params", "grads", "optimizer"])


@given(factors, states)
def test_every_element_is_owned_once_in_each_set_of_replicas(f: Factors, state: str) -> None:
    numel = 6 * f.optimizer
    owners = Counter(element for i in range(f.data) for element in f.shard(state, i, numel))
    assert set(owners.values()) == {f.data // getattr(f, state)} and len(owners) == numel


@given(factors, st.data())
def test_a_shard_lies_inside_the_shard_of_the_level_before(f: Factors, data: st.DataObject) -> None:
    i, numel = data.draw(st.integers(0, f.data - 1)), 4 * f.optimizer
    params, grads, optimizer = (set(f.shard(state, i, numel)) for state in ("params", "grads", "optimizer"))
    assert optimizer <= grads <= params


@given(factors, st.data())
def test_a_levels_group_cuts_the_shard_of_the_level_before_in_order(f: Factors, data: st.DataObject) -> None:
    """What reduce-scatter needs: member k of the group gets piece k."""
    i, numel = data.draw(st.integers(0, f.data - 1)), 4 * f.optimizer
    before = range(numel)
    for state, level in zip(("params", "grads", "optimizer"), f.levels):
        first = i - level.digit(i) * level.stride
        group = [first + k * level.stride for k in range(level.size)]
        pieces = [f.shard(state, member, numel) for member in group]
        assert list(itertools.chain(*pieces)) == list(before)
        before = f.shard(state, i, numel)


def test_the_known_schemes_are_points_of_the_space() -> None:
    def sizes_of(params: int, grads: int, optimizer: int) -> list[int]:
        layout = LayoutConfig(data=8, sharding=ShardingConfig(params, grads, optimizer))
        return [level.size for level in Factors.of(layout).levels]

    assert sizes_of(1, 1, 1) == [1, 1, 1, 8]  # plain data parallel: one all-reduce
    assert sizes_of(1, 1, 8) == [1, 1, 8, 1]  # ZeRO-1: one reduce-scatter, one all-gather
    assert sizes_of(1, 8, 8) == [1, 8, 1, 1]  # ZeRO-2
    assert sizes_of(8, 8, 8) == [8, 1, 1, 1]  # ZeRO-3
    assert sizes_of(4, 4, 4) == [4, 1, 1, 2]  # HSDP / MiCS


@given(sizes, st.integers(1, 600), st.integers(1, 6))
def test_buckets_hold_every_parameter_once_in_the_given_order(named: list[tuple[str, int]], capacity: int, shards: int) -> None:
    buckets = plan_buckets(named, capacity, shards)
    assert [(s.name, s.stop - s.start) for b in buckets for s in b.slots] == named
    for bucket in buckets:
        assert bucket.numel % (shards * ALIGNMENT) == 0
        assert all(slot.start % ALIGNMENT == 0 for slot in bucket.slots)
        assert all(a.stop <= b.start for a, b in itertools.pairwise(bucket.slots)) and bucket.slots[-1].stop <= bucket.numel


@given(sizes, st.integers(1, 600))
def test_a_bucket_is_closed_by_the_parameter_that_fills_it(named: list[tuple[str, int]], capacity: int) -> None:
    *full, last = plan_buckets(named, capacity, 1)
    for bucket in full:
        numbers = [slot.stop - slot.start for slot in bucket.slots]
        assert sum(numbers) >= capacity > sum(numbers[:-1])
    assert sum(slot.stop - slot.start for slot in last.slots[:-1]) < capacity


@given(sizes, st.integers(1, 600), st.integers(2, 6))
def test_the_pieces_of_all_shards_are_every_parameter_whole(named: list[tuple[str, int]], capacity: int, shards: int) -> None:
    f = Factors(1, 1, shards, shards)
    found: dict[str, list[tuple[int, int]]] = {name: [] for name, _ in named}
    for bucket in plan_buckets(named, capacity, shards):
        for i in range(shards):
            owned = f.shard("optimizer", i, bucket.numel)
            end = 0
            for piece in bucket.pieces(owned):
                assert end <= piece.position and piece.position + piece.numel <= len(owned)
                end = piece.position + piece.numel
                found[piece.name].append((piece.offset, piece.offset + piece.numel))
    for name, numel in named:
        spans = sorted(found[name])
        assert spans[0][0] == 0 and spans[-1][1] == numel
        assert all(a[1] == b[0] for a, b in itertools.pairwise(spans))


def test_a_piece_says_where_it_is_in_parameter_and_range() -> None:
    (bucket,) = plan_buckets([("a", 100), ("b", 50)], capacity=150, shards=2)
    assert bucket.numel == 256 and bucket.slots[1].start == 128
    tail = bucket.pieces(range(64, 192))
    assert [(p.name, p.offset, p.position, p.numel) for p in tail] == [("a", 64, 0, 36), ("b", 0, 64, 50)]


def test_a_tied_parameter_gets_a_bucket_that_is_cut_alike_on_every_stage() -> None:
    first = plan_buckets([("x", 10), ("tied", 640), ("y", 10)], capacity=10_000, shards=4, alone={"tied"})
    last = plan_buckets([("tied", 640), ("z", 99)], capacity=10_000, shards=4, alone={"tied"})
    assert [[s.name for s in b.slots] for b in first] == [["x"], ["tied"], ["y"]]
    assert first[1] == last[0] and isinstance(last[0], Bucket)


def test_factors_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="must divide the next"):
        Factors(1, 2, 3, 6)
    with pytest.raises(ValueError, match="cannot be cut in 4 equal shards"):
        Factors(1, 4, 4, 4).shard("grads", 0, 6)
