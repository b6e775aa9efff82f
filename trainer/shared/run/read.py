"""Converts plain data (YAML, JSON, a composed Hydra config) to dataclasses, strictly; and back."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import math
import re
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from trainer.shared.run.errors import ConfigError, listed, nearest
from trainer.shared.run.files import write_text
from trainer.shared.run.schema import TrainConfig
from trainer.shared.run.value_types import ValueType, keys_of

T = TypeVar("T")
SURROGATE = re.compile("[\ud800-\udfff]")
"""Half of a character alone, which no file and no tokenizer takes. Bytes of a command line that are not UTF-8 are read as such."""
SECTION = "stage"
"""Section of a run's file that ``load`` leaves to ``trainer.shared.records.stage_run``."""


def from_dict(cls: type[T], data: Mapping[str, Any], where: str = "") -> T:
    """Builds ``cls`` from ``data``. Raises ``ConfigError`` for unknown keys, wrong types and values out of range.

    ``where`` is the dotted path of ``data`` in the whole configuration, used in messages.
    """
    return _build(cls, data, where, strict=True)


def from_record(cls: type[T], data: Mapping[str, Any]) -> T:
    """Builds ``cls`` from a record of any version: keys that no longer exist are dropped, new ones take their defaults.

    ``ConfigError`` for a value that this version does not accept.
    """
    return _build(cls, data, "", strict=False)


def _build(cls: type[T], data: Mapping[str, Any], where: str, strict: bool) -> T:
    """Builds a dataclass from ``data``; only a ``strict`` reading refuses unknown keys."""
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where.rstrip('.') or 'the configuration'}={data!r} is not a mapping of keys to values")
    known = keys_of(typing.cast(Any, cls))
    for name in data:
        if strict and name not in known:
            raise ConfigError(f"unknown key {where}{name}{nearest(str(name), known)} (known: {', '.join(known)})")
    values = {}
    for name in [name for name in data if name in known]:
        kind, field = known[name]
        value = data[name] if strict else _known(data[name], field.metadata)
        values[name] = _convert(kind, value, where + name, strict)
        _check_range(field.metadata, values[name], where + name)
    return cls(**values)


def _known(value: Any, metadata: Mapping[str, Any]) -> Any:
    """Returns ``value``; for a mapping with a choice of keys, only those that still exist."""
    choices = metadata.get("choices")
    return {name: entry for name, entry in value.items() if name in choices} if choices and isinstance(value, Mapping) else value


def to_dict(config: Any) -> dict[str, Any]:
    """Inverts ``from_dict``: returns nested plain dicts, in field order."""
    return {f.name: _plain(getattr(config, f.name)) for f in dataclasses.fields(config)}


