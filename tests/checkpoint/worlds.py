"""Training state of imagined ranks, without processes: what each rank of a layout would own of a small model."""

from __future__ import annotations

import itertools
import math
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from trainer.models.layers import Init
from trainer.shared.parallel.shards import Factors, Piece, plan_buckets
from trainer.shared.records.manifest import STATES
from trainer.shared.run.schema import ModelConfig
from trainer.state.parameters import OptimizerShard, ParameterRecord

SHAPES = {"tokens": (5, 4), "qkv": (4, 3, 2, 4), "output": (4, 8), "norm": (4,)}
"""Global shapes. ``tokens`` is cut and padded along dimension 0, as a vocabulary is; of four ranks one has only padding."""
CUT = {"tokens": 0, "qkv": 0, "output": 1, "norm": None}


FACTS = {
    "model": asdict(ModelConfig()),
    "data": {"seed": 1234, "corpus": "synthetic", "global_batch": 8},
    "extra": {"samples": 8, "updates": 1},
}
"""What a manifest says besides its pieces."""


@dataclass(frozen=True)
class World:
    """A layout that matters to checkpoints: tensor ranks, data replicas and their sharding of optimizer states."""

    tensor: int
    factors: Factors
    capacity: int

    @property
    def ranks(self) -> list[tuple[int, int]]:
        return list(itertools.product(range(self.tensor), range(self.factors.data)))


def record(name: str, index: int, size: int) -> ParameterRecord:
    """The record of a parameter on tensor rank ``index`` of ``size``."""
    shape, cut = SHAPES[name], CUT[name]
    box, local = [(0, n) for n in shape], list(shape)
    if cut is not None:
        width = math.ceil(shape[cut] / size)
        start = min(width * index, shape[cut])
        box[cut], local[cut] = (start, min(start + width, shape[cut])), width
    return ParameterRecord(name, shape, tuple(box), tuple(local), Init(), True, primary=cut is not None or index == 0)


def global_state(seed: int) -> dict[str, dict[str, Tensor]]:
    """Made-up weights and moments of the whole model: state -> name -> tensor."""
    generator = torch.Generator().manual_seed(seed)
    return {state: {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()} for state in STATES}


def owned_by(
    world: World, tensor: int, data: int, values: dict[str, dict[str, Tensor]] | None, dtype: torch.dtype = torch.float32
) -> list[OptimizerShard]:
    """What a rank owns, filled from ``values`` (or with ones, which no right reading leaves)."""
    records = {name: record(name, tensor, world.tensor) for name in SHAPES}
    found = []
    for bucket in plan_buckets([(r.name, r.local_numel) for r in records.values()], world.capacity, world.factors.optimizer):
        shard = world.factors.shard("optimizer", data, bucket.numel)
        for piece in bucket.pieces(shard):
            r = records[piece.name]
            parts = [
                _local(r, values[s][r.name])[piece.offset : piece.offset + piece.numel] if values else torch.ones(piece.numel)
                for s in STATES
            ]
            saves = r.primary and data // world.factors.optimizer == 0
            found.append(
                OptimizerShard(
                    r,
                    piece.offset,
                    piece.numel,
                    gradient=torch.zeros(piece.numel),
                    saves=saves,
                    **{state: part.to(dtype, copy=True) for state, part in zip(STATES, parts)},
                )
            )
    return found


def _part(r: ParameterRecord, value: Tensor, piece: Piece) -> Tensor:
    return _local(r, value)[piece.offset : piece.offset + piece.numel]


def _local(r: ParameterRecord, value: Tensor) -> Tensor:
    """The flattened local tensor of a rank: its region, padded with zeros."""
    local = torch.zeros(r.local_shape, dtype=value.dtype)
    local[tuple(slice(0, n) for n in r.region_shape)] = value[tuple(slice(*side) for side in r.region)]
    return local.flatten()


def assert_holds(owned: list[OptimizerShard], values: dict[str, dict[str, Tensor]]) -> None:
    """Every real element that the rank owns is the global one, bit for bit."""
    for o in owned:
        real = max(0, min(math.prod(o.record.region_shape) - o.offset, o.numel))
        for state in STATES:
            expected = _local(o.record, values[state][o.record.name])[o.offset : o.offset + real]
            assert torch.equal(getattr(o, state)[:real], expected), (o.record.name, state)
