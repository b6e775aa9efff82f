"""The header of a GGUF file, read with the standard library alone: its fields, the names of its tensors, and the model that they describe.

Form: ggml's docs/gguf.md. Numbers are little-endian; a text is its length and UTF-8; a tensor its name, shape, type and offset.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from trainer.shared.families.registry import FAMILIES
from trainer.shared.records.rope_factors import shortest, stretching
from trainer.shared.run.derived import resolve_model
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.limits.model import check_model
from trainer.shared.run.read import from_dict, nested
from trainer.shared.run.resolved import ResolvedModelConfig
from trainer.shared.run.schema import ModelConfig

LENGTHS = {"layers": "block_count", "hidden": "embedding_length", "ffn": "feed_forward_length", "seq": "context_length",
           "heads": "attention.head_count", "kv_heads": "attention.head_count_kv"}  # fmt: skip
UNDERSTOOD = {
    *LENGTHS.values(), "vocab_size", "rope.freq_base", "rope.scaling.type", "attention.layer_norm_epsilon",
    "attention.layer_norm_rms_epsilon", "attention.causal", "tensor_data_layout", "attention.key_length",
    "rope.scaling.original_context_length", "rope.scaling.attn_factor",
}  # fmt: skip
"""Fields of an architecture that are read, or whose value is the same for every model here."""
SCALED = {"none": {}, "linear": {"factor": "factor"}, "yarn": {"factor": "factor", "original": "original_context_length"}}
"""Keys of ``model.rope`` by ``rope.scaling.type``, and their fields behind ``rope.scaling.``."""
BIASES = {"qkv": "attn_qkv attn_q", "output": "attn_output", "up": "ffn_up", "down": "ffn_down"}
"""Tensors of a block that have a bias if a matrix has one."""
FACTORS = {"rope_freqs.weight": "llama3", "rope_factors_short.weight": "longrope", "rope_factors_long.weight": "longrope"}
"""Tensors of divisors of the rotary frequencies, a number for each pair of dimensions, and the kind of scaling that they mean."""
CORRECTION = ".exp_probs_b."
"""A tensor of the corrections of experts' scores in the choice, which stay as they are."""
F32, ALIGNMENT = 0, 32
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
MOST_BYTES = 1 << 26
"""The longest plausible text: a header with a longer one is damaged."""


class Header(NamedTuple):
    """The parts of a file that tell its model."""

    fields: Mapping[str, Any]
    tensors: set[str]
    factors: Mapping[str, Sequence[float]] = {}  # the values of those of ``FACTORS``


