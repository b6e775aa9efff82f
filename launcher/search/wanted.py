"""Hydra's sweeps over layout keys (``layout.tensor=1,2,4``) as columns and codes of a table of layouts. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from launcher.cost.layouts import LAYOUT_DTYPE, SHARDED, WORDS
from trainer.config import ConfigError
from trainer.config.errors import listed, nearest


def columns_wanted(sweeps: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """``{"layout.recompute": ["none", "full"]}`` as ``{"recompute": [0, 2]}``. ``ConfigError`` for what is not searched."""
    known = {("layout.sharding." if name in SHARDED else "layout.") + name: name for name in LAYOUT_DTYPE.names or ()}
    found = {}
    for key, values in sweeps.items():
        if key not in known:
            raise ConfigError(f"{key}={','.join(map(str, values))} cannot be searched{nearest(key, known)}; searched are {listed(known)}")
        words = WORDS.get(known[key])
        if words and (strange := [value for value in values if value not in words]):
            raise ConfigError(f"{key}={strange[0]} is not one of {listed(words)}{nearest(str(strange[0]), words)}")
        found[known[key]] = [words.index(value) if words else value for value in values]
    return found
