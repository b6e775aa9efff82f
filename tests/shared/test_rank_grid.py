"""The rank grid: coordinates, groups, sharding levels."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.shared.parallel.grid import Grid
from trainer.shared.parallel.shards import Factors
from trainer.shared.run.schema import LayoutConfig

grids = st.builds(
    Grid, *(st.integers(1, 4) for _ in range(3)), st.sampled_from([("tensor", "data", "pipeline"), ("tensor", "pipeline", "data")])
)
axes = st.sets(st.sampled_from(["tensor", "data", "pipeline"]), min_size=1)


@given(grids)
def test_coordinates_and_ranks_are_inverse(grid: Grid) -> None:
    seen = set()
    for rank in range(grid.world_size):
        at = grid.coordinates(rank)
        assert grid.rank(at.tensor, at.data, at.pipeline) == rank
        seen.add(at)
    assert len(seen) == grid.world_size


@given(grids, axes)
def test_groups_part_the_world_and_agree_with_each_member(grid: Grid, along: set[str]) -> None:
    groups = grid.groups(*along)
    assert sorted(itertools.chain(*groups)) == list(range(grid.world_size))
    for group in groups:
        assert all(grid.group(rank, *along) == group for rank in group)
        assert group == sorted(group)


def test_tensor_ranks_are_neighbours_and_the_order_decides_who_comes_next() -> None:
    near_data = Grid.of(LayoutConfig(tensor=2, pipeline=2, data=2, order="tensor-data-pipeline"))
    near_stages = Grid.of(LayoutConfig(tensor=2, pipeline=2, data=2, order="tensor-pipeline-data"))
    assert near_data.groups("tensor") == near_stages.groups("tensor") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert near_data.group(0, "data") == [0, 2] and near_data.group(0, "pipeline") == [0, 4]
    assert near_stages.group(0, "data") == [0, 4] and near_stages.group(0, "pipeline") == [0, 2]


@given(st.data())
def test_the_groups_of_all_sharding_levels_together_span_the_data_axis(data: st.DataObject) -> None:
    ratios = data.draw(st.tuples(*(st.integers(1, 3) for _ in range(4))))
    params, grads, optimizer, replicas = itertools.accumulate(ratios, int.__mul__)
    grid = Grid(data.draw(st.integers(1, 2)), replicas, data.draw(st.integers(1, 2)))
    levels = Factors(params, grads, optimizer, replicas).levels
    rank = data.draw(st.integers(0, grid.world_size - 1))
    reached = {rank}
    for level in levels:
        assert sorted(itertools.chain(*grid.level_groups(level.size, level.stride))) == list(range(grid.world_size))
        group = grid.level_group(rank, level.size, level.stride)
        assert group.index(rank) == level.digit(grid.coordinates(rank).data)
        reached = {member for r in reached for member in grid.level_group(r, level.size, level.stride)}
    assert sorted(reached) == grid.group(rank, "data")


def test_parameter_shards_stay_among_neighbouring_replicas() -> None:
    grid = Grid(tensor=1, data=8, pipeline=1)
    params, grads, _, _ = Factors(2, 4, 8, 8).levels
    assert grid.level_group(5, params.size, params.stride) == [4, 5]
    assert grid.level_group(5, grads.size, grads.stride) == [5, 7]


def test_what_lies_outside_the_grid_is_refused_by_name() -> None:
    grid = Grid(2, 2, 2)
    with pytest.raises(ValueError, match="rank 8 is not in a grid of 8 ranks"):
        grid.coordinates(8)
    with pytest.raises(ValueError, match="outside a grid"):
        grid.rank(data=2)
    with pytest.raises(ValueError, match="does not divide data=2"):
        grid.level_group(0, size=3, stride=1)
    with pytest.raises(ValueError, match="positive sizes"):
        Grid(2, 0, 2)


def test_the_picture_shows_every_rank_at_its_stage_replica_and_node() -> None:
    assert Grid(tensor=2, data=2, pipeline=2).picture(ranks_per_node=4).splitlines() == [
        "8 ranks: tensor 2, data 2, pipeline 2 (fastest first)",
        "        stage 0  stage 1",
        "data 0  [0 1]@0  [4 5]@1",
        "data 1  [2 3]@0  [6 7]@1",
    ]
    assert "@0-1" in Grid(tensor=4, data=1, pipeline=1).picture(ranks_per_node=2)