def read_header(source: Path) -> Header:
    """Reads a file's header and its factors of rotary frequencies. Raises ``ConfigError`` if they cannot be read."""
    try:
        with source.open("rb") as file:
            if _bytes(file, 4) != b"GGUF" or _number(file, "I") not in (2, 3):
                raise ValueError("its version is neither 2 nor 3")
            tensors, fields = _number(file, "Q"), _number(file, "Q")
            known = {_text(file): _value(file, _number(file, "I")) for _ in range(fields)}
            stored = dict(_tensor(file) for _ in range(tensors))
            aligned = int(known.get("general.alignment", ALIGNMENT))
            begin = -(-file.tell() // aligned) * aligned
            factors = {name: _factors(file, begin, name, *stored[name]) for name in FACTORS if name in stored}
            return Header(known, {*stored}, factors)
    except (OSError, ValueError, KeyError, ZeroDivisionError) as error:
        raise ConfigError(f"{source} cannot be read as GGUF: {error}; give a whole .gguf file") from None


def model_in(header: Header, source: Path) -> ResolvedModelConfig:
    """Returns the model that a header describes. Raises ``ConfigError`` if that is not trained here."""
    fields, tensors, factors = header
    architecture = fields.get("general.architecture")
    families = {(form.architecture, form.mixes): one for one in reversed(FAMILIES.values()) if (form := one.gguf)}  # of several, the first
    mixes = bool(fields.get(f"{architecture}.expert_count"))
    raw = {
        name.removeprefix(f"{architecture}."): shortest(value) if isinstance(value, float) else value
        for name, value in fields.items()
        if name.startswith(f"{architecture}.")
    }
    alike = [one for one in FAMILIES.values() if (form := one.gguf) and (form.architecture, form.mixes) == (architecture, mixes)]
    family = next((one for one in alike if one.gguf and one.gguf.suits(raw)), None)
    if family is None or family.gguf is None:
        known_there = ", ".join(f"{name} with experts" if mixing else name for name, mixing in families)
        raise ConfigError(f"{source}: general.architecture={architecture!r}{' with experts' * mixes} cannot be imported; use {known_there}")
    lengths = {ours: _length(fields, f"{architecture}.{theirs}", source) for ours, theirs in LENGTHS.items() if ours != "kv_heads"}
    lengths["kv_heads"] = _length(fields, f"{architecture}.{LENGTHS['kv_heads']}", source, lengths["heads"])
    if (width := fields.get(f"{architecture}.attention.key_length")) and width * lengths["heads"] != lengths["hidden"]:
        lengths["head_width"] = int(width)
    width = int(width or lengths["hidden"] // max(1, lengths["heads"]))
    scaling = _scaling(fields, f"{architecture}.rope.scaling.", source)
    known = {f"rope.scaling.{name}" for name in SCALED[scaling["kind"].replace("default", "none")].values()}
    known |= {one.name for one in family.gguf.fields.values()} | family.gguf.stated.keys()
    turning = fields.get(f"{architecture}.rope.dimension_count")
    if family.gguf.partial and turning and turning < width:
        scaling["share"] = turning / width
        known.add("rope.dimension_count")
    _check_understood(fields, f"{architecture}.", width, source, known)
    vocab = fields.get(f"{architecture}.vocab_size") or len(fields.get("tokenizer.ggml.tokens", ()))
    eps = fields.get(f"{architecture}.attention.layer_norm{'_rms' if family.default('norm') == 'rms' else ''}_epsilon", 1e-5)
    rope = float(fields.get(f"{architecture}.rope.freq_base", 10000.0))
    facts: dict[str, Any] = {
        "family": family.name,
        "vocab": int(vocab),
        "tied": "output.weight" not in tensors,
        "norm_eps": shortest(eps),
        "rope_theta": rope,
        "rope": scaling | _scaled(fields, f"{architecture}.rope.scaling.", factors, turning or width, rope, lengths["seq"], source),
        "biases": [ours for ours, theirs in BIASES.items() if any(f"blk.0.{name}.bias" in tensors for name in theirs.split())],
    }
    for ours, one in family.gguf.fields.items():
        if (value := fields.get(f"{architecture}.{one.name}")) is not None:
            facts[ours] = one.read(shortest(value) if isinstance(value, float) else value)
    if any(CORRECTION in name for name in tensors):
        facts["experts.correction"] = 0.0
    implied = family.gguf.implied(raw | {"head_width": width} | facts | lengths)
    facts["rope"] |= {key.removeprefix("rope."): value for key, value in implied.items() if key.startswith("rope.")}
    told = {key: value for key, value in implied.items() if not key.startswith("rope.")}
    model = from_dict(ModelConfig, nested(facts | lengths | told), "model.")
    check_model(model)
    return resolve_model(model)


def _length(fields: Mapping[str, Any], name: str, source: Path, default: int | None = None) -> int:
    """Returns a number of the header. The format allows one for each layer instead: those must be equal."""
    value = fields.get(name, default)
    numbers = set(value) if isinstance(value, list) else {value}
    if numbers <= {None}:
        raise ConfigError(f"{source} has no field {name}, which such a model needs")
    if len(numbers) > 1:
        raise ConfigError(f"{source}: {name} differs from layer to layer ({value}), which is not trained here; all layers must be alike")
    return int(numbers.pop()) or default or 0


def _scaling(fields: Mapping[str, Any], prefix: str, source: Path) -> dict[str, Any]:
    """Returns the keys of ``model.rope``."""
    kind = str(fields.get(f"{prefix}type", "none"))
    if kind not in SCALED:
        raise ConfigError(f"{source}: rope.scaling.type={kind!r} cannot be imported; use {', '.join(SCALED)}")
    found = {ours: fields[f"{prefix}{theirs}"] for ours, theirs in SCALED[kind].items() if f"{prefix}{theirs}" in fields}
    return {"kind": kind if found else "default", **found}


def _scaled(
    fields: Mapping[str, Any], prefix: str, factors: Mapping[str, Sequence[float]], width: int, theta: float, seq: int, source: Path
) -> dict[str, Any]:
    """Returns the keys of ``model.rope`` that a file states by its divisors of the frequencies."""
    kind = next((kind for name, kind in FACTORS.items() if name in factors and set(factors[name]) != {1.0}), None)
    if kind == "llama3":
        stretched = stretching([*factors["rope_freqs.weight"]], width, theta)
        if stretched is None:
            raise ConfigError(
                f"{source}: the tensor rope_freqs.weight does not scale rotary positions as Llama 3.1 does, the only way trained here"
            )
        return {"kind": kind, **stretched}
    if kind is None:
        return {}
    original = int(fields.get(f"{prefix}original_context_length") or seq)
    if missing := sorted(name for name, meant in FACTORS.items() if meant == kind and name not in factors):
        raise ConfigError(f"{source} has no tensor {missing[0]}, which belongs to the other one of its factors; it is incomplete")
    if original < 2:
        raise ConfigError(f"{source}: {prefix}original_context_length={original} must be 2 or more")
    longer = max(1.0, seq / original)
    found: dict[str, Any] = {"kind": kind, "original": original, "factor": longer}
    found |= {ours: [shortest(each) for each in factors[f"rope_factors_{ours}.weight"]] for ours in ("short", "long")}
    usual = math.sqrt(1 + math.log(longer) / math.log(original)) if longer > 1 else 1.0
    magnitude = float(fields.get(f"{prefix}attn_factor", 1.0))
    return found if math.isclose(magnitude, usual, rel_tol=1e-6) else found | {"magnitude": shortest(magnitude)}


def _check_understood(fields: Mapping[str, Any], prefix: str, head: int, source: Path, known: set[str]) -> None:
    """Raises ``ConfigError`` for a field of the architecture that would make another model than the one read here. A field that is off (0,
    false) would not."""
    widths = dict.fromkeys(("rope.dimension_count", "attention.value_length"), head)
    for name, value in fields.items():
        key = name.removeprefix(prefix)
        if key == name or not value or key in UNDERSTOOD | known or value == widths.get(key):
            continue
        allowed = f"only {widths[key]} is trained here" if key in widths else "nothing here understands it"
        raise ConfigError(f"{source}: {name}={value!r} cannot be imported; {allowed}")


def _bytes(file: IO[bytes], count: int) -> bytes:
    data = file.read(count) if count <= MOST_BYTES else b""
    if len(data) != count:
        raise ValueError("it ends too early")
    return data


def _number(file: IO[bytes], form: str) -> Any:
    return struct.unpack(f"<{form}", _bytes(file, struct.calcsize(f"<{form}")))[0]


def _text(file: IO[bytes]) -> str:
    return _bytes(file, _number(file, "Q")).decode("utf-8")


def _value(file: IO[bytes], kind: int) -> Any:
    if kind == STRING:
        return _text(file)
    if kind == ARRAY:
        inner, count = _number(file, "I"), _number(file, "Q")
        return [_value(file, inner) for _ in range(count)]
    return _number(file, SCALARS[kind])


def _tensor(file: IO[bytes]) -> tuple[str, tuple[int, int, int]]:
    """Returns a tensor's name, and its number of elements, type and offset."""
    name = _text(file)
    shape = [_number(file, "Q") for _ in range(_number(file, "I"))]
    return name, (math.prod(shape), _number(file, "I"), _number(file, "Q"))


def _factors(file: IO[bytes], begin: int, name: str, count: int, kind: int, offset: int) -> list[float]:
    if kind != F32:
        raise ValueError(f"the tensor {name} is not in 4 bytes")
    file.seek(begin + offset)
    return [*struct.unpack(f"<{count}f", _bytes(file, 4 * count))]
