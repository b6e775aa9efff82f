"""The mesh of ranks: coordinates, groups, and the same ranks factorised anew (sharding levels, experts)."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.shared.parallel.mesh import Mesh
from trainer.shared.parallel.shards import Factors
from trainer.shared.run.schema import LayoutConfig

NAMES = ("tensor", "context", "data", "pipeline", "spare")
degrees = st.permutations(NAMES).flatmap(
    lambda names: st.fixed_dictionaries({name: st.integers(1, 3) for name in names[: len(names) - 1]}, optional={})
)


@given(degrees)
def test_coordinates_and_ranks_are_inverse(given_degrees: dict[str, int]) -> None:
    mesh = Mesh.make(given_degrees)
    seen = {tuple(mesh.coordinates(rank).items()) for rank in range(mesh.world_size)}
    assert len(seen) == mesh.world_size == math.prod(given_degrees.values())
    assert all(mesh.rank(**mesh.coordinates(rank)) == rank for rank in range(mesh.world_size))


@given(degrees, st.data())
def test_groups_part_the_world_and_agree_with_each_member(given_degrees: dict[str, int], data: st.DataObject) -> None:
    mesh = Mesh.make(given_degrees)
    along = data.draw(st.sets(st.sampled_from(sorted(given_degrees)), min_size=1))
    groups = mesh.groups(*along)
    assert sorted(itertools.chain(*groups)) == list(range(mesh.world_size))
    for group in groups:
        assert all(mesh.group(rank, *along) == group for rank in group)
        assert group == sorted(group) and len(group) == math.prod(given_degrees[name] for name in along)
        fixed = [{name: at for name, at in mesh.coordinates(rank).items() if name not in along} for rank in group]
        assert all(at == fixed[0] for at in fixed)


@given(degrees, st.integers(0, 4))
def test_an_axis_more_multiplies_the_ranks_and_leaves_every_group_within_its_coordinate(added: dict[str, int], where: int) -> None:
    """A second world of the same layout: what any other axis groups lies wholly inside one coordinate of the new one."""
    items = list(added.items())
    mesh = Mesh.make(dict([*items[:where], ("worlds", 2), *items[where:]]))
    assert mesh.world_size == 2 * math.prod(added.values())
    for group in mesh.groups(*added):
        assert len({mesh.coordinates(rank)["worlds"] for rank in group}) == 1
    alone = Mesh.make(added)
    for name in added:
        sizes = sorted(len(group) for group in mesh.groups(name))
        assert sizes == sorted(2 * [len(group) for group in alone.groups(name)])


def test_tensor_ranks_are_neighbours_and_the_order_decides_who_comes_next() -> None:
    near_data = Mesh.of(LayoutConfig(tensor=2, pipeline=2, data=2, order="tensor-data-pipeline"))
    near_stages = Mesh.of(LayoutConfig(tensor=2, pipeline=2, data=2, order="tensor-pipeline-data"))
    assert near_data.groups("tensor") == near_stages.groups("tensor") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert near_data.group(0, "data") == [0, 2] and near_data.group(0, "pipeline") == [0, 4]
    assert near_stages.group(0, "data") == [0, 4] and near_stages.group(0, "pipeline") == [0, 2]


def test_context_ranks_stand_inside_a_replica() -> None:
    mesh = Mesh.of(LayoutConfig(tensor=2, context=2, data=2, pipeline=2, order="tensor-pipeline-data"))
    assert [axis.name for axis in mesh.axes] == ["tensor", "context", "pipeline", "data"]
    assert mesh.group(0, "context") == [0, 2] and mesh.group(0, "context", "data") == [0, 2, 8, 10]


@given(st.data())
def test_the_groups_of_all_sharding_levels_together_span_the_data_axis(data: st.DataObject) -> None:
    ratios = data.draw(st.tuples(*(st.integers(1, 3) for _ in range(4))))
    params, grads, optimizer, replicas = itertools.accumulate(ratios, int.__mul__)
    mesh = Mesh.make({"tensor": data.draw(st.integers(1, 2)), "data": replicas, "pipeline": data.draw(st.integers(1, 2))})
    levels = Factors(params, grads, optimizer, replicas).levels
    by_level = mesh.refactor(["data"], {level.name: level.size for level in levels})
    rank = data.draw(st.integers(0, mesh.world_size - 1))
    reached = {rank}
    for level in levels:
        assert sorted(itertools.chain(*by_level.groups(level.name))) == list(range(mesh.world_size))
        group = by_level.group(rank, level.name)
        assert group.index(rank) == level.digit(mesh.coordinates(rank)["data"])
        reached = {member for r in reached for member in by_level.group(r, level.name)}
    assert sorted(reached) == mesh.group(rank, "data")


def test_parameter_shards_stay_among_neighbouring_replicas() -> None:
    by_level = Mesh.make({"data": 8}).refactor(["data"], {"params": 2, "grads": 2, "optimizer": 2})
    assert by_level.group(5, "params") == [4, 5]
    assert by_level.group(5, "grads") == [5, 7]


def test_states_can_be_sharded_over_context_and_data_ranks_as_one_axis() -> None:
    mesh = Mesh.make({"tensor": 2, "context": 2, "pipeline": 2, "data": 3})
    by_level = mesh.refactor(["context", "data"], {"params": 2, "replicas": 3})
    assert by_level.group(0, "params") == mesh.group(0, "context")
    assert by_level.group(0, "params", "replicas") == mesh.group(0, "context", "data")


@pytest.mark.parametrize("expert_tensor", [1, 2])
def test_experts_fold_tensor_context_and_data_ranks(expert_tensor: int) -> None:
    """Parallel folding (arXiv 2504.14960): the expert group is a run of neighbours over tensor and context ranks, whatever the pipeline
    stands between, and the ranks that hold the same experts differ in the rest."""
    mesh = Mesh.make({"tensor": 2, "context": 2, "pipeline": 2, "data": 4})
    folded = mesh.refactor(["tensor", "context", "data"], {"expert_tensor": expert_tensor, "expert": 4, "expert_data": 4 // expert_tensor})
    assert folded.world_size == mesh.world_size
    assert folded.groups("pipeline") == mesh.groups("pipeline")
    assert folded.group(0, "expert_tensor", "expert", "expert_data") == mesh.group(0, "tensor", "context", "data")
    assert folded.group(0, "expert") == ([0, 1, 2, 3] if expert_tensor == 1 else [0, 2, 8, 10])
    assert folded.group(0, "expert_tensor") == list(range(expert_tensor))


def test_ranks_and_degrees_outside_the_mesh_are_refused_by_name() -> None:
    mesh = Mesh.make({"tensor": 2, "data": 2, "pipeline": 2})
    with pytest.raises(ValueError, match="rank 8 is not in a mesh of 8 ranks"):
        mesh.coordinates(8)
    with pytest.raises(ValueError, match="outside a mesh"):
        mesh.rank(data=2)
    with pytest.raises(ValueError, match="a degree of 3 does not divide 2 ranks"):
        mesh.refactor(["data"], {"params": 3})
    with pytest.raises(ValueError, match="do not multiply"):
        mesh.refactor(["data"], {"params": 1})
    with pytest.raises(ValueError, match="positive degrees"):
        Mesh.make({"tensor": 2, "data": 0})


def test_the_picture_shows_every_rank_at_its_stage_replica_and_node() -> None:
    mesh = Mesh.of(LayoutConfig(tensor=2, data=2, pipeline=2))
    assert mesh.picture(ranks_per_node=4).splitlines() == [
        "8 ranks: tensor 2, data 2, pipeline 2 (fastest first)",
        "        stage 0  stage 1",
        "data 0  [0 1]@0  [4 5]@1",
        "data 1  [2 3]@0  [6 7]@1",
    ]
    assert "@0-1" in Mesh.of(LayoutConfig(tensor=4, data=1)).picture(ranks_per_node=2)
