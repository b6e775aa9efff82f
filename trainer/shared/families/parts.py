"""Parts of a config.json that several families share and that span more than one key of the model: rotary positions, windows, biases,
experts, latents."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Config = Mapping[str, Any]
"""A config.json, or the model's keys by their dotted names behind ``model.``."""


class NotUnderstood(ValueError):
    """A part with a property that no model here has; the message names key and value."""


@dataclass(frozen=True)
class ConfigPart:
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
    """Reads rotary positions: ``rope_parameters``, or ``rope_scaling`` and ``rope_theta`` of older files."""
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
    """Returns YaRN's factor of sines and cosines where a file gives its two scales (DeepSeek-V2)."""

    def scaled(by: float) -> float:
        return 0.1 * by * math.log(rope["factor"]) + 1.0 if rope["factor"] > 1 else 1.0

    return scaled(rope.get("mscale") or 1.0) / scaled(rope["mscale_all_dim"]) if rope.get("mscale_all_dim") else scaled(1.0)


def write_rope(model: Config) -> dict[str, Any]:
    """Inverts ``read_rope``, in both the current and the older form."""
    kind, theta = model["rope.kind"], model["rope_theta"]
    names = {ours: theirs for theirs, ours in ROPE_KEYS.items()}
    values = {names[ours]: model[f"rope.{ours}"] for ours in ROPE_OF[kind] if model[f"rope.{ours}"] is not None}
    share = {"partial_rotary_factor": model["rope.share"]} if model["rope.share"] != 1 else {}
    older = {"rope_scaling": {"rope_type": kind, **values}} if values else {}
    return {"rope_theta": theta, "rope_parameters": {"rope_type": kind, "rope_theta": theta, **values, **share}, **older, **share}


def rope(theta: float = 10000.0) -> ConfigPart:
    """Returns the part of rotary positions; ``theta`` is the base where a file has none."""
    names = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", "rotary_pct", "original_max_position_embeddings")
    return ConfigPart(names, lambda config, given: read_rope({"rope_theta": theta, **config}, given), write_rope)


ROPE = rope()
SLIDING, FULL = "sliding_attention", "full_attention"


def each_so_many_th(flags: Sequence[bool], name: str) -> int:
    """Returns k if each k-th block is flagged and no other one, 0 if none is. Otherwise raises ``NotUnderstood`` with the name of the
    key."""
    every = flags.index(True) + 1 if True in flags else 0
    if list(flags) != [bool(every) and (i + 1) % every == 0 for i in range(len(flags))]:
        raise NotUnderstood(f"{name}, which flags blocks other than each so many-th one,")
    return every


def whole(config: Config, name: str, default: int = 0) -> int:
    """Returns the whole number of a key, 0 or more; ``default`` where there is none. Raises ``NotUnderstood`` for anything else."""
    value = default if config.get(name) is None else config[name]
    if type(value) is not int or value < 0:
        raise NotUnderstood(f"{name}={value!r}")
    return value


def read_window(config: Config, given: Config) -> dict[str, Any]:
    """Reads the windows of attention: ``sliding_window`` in the blocks that ``layer_types`` names, or in all."""
    window, types = config.get("sliding_window"), config.get("layer_types")
    if types is not None and not (
        isinstance(types, list) and len(types) == given["layers"] and all(kind in (SLIDING, FULL) for kind in types)
    ):
        raise NotUnderstood(f"layer_types={types!r}")
    if types is None and config.get("use_sliding_window") and "max_window_layers" in config:
        types = [FULL if i < config["max_window_layers"] else SLIDING for i in range(given["layers"])]
    if window is None or config.get("use_sliding_window") is False or (types is not None and SLIDING not in types):
        return {}
    if whole(config, "sliding_window") == 0:
        raise NotUnderstood(f"sliding_window={window!r}")
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
    """Inverts ``read_window``."""
    window, every = model["window"], model["full_every"]
    types = [FULL if window is None or (every and (i + 1) % every == 0) else SLIDING for i in range(model["layers"])]
    return {"sliding_window": window, "use_sliding_window": window is not None, "layer_types": types}


WINDOW = ConfigPart(
    ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "sliding_window_pattern"), read_window, write_window
)


def one_window(default: int | None) -> ConfigPart:
    """Returns the part with ``sliding_window`` in all blocks; ``default`` where a file has none."""
    return ConfigPart(
        ("sliding_window",),
        lambda config, given: {"window": config.get("sliding_window", default)},
        lambda model: {"sliding_window": model["window"]},
    )


def biases(default: bool = False, always: tuple[str, ...] = (), **keys: tuple[str, ...]) -> ConfigPart:
    """Returns the part of biases. ``keys`` of config.json say which matrices have one; those in ``always`` have one in any case."""

    def read(config: Config, given: Config) -> dict[str, Any]:
        return {"biases": [*(name for key, names in keys.items() if config.get(key, default) for name in names), *always]}

    def write(model: Config) -> dict[str, Any]:
        return {key: set(names) <= set(model["biases"]) for key, names in keys.items()}

    return ConfigPart(tuple(keys), read, write)


BIASES = biases(attention_bias=("qkv", "output"), mlp_bias=("up", "down"))
ATTENTION_BIAS = biases(attention_bias=("qkv", "output"))


def unread(*names: str) -> ConfigPart:
    """Returns the part of keys that change neither parameters nor operations of a model, such as the losses that it was trained with."""
    return ConfigPart(names, lambda config, given: {})


