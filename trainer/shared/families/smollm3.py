"""SmolLM3: Bakouch et al. 2025. Llama's network in which every fourth block has no positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from trainer.shared.families.family import LLAMA, Family
from trainer.shared.families.gguf import PAIRS, GgufFormat
from trainer.shared.families.parts import BIASES, WINDOW, Config, ConfigPart, NotUnderstood, rope


def turning(layers: int, every: int) -> list[int]:
    """Returns 1 for each block that has positions, 0 for every ``every``-th."""
    return [int(not every or (i + 1) % every != 0) for i in range(layers)]


def read(config: Config, given: Config) -> dict[str, Any]:
    """Reads ``no_rope_layers``, which takes precedence, or the interval between blocks that do not turn."""
    every = config.get("no_rope_layer_interval", 4)
    turns: Sequence[int] = config.get("no_rope_layers") or turning(given["layers"], every)
    if turns != turning(given["layers"], every):
        every = turns.index(0) + 1 if 0 in turns else 0
    if turns != turning(given["layers"], every):
        raise NotUnderstood(f"no_rope_layers={turns!r}, whose zeros are not each so many-th one,")
    return {"rope.skip_every": every}


def write(model: Config) -> dict[str, Any]:
    """Inverts ``read``."""
    every = model["rope.skip_every"]
    return {"no_rope_layers": turning(model["layers"], every), "no_rope_layer_interval": every}


FAMILY = Family(
    name="smollm3",
    defaults={"tied": True},
    hub=replace(
        LLAMA,
        model_type="smollm3",
        architecture="SmolLM3ForCausalLM",
        parts=(rope(2e6), BIASES, WINDOW, ConfigPart(("no_rope_layers", "no_rope_layer_interval"), read, write)),
    ),
    gguf=GgufFormat(architecture="smollm3", implied=lambda given: {"rope.skip_every": 4}, arranged=PAIRS),
)
