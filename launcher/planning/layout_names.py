"""Layouts by their short names, as tables print them ("t8 p4x2 d32 mb1 interleaved sp recompute-full zero-1"), read back. Pure."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from launcher.labels import layout_label
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.read import flatten, from_dict, to_dict
from trainer.shared.run.schema import RECOMPUTE, SCHEDULES, LayoutConfig

DEGREES = {"t": "tensor", "d": "data", "c": "context", "e": "expert", "et": "expert_tensor", "mb": "micro_batch", "s": "slices"}


def name_of(layout: LayoutConfig) -> str:
    """Returns the label of the tables, with uneven stages and partial recomputation added."""
    words = [layout_label(to_dict(layout))]
    words += ["balanced"] * (layout.balance == "cost")
    words += [f"every-{layout.recompute_every}"] * (layout.recompute_every > 1)
    return " ".join(words)


def overrides_of(layout: LayoutConfig, base: LayoutConfig | None = None) -> list[str]:
    """Returns the Hydra overrides that turn ``base`` (the default layout) into ``layout``. ``data`` is omitted: the cluster implies it."""
    wanted, given = flatten(dataclasses.replace(layout, data=None), "layout."), flatten(base or LayoutConfig(), "layout.")
    return [f"{key}={word(value)}" for key, value in wanted.items() if value != given[key]]


def word(value: Any) -> str:
    """Renders a value in Hydra's grammar."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value).replace(" ", "")


def layout_of(name: str) -> LayoutConfig:
    """Parses a layout's short name. ``ConfigError`` names the unknown word, or the degree that is out of range."""
    values: dict[str, Any] = {}
    for word in name.replace(",", " ").split():
        values |= _meaning(word, name)
    sharding = values.pop("sharding", (1, 1, 1))
    data = values.get("data")
    if data is None:
        raise ConfigError(f"layout {name!r} has no data degree; a layout is written like 't8 p4 d16 mb1 sp zero-1'")
    shared = data * values.get("context", 1)
    factors = (shared if factor == "data" else factor for factor in sharding)
    states = dict(zip(("params", "grads", "optimizer"), factors)) | {"offload": values.pop("offload", 0.0)}
    return from_dict(LayoutConfig, values | {"sharding": states}, "layout.")


def _meaning(word: str, name: str) -> dict[str, Any]:
    schedule = word.replace("-", "_")
    if schedule in SCHEDULES:
        return {"schedule": schedule}
    if found := re.fullmatch(r"p(\d+)(?:x(\d+))?", word):
        return {"pipeline": int(found[1]), "virtual_pipeline": int(found[2] or 1)}
    if found := re.fullmatch(r"(mb|et|t|d|c|e|s)(\d+)", word):
        return {DEGREES[found[1]]: int(found[2])}
    if found := re.fullmatch(r"every-(\d+)", word):
        return {"recompute_every": int(found[1])}
    if found := re.fullmatch(rf"recompute-({'|'.join(RECOMPUTE)})", word):
        return {"recompute": found[1]}
    if found := re.fullmatch(r"zero-([123])", word):
        return {"sharding": ("data" if int(found[1]) == 3 else 1, "data" if int(found[1]) >= 2 else 1, "data")}
    if found := re.fullmatch(r"shard-(\d+)/(\d+)/(\d+)", word):
        return {"sharding": tuple(map(int, found.groups()))}
    if found := re.fullmatch(r"offload-(\d+(?:\.\d+)?)", word):
        return {"offload": float(found[1])}
    if word == "sp":
        return {"sequence_parallel": True}
    if word == "balanced":
        return {"balance": "cost"}
    raise ConfigError(f"{word!r} in layout {name!r} means nothing; 'trireme plan' writes layouts like 't8 p4 d16 mb1 1f1b sp zero-1'")
