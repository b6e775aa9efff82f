"""All parameters in full, of what the ranks of a small model have."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from trainer.build import Rank

Saved = tuple[str, tuple[int, ...], Any, tuple[int, ...], int, Tensor]
"""Part of a parameter: its name and shape; the region of it that is this rank's, its shape here; where in that the part begins; values."""


def parts(rank: Rank) -> list[Saved]:
    """What this rank has of the parameters, frozen ones too, less what another rank has as well."""
    rank.state.settle()
    return [
        (p.record.name, p.record.shape, p.record.region, p.record.local_shape, p.offset, p.weight.cpu()) for p in rank.shards if p.saves
    ]


def joined(ranks: Iterable[list[Saved]]) -> dict[str, Tensor]:
    """All parameters in full, of the ``parts`` of all ranks."""
    whole: dict[str, Tensor] = {}
    flats: dict[tuple, Tensor] = {}
    for name, shape, region, local_shape, offset, values in itertools.chain.from_iterable(ranks):
        flat = flats.setdefault((name, shape, region), values.new_zeros(local_shape).flatten())
        flat[offset : offset + len(values)] = values
        target = whole.setdefault(name, values.new_zeros(shape))
        size = tuple(slice(0, stop - start) for start, stop in region)
        target[tuple(slice(start, stop) for start, stop in region)] = flat.view(local_shape)[size]
    return whole


def parameters(rank: Rank) -> dict[str, Tensor]:
    """All parameters in full, on every rank: for small models. Collective."""
    return joined(rank.groups.world.gather_objects(parts(rank)))
