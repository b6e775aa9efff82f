"""The record of one architecture: how its network is built, what its keys are when they are not given, and its names on disk.

Plain data. The trainer builds modules from it, the cost model a shape, ``size`` models, the converters names and config.json. What an
architecture has beyond these is one more field, whose default is what the others have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

MATRICES = ("qkv", "output", "up", "down")
"""Matrices of a block: queries, keys and values in one; attention's output; into the MLP and out of it."""
ALWAYS = object()
"""Default of a key that every config.json has."""


@dataclass(frozen=True)
class ConfigKey:
    """A key of the model and the one of config.json that holds it."""

    ours: str
    theirs: str
    default: Any = ALWAYS  # where config.json has none; of words, the first
    older: str | None = None  # another name under which it is read
    words: Mapping[str, str] = field(default_factory=dict)  # ours to theirs
    synonyms: Mapping[str, str] = field(default_factory=dict)  # theirs, read but not written, to ours
    read: bool = True


@dataclass(frozen=True, kw_only=True)
class HubFormat:
    """A folder in the layout of Hugging Face's library. Parameters are named by module: ours, and theirs behind ``root``; several of theirs
    that share one of ours stand apart by a space."""

    model_type: str
    architecture: str
    keys: tuple[ConfigKey, ...]  # beside vocabulary, tied head and rotary positions, which are the same for all
    constants: Mapping[str, Any] = field(default_factory=dict)  # written; no other value is read
    expected: Mapping[str, Any] = field(default_factory=dict)  # likewise, but not written
    head_width: str | None = None  # key of config.json that must be hidden / heads where it is given
    root: str  # what names begin with, except in files of the model without its head
    ends: Mapping[str, str]
    blocks: str  # what stands before the number of a block
    block: Mapping[str, str]
    forms: Mapping[str, str] = field(default_factory=dict)  # how modules that differ from ours hold them (trainer/convert/rules.py)
    inputs_first: bool = False  # matrices of a block are [in, out]
    output: str = "lm_head.weight"  # of a head that is not tied
    computed: tuple[str, ...] = ()  # ends of names, in older files, of constants that are no parameters


@dataclass(frozen=True)
class ReferenceModel:
    """One published model: its shape and its peak learning rate."""

    name: str
    layers: int
    hidden: int
    heads: int
    lr: float


@dataclass(frozen=True)
class FamilyDefaults:
    """Holds the values that the models of one family share. Batches in tokens, by parameters; interpolated between, constant outside."""

    models: tuple[ReferenceModel, ...]  # ascending in size
    vocab: int
    batch_tokens: tuple[tuple[float, float], ...]
    dropout: float = 0.0
    weight_decay: float = 0.1
    warmup_tokens: float | None = None  # None: 0.15 % of all steps
    constant_end: float = 0.0  # part of a run at the final learning rate
    ffn_multiple: int | None = None  # SwiGLU: 8/3 hidden rounded up to a multiple of this; None: 4 hidden
    grouped_above: float | None = None  # parameters above which a model has 8 key/value heads; None: one per head in all


@dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture. Grouped queries, MLP width, activation and tied embeddings are keys of the model: here are their defaults."""

    name: str
    title: str = ""  # in a list of families, if not the name
    order: int = 99  # its place in such a list; the first is the default
    # the network: norm, attention and norm, MLP in each block, a norm before the head
    norm: Literal["layer", "rms"] = "layer"
    biases: tuple[str, ...] = MATRICES  # matrices of a block that have one
    positions: Literal["learned", "rotary", "alibi"]
    embedding_norm: bool = False
    embedding_dropout: bool = True
    head_multiple: int = 1  # of which hidden / heads is one
    head_broken: str = ""  # what is wrong with another width, behind "model.hidden=H / model.heads=N"
    # defaults
    activation: str = "gelu"
    tied: bool = True
    # names on disk, and what is known of published models
    hub: HubFormat
    gguf: str  # its architecture in llama.cpp
    gguf_arranged: Mapping[str, str] = field(default_factory=dict)  # what differs from the hub's tensors, by the end of their name there
    published: FamilyDefaults | None = None

    @property
    def norm_vectors(self) -> int:
        """Vectors of a norm: scale and shift, or scale alone."""
        return 2 if self.norm == "layer" else 1

    def parameters(self, module: str) -> tuple[str, ...]:
        """Names of the parameters of a module: weight, and bias if it has one."""
        shifted = self.norm_vectors == 2 if module.endswith("norm") else module.rpartition(".")[2] in self.biases
        return ("weight", "bias") if shifted else ("weight",)
