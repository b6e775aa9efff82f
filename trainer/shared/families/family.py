"""The record of one architecture: the structure of its network, the defaults of its keys, and its names on disk.

Plain data. The trainer builds modules from it, the cost model a shape, ``size`` models, the converters names and config.json. A feature
that only some architectures have is one more field, whose default describes the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainer.shared.families.gguf import GgufFormat
from trainer.shared.families.parts import BIASES, ROPE, ConfigPart

MATRICES = ("qkv", "output", "up", "down")
"""Matrices of a block: queries, keys and values in one; attention's output; into the MLP and out of it."""
ALWAYS = object()
"""Default of a key that every config.json has."""


@dataclass(frozen=True)
class ConfigKey:
    """A key of the model and the one of config.json that holds it."""

    ours: str  # dotted, behind "model."
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
    keys: tuple[ConfigKey, ...]  # besides vocabulary and tied head, which are the same for all
    parts: tuple[ConfigPart, ...] = ()  # of more than one key
    constants: Mapping[str, Any] = field(default_factory=dict)  # written; no other value is read
    expected: Mapping[str, Any] = field(default_factory=dict)  # as ``constants``, but not written
    absent: Mapping[str, Any] = field(default_factory=dict)  # values of keys that a file may leave out
    further_types: tuple[str, ...] = ()  # model types of the same form
    root: str = "model."  # prefix of names, except in files of the model without its head
    ends: Mapping[str, str] = field(default_factory=dict)
    blocks: str = "layers"  # prefix of a block's number
    block: Mapping[str, str] = field(default_factory=dict)  # none: weights of the family are neither read nor written
    decoder_blocks: str | None = None  # of blocks behind an encoder's, which are numbered from the first of them
    decoder_block: Mapping[str, str] = field(default_factory=dict)
    ungated: str | None = None  # the matrix up, in place of two, of an MLP without a gate
    mixture: Mapping[str, str] = field(default_factory=dict)  # of a block with experts, in place of the MLP's; {} is an expert's number
    correction: str | None = None  # of the router, in such a block
    forms: Mapping[str, str] = field(default_factory=dict)  # how modules that differ from ours hold them (trainer/convert/rules.py)
    inputs_first: bool = False  # matrices of a block are [in, out]
    output: str = "lm_head.weight"  # of a head that is not tied
    computed: tuple[str, ...] = ()  # ends of names, in older files, of constants that are not parameters


def llama_keys(norm_eps: float) -> tuple[ConfigKey, ...]:
    """Returns the keys that configs in Llama's form share; ``norm_eps``: the epsilon of norms where a config has none."""
    return (
        ConfigKey("layers", "num_hidden_layers"),
        ConfigKey("hidden", "hidden_size"),
        ConfigKey("heads", "num_attention_heads"),
        ConfigKey("kv_heads", "num_key_value_heads", default=None),
        ConfigKey("head_width", "head_dim", default=None),
        ConfigKey("ffn", "intermediate_size"),
        ConfigKey("seq", "max_position_embeddings"),
        ConfigKey("activation", "hidden_act", words={"swiglu": "silu"}),
        ConfigKey("norm_eps", "rms_norm_eps", default=norm_eps),
    )


LLAMA = HubFormat(
    model_type="llama",
    architecture="LlamaForCausalLM",
    keys=llama_keys(1e-6),
    parts=(ROPE, BIASES),
    root="model.",
    ends={"embedding.tokens": "embed_tokens", "head.norm": "norm"},
    blocks="layers",
    block={
        "attention_norm": "input_layernorm",
        "attention.qkv": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
        "attention.output": "self_attn.o_proj",
        "mlp_norm": "post_attention_layernorm",
        "mlp.up": "mlp.gate_proj mlp.up_proj",
        "mlp.down": "mlp.down_proj",
    },
    forms={"attention.qkv": "by kind", "mlp.up": "stacked", "mlp.shared.up": "stacked"},
    computed=(".rotary_emb.inv_freq",),
)
"""Llama's, from which those of many others differ in little: they state the difference by ``dataclasses.replace``."""
QUERY_KEY_NORMS = {"attention.query_norm": "self_attn.q_norm", "attention.key_norm": "self_attn.k_norm"}
MIXTURE = {
    "mlp.router": "mlp.gate",
    "mlp.up": "mlp.experts.{}.gate_proj mlp.experts.{}.up_proj",
    "mlp.down": "mlp.experts.{}.down_proj",
}
SHARED_EXPERTS = {
    "mlp.shared.up": "mlp.shared_experts.gate_proj mlp.shared_experts.up_proj",
    "mlp.shared.down": "mlp.shared_experts.down_proj",
}
POST_NORMS = {"attention_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"}
"""Names that several of those families share."""


@dataclass(frozen=True)
class ReferenceModel:
    """One published model: its shape and its peak learning rate."""

    name: str
    layers: int
    hidden: int
    heads: int
    lr: float
    ffn: int | None = None  # None: by the family's rule
    head_width: int | None = None  # None: heads are together as wide as the model


@dataclass(frozen=True)
class FamilyDefaults:
    """The values that the models of one family share. Batches in tokens, by parameters; interpolated between, constant outside."""

    models: tuple[ReferenceModel, ...]  # ascending in size
    vocab: int
    batch_tokens: tuple[tuple[float, float], ...]
    dropout: float = 0.0
    weight_decay: float = 0.1
    warmup_tokens: float | None = None  # None: 0.15 % of all steps
    constant_end: float = 0.0  # part of a run at the final learning rate
    ffn_multiple: int | None = None  # gated: 8/3 hidden, or the models' own share, rounded up to a multiple of this; None: 4 hidden
    seq: int = 2048
    grouped_above: float | None = None  # parameters above which a model has 8 key/value heads; None: one per head in all


BASE: Mapping[str, Any] = {
    "positions": "rotary",
    "norm": "rms",
    "norm_at": "before",
    "qk_norm": "none",
    "biases": (),
    "residual": "sequential",
    "activation": "swiglu",
    "tied": False,
}
"""Values of the model's keys where neither the run nor its family sets them: Llama's."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture. A property that its models may choose is a key of the model, and ``defaults`` holds its usual value; the fields
    here are common to all of them."""

    name: str
    title: str = ""  # in a list of families, if not the name
    order: int = 99  # its place in such a list; the first is the default
    defaults: Mapping[str, Any] = field(default_factory=dict)  # keys of the model that differ from ``BASE``
    embedding_norm: bool = False
    embedding_dropout: bool = True
    norm_offset: bool = False  # norms multiply by 1 + weight
    attention_sinks: bool = False  # one more score per head, which takes weight from all
    further_positions: int = 0  # rows of the position embedding beyond the sequence
    encoder_decoder: bool = False  # the first blocks are an encoder's, half of them unless the model says how many
    attention_scale: float | None = None  # factor of attention scores; None: 1 / sqrt(head_width)
    init_scale: float = 0.64  # initial standard deviation times sqrt(hidden)
    final_dropout: bool = False  # between the last norm and the head
    wide_embedding: bool = False  # initial embeddings are sqrt(hidden) times as wide as matrices
    tied_head_scaled: bool = False  # the input of a tied head is divided by sqrt(hidden)
    # names on disk, and facts about published models
    hub: HubFormat
    gguf: GgufFormat | None = None  # None: no such file is read or written here
    published: FamilyDefaults | None = None

    def default(self, name: str) -> Any:
        """Returns the default of a key of the model; None if the family has none."""
        value = self.defaults.get(name, BASE.get(name))
        return list(value) if isinstance(value, tuple) else value