def _plain(value: Any) -> Any:
    """Returns ``value`` as plain data. Faster than ``dataclasses.asdict``: sweeps have thousands of configurations."""
    if type(value) in (str, int, float, bool, type(None)):
        return value
    if dataclasses.is_dataclass(value):
        return to_dict(value)
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, list) else copy.deepcopy(value)


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """Returns ``{"layout.sharding.params": 1, ...}``, for MLflow parameters and difference tables."""
    flat: dict[str, Any] = {}
    for name, value in (config if isinstance(config, dict) else to_dict(config)).items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Turns ``{"rope.kind": 1}`` into ``{"rope": {"kind": 1}}``."""
    found: dict[str, Any] = {}
    for name, value in flat.items():
        section, _, key = name.rpartition(".")
        (found.setdefault(section, {}) if section else found)[key] = value
    return found


def load(path: str | Path) -> TrainConfig:
    """Reads one resolved run, as written by the launcher or by hand. Raises ``ConfigError`` if it cannot be read."""
    data = read_yaml(path)
    return from_dict(TrainConfig, {name: value for name, value in data.items() if name != SECTION} if isinstance(data, dict) else data)


def read_yaml(path: str | Path) -> Any:
    """Reads the content of a file, an empty mapping if there is none. Raises ``ConfigError`` if it cannot be read.

    JSON is YAML too, and read without a YAML library, which the environment of another trainer may lack.
    """
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the configuration {path}: {error}") from None
    with contextlib.suppress(ValueError):
        return json.loads(text)
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the same data several times faster, where it is built
    try:
        data = yaml.load(text, Loader=loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {str(error).splitlines()[0]}") from None
    return data if data is not None else {}


def save(config: Any, path: str | Path, *, durable: bool = True) -> None:
    """Writes a configuration as text that ``load`` reads back equal. Atomic: a reader never sees a part of it, with ``durable`` not even
    after a power failure."""
    write_text(Path(path), as_text(config if isinstance(config, dict) else to_dict(config)), durable=durable)


def as_text(config: Mapping[str, Any]) -> str:
    """Returns a run as YAML; that of another trainer as JSON (``read_yaml`` says why)."""
    if config.get("command"):
        return json.dumps(config, indent=1) + "\n"
    import yaml

    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # the same text several times faster, where it is built
    return str(yaml.dump(dict(config), Dumper=dumper, sort_keys=False))


def _convert(kind: ValueType, value: Any, where: str, strict: bool) -> Any:
    if kind.base is Any or (value is None and kind.optional):
        return value
    if kind.keyed:
        return value if isinstance(value, kind.base) else _build(kind.base, value, where + ".", strict)
    if kind.base is list:
        if not isinstance(value, (list, tuple)):
            raise _wrong_type(where, value, "a list")
        return [_convert(kind.holds, v, f"{where}[{i}]", strict) for i, v in enumerate(value)]
    if kind.base is dict:
        if not isinstance(value, Mapping):
            raise _wrong_type(where, value, "a mapping")
        return {str(k): _convert(kind.holds, v, f"{where}.{k}", strict) for k, v in value.items()}
    return _convert_scalar(kind.base, value, where)


def _convert_scalar(hint: Any, value: Any, where: str) -> Any:
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise ConfigError(f"{where} is too large a number; give one below 1e308") from None
    if hint is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if hint is str and type(value) in (int, float):
        value = str(value)  # sweep.name=2026 means the text
    if type(value) is not hint:
        raise _wrong_type(where, value, words.get(hint, hint.__name__))
    if hint is float and not math.isfinite(value):
        raise _wrong_type(where, value, "a finite number")
    if hint is str and SURROGATE.search(value):
        raise ConfigError(f"{where}={value!a} is not UTF-8 text; give another name, or convert this one")
    if hint is str and "\0" in value:
        raise ConfigError(f"{where} contains a NUL character, which no path or label may; remove it")
    return value


def _wrong_type(where: str, value: Any, allowed: str) -> ConfigError:
    return ConfigError(f"{where}={'null' if value is None else repr(value)} is not {allowed}; give {allowed}")


def _check_range(metadata: Mapping[str, Any], value: Any, where: str) -> None:
    if value is None:
        return
    choices, minimum, above, maximum = (metadata.get(name) for name in ("choices", "minimum", "above", "maximum"))
    if isinstance(value, (list, dict)):
        _check_entries(metadata, value, where)
    elif choices and value not in choices:
        raise ConfigError(f"{where}={value!r} is not one of {listed(choices)}{nearest(str(value), choices)}")
    elif minimum is not None and value < minimum:
        raise ConfigError(f"{where}={value} is below the smallest allowed value; use {minimum:g} or more")
    elif above is not None and value <= above:
        raise ConfigError(f"{where}={value:g} is not above {above:g}; give a larger number, or leave it out where it is not known")
    elif maximum is not None and value > maximum:
        raise ConfigError(f"{where}={value} is above the largest allowed value; use {maximum} or less")
    elif type(value) is int and abs(value) >= 2**63:  # arrays hold no larger ones
        raise ConfigError(f"{where} is too large a number; give one below 2^63")


def _check_entries(metadata: Mapping[str, Any], values: list[Any] | dict[str, Any], where: str) -> None:
    """Checks each entry of a list, or each key and value of a mapping."""
    choices = metadata.get("choices")
    if isinstance(values, dict):
        for name, value in values.items():
            if choices and name not in choices:
                raise ConfigError(f"unknown key {where}.{name}{nearest(name, choices)} (known: {', '.join(choices)})")
            _check_range({**metadata, "choices": None}, value, f"{where}.{name}")
    elif choices:
        if not values and not metadata.get("empty"):
            raise ConfigError(f"{where}=[] leaves nothing to choose from; give one or more of {', '.join(map(str, choices))}")
        for index, value in enumerate(values):
            _check_range({"choices": choices}, value, f"{where}[{index}]")
    else:
        for index, value in enumerate(values):
            _check_range(metadata, value, f"{where}[{index}]")
