"""The process groups that a layout needs, made once from the mesh of ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from trainer.comm.collectives import Group, World
from trainer.shared.parallel.mesh import Mesh
from trainer.shared.parallel.placement import FOLDED
from trainer.shared.parallel.shards import Factors
from trainer.shared.run.schema import LayoutConfig


@dataclass(frozen=True)
class Groups:
    """This rank's groups. Pipeline neighbours have one group per direction, so that tensors in each keep their order."""

    at: Mapping[str, int]  # its coordinate on each axis
    world: Group
    tensor: Group
    context: Group
    up: Group  # pipeline ranks, for sends to a higher one
    down: Group  # the same ranks, for sends to a lower one
    levels: dict[str, Group]  # params, grads, optimizer, replicas: the levels of the ranks that have the same parameters
    shared_at: int  # this rank among those: context and data ranks (trainer.shared.parallel.shards)
    expert: Group  # ranks that have different experts, among those of tensor, context and data
    expert_tensor: Group  # ranks that have parts of the same experts
    expert_levels: dict[str, Group]  # the levels of the ranks that have the same parameters of experts; none in a dense model
    experts_at: int  # this rank among those
    sharers: Mapping[str, Group]  # ranks that have parts of the same matrices, by the axis over which those are repeated; else this rank
    tied: Group  # first and last pipeline rank if both hold the embedding's weight; else only this rank

    @property
    def axes(self) -> dict[str, Group]:
        """By the axes that placements of parameters name, other than data."""
        return {"tensor": self.tensor, "tied": self.tied, "expert": self.expert, "expert_tensor": self.expert_tensor}

    @classmethod
    def make(cls, world: World, layout: LayoutConfig, tied: bool, mixes: bool, exchanges: bool) -> Groups:
        """All groups, made in the same order on every rank. ``mixes``: the model has experts; ``exchanges``: matrices are put together."""
        mesh, levels = Mesh.of(layout), {level.name: level.size for level in Factors.of(layout).levels}
        by_level = mesh.refactor(("context", "data"), levels)
        folded = _folded(mesh, layout) if mixes else mesh
        pipeline = mesh.group(world.rank, "pipeline")
        up, down = (world.make_group(f"pipeline {way}", pipeline) for way in ("up", "down"))
        last = len(pipeline) - 1
        up.connect([(i, i + 1) for i in range(last)] + [(0, last)] * (last > 1))  # with interleaving, the two ends are neighbours too
        down.connect([(i + 1, i) for i in range(last)] + [(last, 0)] * (last > 1))
        cuts = [name for name in levels if name != "replicas"]
        sharers = {"data": by_level.group(world.rank, "tensor", *cuts)}
        sharers |= {FOLDED: folded.group(world.rank, "expert_tensor", *cuts)} if mixes else {}
        ends = [pipeline[0], pipeline[-1]] if tied and world.rank in (pipeline[0], pipeline[-1]) else [world.rank]
        return cls(
            at=mesh.coordinates(world.rank),
            world=world.group,
            tensor=world.make_group("tensor", mesh.group(world.rank, "tensor")),
            context=world.make_group("context", mesh.group(world.rank, "context")),
            up=up,
            down=down,
            levels={name: world.make_group(f"data {name}", by_level.group(world.rank, name)) for name in levels},
            shared_at=_index(world.rank, by_level, Factors.of(layout)),
            expert=world.make_group("expert", folded.group(world.rank, "expert") if mixes else [world.rank]),
            expert_tensor=world.make_group("expert tensor", folded.group(world.rank, "expert_tensor") if mixes else [world.rank]),
            expert_levels={n: world.make_group(f"{FOLDED} {n}", folded.group(world.rank, n)) for n in levels} if mixes else {},
            experts_at=_index(world.rank, folded, Factors.of_experts(layout)) if mixes else 0,
            sharers={axis: world.make_group(f"sharers {axis}", found if exchanges else [world.rank]) for axis, found in sharers.items()},
            tied=world.make_group("tied", sorted(set(ends))),
        )


def _folded(mesh: Mesh, layout: LayoutConfig) -> Mesh:
    """Returns the mesh in which tensor, context and data ranks have parts of an expert, the nearest first, then other experts, and the
    levels of those that have the same, replicas before tensor ranks."""
    beside = layout.tensor // math.gcd(layout.expert_tensor * layout.expert, layout.tensor)
    factors = Factors.of_experts(layout)
    parts = {"expert_tensor": layout.expert_tensor, "expert": layout.expert, "beside": beside, "beyond": factors.data // beside}
    levels = {level.name: level.size for level in factors.levels}
    return mesh.refactor(("tensor", "context", "data"), parts).refactor(("beyond", "beside"), levels)


def _index(rank: int, mesh: Mesh, factors: Factors) -> int:
    """Returns the index of a rank among those that have the same parameters: its digits are those of the levels, axes of the mesh."""
    return sum(mesh[level.name].coordinate(rank) * level.stride for level in factors.levels)
