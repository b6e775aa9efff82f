"""Types of values, taken apart: the strict reader, the JSON schema and the records of trials all walk along these."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache, cached_property
from typing import Any


@dataclass(frozen=True)
class ValueType:
    """``base`` is a dataclass, a scalar, ``Any``, or a list, tuple or dict; ``optional`` allows None."""

    base: Any
    optional: bool = False
    holds: Any = None  # the ``ValueType`` of each entry of a list, tuple or dict

    @cached_property
    def keyed(self) -> bool:
        """Returns whether it is a dataclass, whose keys ``keys_of`` returns."""
        return dataclasses.is_dataclass(self.base)


@cache
def value_type(hint: Any) -> ValueType:
    """Parses an annotation, once. Only the first type of a union counts, and None."""
    if isinstance(hint, ValueType):
        return hint
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        inner = next(option for option in arguments if option is not type(None))
        return dataclasses.replace(value_type(inner), optional=True)
    return ValueType(origin or hint, holds=value_type(arguments[1 if origin is dict else 0]) if arguments else None)


@cache
def keys_of(cls: Any) -> Mapping[str, tuple[ValueType, dataclasses.Field[Any]]]:
    """Returns type and field of every key of a dataclass. ``holds`` in a field's metadata describes its plain data more closely than the
    annotation."""
    hints = typing.get_type_hints(cls)
    return {each.name: (value_type(each.metadata.get("holds", hints[each.name])), each) for each in dataclasses.fields(cls)}


def fits(hint: Any, value: Any) -> bool:
    """Returns whether plain data ``value`` is of the type ``hint``, unconverted. A dataclass may lack any keys, and others may be
    present."""
    return _fits(value_type(hint), value)


def _fits(kind: ValueType, value: Any) -> bool:
    base = kind.base
    if base is Any or (value is None and kind.optional):
        return True
    if base is str or base is int or base is bool:
        return type(value) is base
    if base is float:
        return type(value) in (int, float) and math.isfinite(value)
    if kind.keyed:
        keys = keys_of(base)
        return isinstance(value, Mapping) and all(_fits(keys[name][0], entry) for name, entry in value.items() if name in keys)
    if base in (list, tuple):
        return isinstance(value, list) and all(_fits(kind.holds, entry) for entry in value)
    if base is dict:
        return isinstance(value, Mapping) and all(_fits(kind.holds, entry) for entry in value.values())
    return value in list(base) if issubclass(base, Enum) else type(value) is base
