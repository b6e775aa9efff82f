"""Parts of a config.json that many families write alike and that are more than one key of the model: rotary positions, windows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Config = Mapping[str, Any]
"""A config.json, or the model's keys by their dotted names behind ``model.``."""


class NotUnderstood(ValueError):
    """A part that says what no model here has; the message names key and value."""


@dataclass(frozen=True)
class Part:
    """``names``: the keys of config.json that it reads. ``read`` gives the model's keys that follow, for a config and the keys read so far;
    ``write`` the keys of config.json, for all keys of the model."""

    names: tuple[str, ...]
    read: Callable[[Config, Config], dict[str, Any]]
    write: Callable[[Config], dict[str, Any]] = lambda model: {}


ROPE_KEYS = {
    "factor": "factor",
    "original_max_position_embeddings": "original",
    "low_freq_factor": "low",
    "high_freq_factor": "high",
    "beta_fast": "fast",
    "beta_slow": "slow",
    "truncate": "rounded",
    "attention_factor": "magnitude",
    "short_factor": "short",
    "long_factor": "long",
    "partial_rotary_factor": "share",
}
ROPE_OF = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "original", "low", "high"),
    "yarn": ("factor", "original", "fast", "slow", "rounded", "magnitude"),
    "longrope": ("factor", "original", "magnitude", "short", "long"),
}
"""The keys of ``model.rope`` that each kind has in a config.json."""
KINDS = {"su": "longrope", "ntk": "dynamic"}
"""Older names of kinds."""


def read_rope(config: Config, given: Config) -> dict[str, Any]:
    """Rotary positions: ``rope_parameters``, or ``rope_scaling`` and ``rope_theta`` of older files."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = str(rope.get("rope_type", rope.get("type", "default")))
    kind = KINDS.get(kind, kind)
    if kind not in ROPE_OF:
        raise NotUnderstood(f"rope_type={kind!r}")
    known = {*ROPE_KEYS, "rope_type", "type", "rope_theta", "mscale", "mscale_all_dim"}
    if unknown := sorted(name for name, value in rope.items() if value and name not in known):
        raise NotUnderstood(f"{unknown[0]}={rope[unknown[0]]!r} of rope_type={kind}")
    original = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    if kind in ("yarn", "llama3", "longrope"):
        rope["original_max_position_embeddings"] = original or given["seq"]
    if kind == "longrope":
        rope["factor"] = rope.get("factor") or max(1.0, given["seq"] / rope["original_max_position_embeddings"])
    found: dict[str, Any] = {"rope_theta": float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0), "rope.kind": kind}
    share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", config.get("rotary_pct")))
    if share is not None:
        found["rope.share"] = float(share)
    for theirs, ours in ROPE_KEYS.items():
        if ours in ROPE_OF[kind] and rope.get(theirs) is not None:
            found[f"rope.{ours}"] = rope[theirs]
    if kind == "yarn" and "attention_factor" not in rope and (rope.get("mscale") or rope.get("mscale_all_dim")):
        found["rope.magnitude"] = _magnitude(rope)
    return found


def _magnitude(rope: Config) -> float:
    """YaRN's factor of sines and cosines where a file gives its two scales (DeepSeek-V2)."""
    import math

    def scaled(by: float) -> float:
        return 0.1 * by * math.log(rope["factor"]) + 1.0 if rope["factor"] > 1 else 1.0

    return scaled(rope.get("mscale") or 1.0) / scaled(rope["mscale_all_dim"]) if rope.get("mscale_all_dim") else scaled(1.0)


def write_rope(model: Config) -> dict[str, Any]:
    """The inverse of ``read_rope``, in the form of today and of before."""
    kind, theta = model["rope.kind"], model["rope_theta"]
    names = {ours: theirs for theirs, ours in ROPE_KEYS.items()}
    values = {names[ours]: model[f"rope.{ours}"] for ours in ROPE_OF[kind] if model[f"rope.{ours}"] is not None}
    share = {"partial_rotary_factor": model["rope.share"]} if model["rope.share"] != 1 else {}
    older = {"rope_scaling": {"rope_type": kind, **values}} if values else {}
    return {"rope_theta": theta, "rope_parameters": {"rope_type": kind, "rope_theta": theta, **values, **share}, **older, **share}


ROPE = Part(
    ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", "rotary_pct", "original_max_position_embeddings"),
    read_rope,
    write_rope,
)
SLIDING, FULL = "sliding_attention", "full_attention"


def read_window(config: Config, given: Config) -> dict[str, Any]:
    """Windows of attention: ``sliding_window`` in the blocks that ``layer_types`` names, or in all."""
    window, types = config.get("sliding_window"), config.get("layer_types")
    if not window or config.get("use_sliding_window") is False or (types is not None and SLIDING not in types):
        return {}
    if types is None and config.get("use_sliding_window") and "max_window_layers" in config:
        types = [FULL if i < config["max_window_layers"] else SLIDING for i in range(given["layers"])]
    if types is None and config.get("sliding_window_pattern"):
        return {"window": window, "full_every": config["sliding_window_pattern"]}
    full = [i + 1 for i, kind in enumerate(types or ()) if kind == FULL]
    if not full:
        return {"window": window}
    every = full[0]
    if types != [FULL if (i + 1) % every == 0 else SLIDING for i in range(len(types or ()))]:
        raise NotUnderstood(f"layer_types={types!r}, whose full blocks are not each so many-th one")
    return {"window": window, "full_every": every}


def write_window(model: Config) -> dict[str, Any]:
    """The inverse of ``read_window``."""
    window, every = model["window"], model["full_every"]
    types = [FULL if window is None or (every and (i + 1) % every == 0) else SLIDING for i in range(model["layers"])]
    return {"sliding_window": window, "use_sliding_window": window is not None, "layer_types": types}


WINDOW = Part(
    ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "sliding_window_pattern"), read_window, write_window
)
