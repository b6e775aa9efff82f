"""The record of an architecture in GGUF, the file format of llama.cpp. Plain data, as the rest of a family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trainer.shared.families.parts import Config, inverse


@dataclass(frozen=True)
class GgufField:
    """A field of a file that holds a key of the model: ``read`` converts from it, ``write`` to it."""

    name: str  # behind the architecture
    read: Callable[[Any], Any] = lambda value: value
    write: Callable[[Any], Any] = lambda value: value


@dataclass(frozen=True, kw_only=True)
class GgufFormat:
    """``implied`` returns keys of the model, by dotted names, that llama.cpp's network of this architecture has without a field of their
    own, for the keys read from fields and the fields behind the architecture. ``suits`` tells from these whether a file is of this family
    where several share an architecture."""

    architecture: str
    fields: Mapping[str, GgufField] = field(default_factory=dict)  # by dotted keys of the model, besides those of every architecture
    implied: Callable[[Config], dict[str, Any]] = lambda given: {}
    stated: Mapping[str, Callable[[Config], Any]] = field(default_factory=dict)  # fields made from several keys; None: there is none
    suits: Callable[[Config], bool] = lambda fields: True
    renamed: Mapping[str, str] = field(default_factory=dict)  # ends of names at the hub, and what ``gguf`` calls them
    arranged: Mapping[str, str] = field(default_factory=dict)  # differences from the hub's tensors, by the end of their name there
    partial: bool = False  # a part of each head may turn

    @property
    def mixes(self) -> bool:
        """Returns whether its networks are mixtures of experts: llama.cpp has an architecture that Llama shares with Mixtral."""
        return "experts.count" in self.fields


PAIRS = {f"{one}_proj.{part}": f"pairs of {kind}" for one, kind in (("q", "queries"), ("k", "keys")) for part in ("weight", "bias")}
"""The order in which a file of Llama's architecture holds rows of queries and keys."""
EXPERTS = {"experts.count": GgufField("expert_count"), "experts.active": GgufField("expert_used_count")}
WINDOW = GgufField("attention.sliding_window")
INVERSE = GgufField("logit_scale", inverse, lambda scale: float(inverse(scale)))


def gemma(given: Config, layers_27b: int, every: int, **windowed: Any) -> dict[str, Any]:
    """Returns the keys that Gemma's networks imply: scores are divided by sqrt(head width), in the model of 27B by sqrt(hidden / heads),
    which llama.cpp tells by its number of blocks (src/llama-model.cpp, ``f_attention_scale``); each ``every``-th block has no window.
    ``windowed``: further keys of a model with windows."""
    width = given["hidden"] / given["heads"] if given["layers"] == layers_27b else given["head_width"]
    implied = {"embedding_scale": given["hidden"] ** 0.5, "attention_scale": float(width**-0.5)}
    return implied | ({"full_every": every, **windowed} if given.get("window") else {})