ROUTING = unread("router_aux_loss_coef", "router_jitter_noise", "aux_loss_alpha", "seq_aux", "ep_size")
"""The part of losses and layouts that a mixture of experts was trained with."""


def read_groups(config: Config, given: Config) -> dict[str, Any]:
    """Reads the groups that experts are chosen from, and whether scores are corrected in the choice. A file has the method, or its class
    implies it; corrections stay as they are."""
    method = config.get("topk_method", "noaux_tc")
    if method not in ("greedy", "group_limited_greedy", "noaux_tc"):
        raise NotUnderstood(f"topk_method={method!r}")
    limited = method != "greedy"
    names = {"experts.groups": "n_group", "experts.active_groups": "topk_group"}
    groups = {ours: max(1, whole(config, theirs, 1)) if limited else 1 for ours, theirs in names.items()}
    return {**groups, "experts.correction": 0.0 if method == "noaux_tc" else None}


def write_groups(model: Config) -> dict[str, Any]:
    """Inverts ``read_groups``."""
    limited = "greedy" if model["experts.groups"] == 1 else "group_limited_greedy"
    method = {"topk_method": limited if model["experts.correction"] is None else "noaux_tc"}
    return method | {"n_group": model["experts.groups"], "topk_group": model["experts.active_groups"]}


GROUPS = ConfigPart(("n_group", "topk_group", "topk_method"), read_groups, write_groups)


def read_shared(config: Config, given: Config) -> dict[str, Any]:
    """Reads the number of experts that every token visits."""
    return {"experts.shared_ffn": whole(config, "n_shared_experts") * whole(config, "moe_intermediate_size")}


def write_shared(model: Config) -> dict[str, Any]:
    """Inverts ``read_shared``."""
    return {"n_shared_experts": model["experts.shared_ffn"] // (model["experts.ffn"] or model["ffn"])}


SHARED = ConfigPart(("n_shared_experts",), read_shared, write_shared)


def read_mlp_blocks(config: Config, given: Config) -> dict[str, Any]:
    """Reads the list of blocks with an MLP in place of experts, which must be the leading ones."""
    blocks = config.get("mlp_only_layers") or []
    if not isinstance(blocks, list) or sorted(map(str, blocks)) != sorted(map(str, range(len(blocks)))):
        raise NotUnderstood(f"mlp_only_layers={blocks!r}, which are not the leading blocks,")
    return {"experts.dense_layers": len(blocks)}


MLP_BLOCKS = ConfigPart(("mlp_only_layers",), read_mlp_blocks, lambda model: {"mlp_only_layers": [*range(model["experts.dense_layers"])]})


def read_latent(config: Config, given: Config) -> dict[str, Any]:
    """Reads the latents of attention (DeepSeek-AI 2024, arXiv 2405.04434): scores are scaled by the whole width of a query, and under YaRN
    by the square of its factor of magnitudes."""
    width = whole(config, "qk_nope_head_dim") + whole(config, "qk_rope_head_dim")
    for name in ("qk_nope_head_dim", "kv_lora_rank"):
        if not whole(config, name, 1):
            raise NotUnderstood(f"{name}=0")
    if (groups := config.get("num_key_value_heads")) not in (None, given["heads"]):
        raise NotUnderstood(f"num_key_value_heads={groups!r} beside num_attention_heads={given['heads']}")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    factor, scale = rope.get("factor") or 1.0, rope.get("mscale_all_dim") or 0.0
    magnitude = 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0
    return {"latent.query_rank": whole(config, "q_lora_rank"), "attention_scale": magnitude**2 / math.sqrt(width)}


def write_latent(model: Config) -> dict[str, Any]:
    """Inverts ``read_latent``. The two scales of YaRN stand in place of the factor that ``write_rope`` writes."""
    width = model["head_width"] + model["latent.rotary"]
    written = {"q_lora_rank": model["latent.query_rank"] or None, "num_key_value_heads": model["heads"]}
    written |= {"qk_head_dim": width, "head_dim": model["latent.rotary"]}
    magnitude = math.sqrt(model["attention_scale"] * math.sqrt(width))
    if model["rope.kind"] != "yarn" or model["rope.factor"] == 1 or math.isclose(magnitude, 1):
        return written
    every = model["rope.magnitude"] or 0.1 * math.log(model["rope.factor"]) + 1
    scales = {name: _scale(of, model["rope.factor"]) for name, of in (("mscale", every * magnitude), ("mscale_all_dim", magnitude))}
    forms = {name: {**form, **scales} for name, form in write_rope(model).items() if isinstance(form, dict)}
    return written | {name: {key: form[key] for key in form if key != "attention_factor"} for name, form in forms.items()}


def _scale(magnitude: float, factor: float) -> float:
    """Returns the scale that gives a magnitude of YaRN, to 12 digits, so that one of few digits in a file is restored."""
    return float(f"{(magnitude - 1) / (0.1 * math.log(factor)):.12g}")


LATENT = ConfigPart(
    ("q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim", "head_dim", "num_key_value_heads", "rope_interleave"),
    read_latent,
    write_latent,
)
"""The part without the values that are single keys of the model: ``latent.kv_rank``, ``latent.rotary``, ``latent.value`` and
``head_width``."""


def inverse(value: float) -> float:
    """Returns 1 / value to 12 digits, so that a value of few digits in a file is restored; an integer if it is whole."""
    found = float(f"{1 / value:.12g}")
    return int(found) if found.is_integer() else found
