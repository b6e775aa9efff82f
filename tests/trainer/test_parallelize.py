"""A parameter is cut as the class of its layer declares, whatever the layer is called."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from trainer.comm.clock import Clock
from trainer.comm.collectives import Group, Ledger
from trainer.models.layers import Linear, RMSNorm, TokenEmbedding
from trainer.models.tuned import LowRankLinear, VectorScale
from trainer.shared.parallel.placement import Partial, Replicate, Shard
from trainer.shared.run.schema import TuneConfig
from trainer.state.parameters import ParameterRecord
from trainer.tensor.dropout import Noise
from trainer.tensor.layers import ColumnLinear, RowLinear, VocabularyEmbedding
from trainer.tensor.parallelize import Parallelizer
from trainer.tensor.region import Region


def layers() -> dict[str, nn.Module]:
    """Returns layers under names that the model has for other ones."""
    return {
        "attention.qkv": VectorScale((6,)),
        "mlp.down": Linear(8, (2, 6), 0.1, cut=Shard(1)),
        "mlp.up": Linear(8, (5,), 0.1, cut=Shard(1)),
        "head.output": RMSNorm(8, 1e-5),
        "any": Linear(8, (6,), 0.1),
        "embedding.tokens": LowRankLinear(Linear(8, (6,), 0.1, cut=Shard(0)), TuneConfig(method="lora", rank=3)),
        "other": TokenEmbedding(10, 8, 0.1),
    }


class Renamed(nn.Module):
    """A model of one unit that holds ``layers``."""

    def __init__(self) -> None:
        super().__init__()
        self.unit = nn.Module()
        for path, layer in layers().items():
            parent: nn.Module = self.unit
            *folders, leaf = path.split(".")
            for folder in folders:
                if not hasattr(parent, folder):
                    parent.add_module(folder, nn.Module())
                parent = parent.get_submodule(folder)
            parent.add_module(leaf, layer)

    def units(self) -> Iterator[tuple[str, nn.Module]]:
        yield "unit", self.unit


def parallel(sequence_sharded: bool) -> tuple[nn.Module, dict[str, ParameterRecord]]:
    """The model on the second of two tensor ranks, and its records."""
    ledger = Ledger(Clock(torch.device("cpu")))
    axes = {"tensor": Group("tensor", (0, 1), 1, ledger), "tied": Group("tied", (1,), 1, ledger)}
    gradients: Any = None
    region = Region(axes["tensor"], sequence_sharded, Group("context", (1,), 1, ledger))
    parallelizer = Parallelizer(axes, region, gradients, Noise(0), torch.float32, torch.device("cpu"))
    model: Any = Renamed()
    found = {member.record.name.removeprefix("unit."): member.record for member in parallelizer.apply(model)}
    return model.unit, found


@pytest.mark.parametrize("sequence_sharded", [False, True])
def test_a_layer_is_cut_as_its_class_declares_whatever_its_name_is(sequence_sharded: bool) -> None:
    unit, records = parallel(sequence_sharded)
    assert {name: record.local_shape for name, record in records.items()} == {
        "attention.qkv.weight": (3,),
        "mlp.down.weight": (2, 3, 8),
        "mlp.down.bias": (2, 3),
        "mlp.up.weight": (5, 4),
        "mlp.up.bias": (5,),
        "head.output.weight": (8,),
        "any.weight": (6, 8),
        "any.bias": (6,),
        "embedding.tokens.weight": (3, 8),
        "embedding.tokens.bias": (3,),
        "embedding.tokens.lora_a": (3, 8),
        "embedding.tokens.lora_b": (3, 3),
        "other.weight": (5, 8),
    }
    forms = {"mlp.down": ColumnLinear, "mlp.up": RowLinear, "embedding.tokens": ColumnLinear, "other": VocabularyEmbedding}
    assert {path: type(unit.get_submodule(path)) for path in forms} == forms
    repeated = {name for name, record in records.items() if not isinstance(record.placement["tensor"], Shard)}
    assert repeated == {"mlp.up.bias", "head.output.weight", "any.weight", "any.bias", "embedding.tokens.lora_a"}
    assert {name for name, record in records.items() if not record.primary} == repeated, "the first rank counts them"
    partial = {name for name in repeated if records[name].placement["tensor"] == Partial()}
    assert partial == (repeated if sequence_sharded else {"embedding.tokens.lora_a"})
    assert all(record.placement["data"] == Replicate() for record in records.values())
