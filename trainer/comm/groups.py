"""The process groups that a layout needs, made once from the rank grid."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.comm.collectives import Group, World
from trainer.shared.parallel.grid import Coordinates, Grid
from trainer.shared.parallel.shards import Factors
from trainer.shared.run.schema import LayoutConfig


@dataclass(frozen=True)
class Groups:
    """This rank's groups. Pipeline neighbours have one group per direction, so that tensors in each keep their order."""

    at: Coordinates
    world: Group
    tensor: Group
    up: Group  # pipeline ranks, for sends to a higher one
    down: Group  # the same ranks, for sends to a lower one
    levels: dict[str, Group]  # params, grads, optimizer, replicas: the levels of the data axis (trainer.shared.parallel.shards)
    tied: Group  # first and last pipeline rank if both hold the embedding's weight; else only this rank

    @classmethod
    def make(cls, world: World, layout: LayoutConfig, tied: bool) -> Groups:
        """All groups, made in the same order on every rank."""
        grid, factors = Grid.of(layout), Factors.of(layout)
        at = grid.coordinates(world.rank)
        pipeline = grid.group(world.rank, "pipeline")
        up, down = (world.make_group(f"pipeline {way}", pipeline) for way in ("up", "down"))
        last = len(pipeline) - 1
        up.connect([(i, i + 1) for i in range(last)] + [(0, last)] * (last > 1))  # with interleaving, the two ends are neighbours too
        down.connect([(i + 1, i) for i in range(last)] + [(last, 0)] * (last > 1))
        ends = [pipeline[0], pipeline[-1]] if tied and world.rank in (pipeline[0], pipeline[-1]) else [world.rank]
        return cls(
            at=at,
            world=world.group,
            tensor=world.make_group("tensor", grid.group(world.rank, "tensor")),
            up=up,
            down=down,
            levels={
                level.name: world.make_group(f"data {level.name}", grid.level_group(world.rank, level.size, level.stride))
                for level in factors.levels
            },
            tied=world.make_group("tied", sorted(set(ends))),
        )
