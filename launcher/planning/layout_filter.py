"""Hydra's sweeps over layout keys (``layout.tensor=1,2,4``) as columns and codes of a table of layouts. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from launcher.config.search import SpaceConfig
from launcher.cost.inputs.layouts import FACTORS, LAYOUT_DTYPE, SHARDED, WORDS, to_table
from launcher.planning.layout_names import word
from trainer.shared.run.errors import ConfigError, listed, nearest
from trainer.shared.run.read import from_dict
from trainer.shared.run.schema import RECOMPUTE, SCHEDULES, LayoutConfig, ShardingConfig

KEYS = {name: ("layout.sharding." if name in SHARDED else "layout.") + name for name in LAYOUT_DTYPE.names or ()}
"""The key of each column."""
FREE = ("data", "balance")
"""Columns that follow from the others: replicas from the cluster, uneven stages from layers that do not divide."""


def columns_wanted(sweeps: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """Turns ``{"layout.recompute": ["none", "full"]}`` into ``{"recompute": [0, 2]}``. ``ConfigError`` for keys that are not
    searched and for wrong values."""
    known = {key: name for name, key in KEYS.items()}
    found = {}
    for key, values in sweeps.items():
        if key not in known:
            raise ConfigError(f"{key}={','.join(map(str, values))} cannot be searched{nearest(key, known)}; searched are {listed(known)}")
        if known[key] != "data" or None not in values:  # replicas that follow from the cluster are not a choice
            found[known[key]] = list(dict.fromkeys(_code(known[key], value) for value in values))
    return found


def _code(name: str, value: Any) -> Any:
    """Returns the code of ``value`` in column ``name``, after validation like the key of a single run."""
    cls, where = (ShardingConfig, "layout.sharding.") if name in SHARDED else (LayoutConfig, "layout.")
    read = getattr(from_dict(cls, {name: value}, where), name)
    return WORDS[name].index(read) if name in WORDS else -1 if read is None else read


def describe(name: str, codes: Iterable[Any]) -> str:
    """Renders ``codes`` of column ``name`` as an override: ``layout.recompute=none,full``."""
    read = [WORDS[name][code] if name in WORDS else None if code == -1 else code for code in codes]
    return f"{KEYS[name]}={','.join(map(word, read))}"


def from_layout(layout: LayoutConfig, wanted: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    """Fills the columns missing from ``wanted`` with the values of ``layout``: the grid that a sweep would run."""
    row = to_table([layout if layout.data else dataclasses.replace(layout, data=1)])[0]
    return {name: wanted.get(name, [row[name].item()]) for name in LAYOUT_DTYPE.names or () if name in wanted or name not in FREE}


def widen_space(wanted: Mapping[str, list[Any]], limits: SpaceConfig) -> SpaceConfig:
    """Replaces values of ``limits`` by those that ``wanted`` names, so that the space contains the requested layouts."""
    found: dict[str, Any] = {}
    for name in ("tensor", "pipeline", "virtual_pipeline", "micro_batch", "context", "expert", "expert_tensor", "slices"):
        if name in wanted:
            found[f"max_{name.removesuffix('_pipeline')}"] = max(wanted[name])
    if "schedule" in wanted:
        found["schedules"] = [SCHEDULES[code] for code in wanted["schedule"]]
    if "recompute" in wanted:
        found["recompute"] = [RECOMPUTE[code] for code in wanted["recompute"]]
    if "sequence_parallel" in wanted:
        found["sequence_parallel"] = list(wanted["sequence_parallel"])
    if "offload" in wanted:
        found["offload"] = list(wanted["offload"])
    if any(name in wanted for name in FACTORS):
        found["sharding"] = "all"
    return dataclasses.replace(limits, **found)
