"""An inference engine, as far as time and memory depend on it: how it batches, launches, sums up and reserves. Data: conf/engine/NAME.yaml.

A profile states facts of a code base, each with its source in a comment; nothing in it is fitted. The costs of these facts are in
conf/inference.yaml, the same for all engines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from trainer.shared.run.errors import ConfigError
from trainer.shared.run.keys import key
from trainer.shared.run.read import from_dict

BATCHING = ("static", "continuous", "both")
PREFILL = ("alone", "first", "mixed")
LAUNCHES = ("python", "native", "graph")
ALL_REDUCES = ("library", "one_shot")
ATTENTION = ("unfused", "flash")
ACTIVATIONS = ("separate", "fused")
CHOOSING = ("sorted", "fused")
FORMATS = ("fp32", "bf16", "fp16", "fp8")
TEXTS, SIZES = ("model", "weights", "kv"), ("tensor", "pipeline", "ranks", "batch", "length", "tokens")
"""Names of texts and of whole numbers that a command may have in braces."""
SEVERAL = ("nodes", "ranks", "each")
"""Names of whole numbers that ``across`` may have in braces."""


@dataclass(frozen=True)
class EngineMemory:
    """Device memory that an engine takes, and the buffers that it keeps there."""

    share: float = key(1.0, "part of the device's memory that weights, buffers and keys and values together may take", above=0, maximum=1)
    of_free: bool = key(False, "the share is of what weights and buffers leave, for keys and values alone")
    embedding_copies: int = key(1, "copies of the input embedding or head, where model.tied says that they are one", minimum=1)
    embedding_sharded: bool = key(True, "tensor ranks share the vocabulary out")
    embedding_everywhere: bool = key(False, "every pipeline stage holds what the first and the last hold of the vocabulary")
    kv_block: int = key(1, "tokens of a block of keys and values: a sequence takes whole blocks", minimum=1)
    full_buffers: float = key(4, "buffers of a forward pass, in rows of model.hidden per token, that every tensor rank has whole", minimum=0)
    split_buffers: float = key(12, "those that tensor ranks share out", minimum=0)
    float_scores: bool = key(False, "scores that are written to memory (attention=unfused) are kept in 32 bits too")
    logit_buffers: float = key(0, "buffers of 4-byte entries of the vocabulary per request: logits, and what choosing a token takes", minimum=0)
    runtime_gb: float = key(1.2, "driver, libraries, communicators and the engine's own, in 1e9 bytes", minimum=0)


@dataclass(frozen=True)
class EngineProfile:
    """One inference engine."""

    name: str = key("unknown", "name of the engine")
    version: str = key("", "its release, as 0.8.2; empty = one of today")
    earlier: list[dict[str, Any]] = key(list, "what was otherwise before a release: mappings with that release (before: '0.8') and keys of the profile")
    batching: str = key("continuous", "static: a batch begins and ends together; continuous: requests join and leave; both: static unless requests come otherwise", choices=BATCHING)
    prefill: str = key("mixed", "prompts are computed alone (static), first (decoding waits) or mixed with decoding", choices=PREFILL)
    prefill_tokens: int = key(8192, "prompt tokens of one forward pass at most", minimum=1)
    most_requests: int = key(1024, "requests that run at once at most, unless the engine is told otherwise", minimum=1)
    launch: str = key("graph", "how kernels of decoding are launched: by Python, by native code, or as one graph", choices=LAUNCHES)
    launches_per_layer: float = key(11, "kernels of a layer in decoding", minimum=0)
    asynchronous: bool = key(False, "the host prepares the next pass while the device computes")
    all_reduce: str = key("one_shot", "small sums over tensor ranks: the library's, or one kernel of the engine's own", choices=ALL_REDUCES)
    attention: str = key("flash", "attention of prompts; unfused: scores are written to memory and read again", choices=ATTENTION)
    activations: str = key("fused", "kernels between products: norms with their additions and gates at once, or biases and transposes apart", choices=ACTIVATIONS)
    choosing: str = key("fused", "how a token is chosen: each request's logits are sorted, or a few passes over all logits", choices=CHOOSING)
    shared_keys: bool = key(True, "in decoding, query heads that share keys and values read them once; false: each for itself")
    tensor: bool = key(True, "runs tensor-parallel")
    pipeline: bool = key(True, "runs pipeline-parallel")
    pipeline_groups: bool = key(True, "a batch is cut into groups that fill the pipeline; false: it goes through as one")
    pipeline_tokens: int = key(0, "a pipeline's groups are halved until one has no more tokens; 0 = one group per stage", minimum=0)
    pipeline_drains: bool = key(False, "the tokens of all groups are chosen before any group continues: the pipeline empties at every token")
    memory: EngineMemory = key(EngineMemory, "what it keeps in memory")
    own: bool = key(False, "this project's generator, with which a search measures")
    command: str = key("", "how it is started: a line with {model} (quoted for a shell as it has to be), {tensor}, {pipeline}, {batch}, {length}, {tokens}, {weights}, {kv}")
    server: str = key("", "how it is started where requests come as they like, if that is another line")
    across: str = key("what the engine's documentation says of it", "what the command needs beside where a replica is on several nodes: words with {nodes}, {ranks} and {each}, the devices of a node")
    formats: dict[str, str] = key(dict, "what {weights} becomes, by number format of the weights; none = it takes all", choices=FORMATS)
    kv_formats: dict[str, str] = key(dict, "what {kv} becomes, by number format of keys and values, where those of the weights are not kept", choices=FORMATS)


BEFORE = "before"
"""Key of the release in an entry of ``earlier``."""


def released(engine: EngineProfile) -> EngineProfile:
    """Returns the engine as it was in its ``version``, which is in its name then. What ``earlier`` says of that release precedes the other
    keys; a candidate of a release counts as that release. Raises ``ConfigError`` for a version, or an entry, that cannot be read."""
    if not engine.version:
        return engine
    if not engine.earlier:
        raise ConfigError(f"engine.version={engine.version}: the profile of {engine.name} does not tell releases apart; leave it out")
    data, version = asdict(engine), _release(engine.version, "engine.version")
    entries = [(_release(entry.get(BEFORE), "engine.earlier: before"), entry) for entry in engine.earlier]
    for limit, entry in sorted(entries, key=lambda pair: pair[0], reverse=True):
        for name, value in entry.items() if version < limit else ():
            if name != BEFORE:
                data[name] = data[name] | value if isinstance(value, Mapping) and isinstance(data.get(name), dict) else value
    return from_dict(EngineProfile, data | {"name": f"{data['name']} {engine.version}", "version": ""}, "engine.earlier: ")


def _release(text: Any, where: str) -> Any:
    """Reads a release, for comparisons. A number would have lost its last zero."""
    from packaging.version import InvalidVersion, Version

    try:
        return Version(Version(text).base_version)
    except (InvalidVersion, TypeError):
        raise ConfigError(f"{where}={text!r} is not a release; write it as in '0.8.2', in quotes in a file") from None


def filled(engine: EngineProfile, name: str, words: Mapping[str, object]) -> str:
    """Returns the line ``engine.NAME`` with ``words`` in place of its braces. Raises ``ConfigError`` if it has other names in braces."""
    line: str = getattr(engine, name)
    try:
        return " ".join(filled for word in line.split() if (filled := word.format(**words)))  # blanks inside a filled-in value stay
    except (KeyError, IndexError, ValueError, AttributeError):
        known = ", ".join(f"{{{word}}}" for word in words)
        raise ConfigError(f"engine.{name}={line!r} of {engine.name} cannot be filled in; in braces it may have {known}") from None


def check_lines(engine: EngineProfile) -> None:
    """Raises ``ConfigError`` for a line of the profile that cannot be filled in."""
    for name in ("command", "server"):
        filled(engine, name, dict.fromkeys(TEXTS, "") | dict.fromkeys(SIZES, 1))
    filled(engine, "across", dict.fromkeys(SEVERAL, 1))
