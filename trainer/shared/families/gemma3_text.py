"""Gemma 3, the part that reads text: Gemma Team 2025. Gemma 2 with norms of queries and keys for caps, and other angles in windows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trainer.shared.families.family import QUERY_KEY_NORMS, Family
from trainer.shared.families.gemma2 import HUB, scales
from trainer.shared.families.gguf import WINDOW, GgufFormat, gemma
from trainer.shared.families.parts import ATTENTION_BIAS, FULL, ROPE, SLIDING, Config, ConfigPart, NotUnderstood, read_rope, write_rope


def read(config: Config, given: Config) -> dict[str, Any]:
    """Reads the angles of blocks that see all positions, and the base of those with a window: by kind of block, or two keys of older
    files."""
    said = config.get("rope_parameters") or {}
    if not {FULL, SLIDING} & said.keys():
        found = read_rope({**config, "rope_theta": config.get("rope_theta", 1e6)}, given)
        return {**found, "rope.local_theta": float(config.get("rope_local_base_freq", 1e4))}
    full, local = ({"rope_theta": theta, **(said.get(kind) or {})} for kind, theta in ((FULL, 1e6), (SLIDING, 1e4)))
    found, near = read_rope({"rope_parameters": full}, given), read_rope({"rope_parameters": local}, given)
    if near["rope.kind"] != "default" and near != found:
        raise NotUnderstood(f"rope_parameters.{SLIDING}={local!r}")
    return {**found, "rope.local_theta": None if near == found else near["rope_theta"]}


def write(model: Config) -> dict[str, Any]:
    """Inverts ``read``; older readers get the two bases and the scaling."""
    known, theta = write_rope(model), model["rope.local_theta"]
    full = known.pop("rope_parameters")
    local = full if theta is None else {"rope_type": "default", "rope_theta": theta}
    return known | {"rope_parameters": {FULL: full, SLIDING: local}, "rope_local_base_freq": local["rope_theta"]}


FAMILY = Family(
    name="gemma3_text",
    title="gemma3_text (Gemma 3)",
    defaults={"norm_at": "both", "qk_norm": "head", "activation": "geglu", "tied": True},
    norm_offset=True,
    hub=replace(
        HUB,
        model_type="gemma3_text",
        architecture="Gemma3ForCausalLM",
        keys=tuple(replace(key, default=None) if key.ours == "logit_cap" else key for key in HUB.keys if key.ours != "score_cap"),
        expected={**HUB.expected, "attn_logit_softcapping": None},  # read by none of their networks
        parts=(ConfigPart((*ROPE.names, "rope_local_base_freq"), read, write), ATTENTION_BIAS, scales(6)),
        block={**HUB.block, **QUERY_KEY_NORMS},
    ),
    gguf=GgufFormat(
        architecture="gemma3",
        fields={"window": WINDOW},
        implied=lambda given: gemma(given, layers_27b=62, every=6, **{"rope.local_theta": 1e4}),
    ),
)
