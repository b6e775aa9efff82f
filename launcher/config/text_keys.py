"""Keys whose values are text. Hydra's grammar reads ``2024_05_01`` as a number, ``main,one`` as two values and ``n[1-4]`` not at all; a key
of text takes such values as they are typed."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from launcher.config.clusters import backend_names, cluster_class
from launcher.config.composed import override_parser
from launcher.config.schema import Config
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.value_types import ValueType, keys_of

_PLAIN = re.compile(r"[A-Za-z_/][A-Za-z0-9_./-]*")
_OTHERWISE = ("true", "false", "inf", "nan")
"""Plain words that are not text to Hydra's parser. Most text is plain, and the parser, which takes a millisecond, is not needed for it."""
_CHOICE = re.compile(r"choice\((.*)\)", re.DOTALL)


TEXT, NO_KEY = ValueType(str), ValueType(None)


def type_at(kind: ValueType, path: Sequence[str]) -> tuple[ValueType, Mapping[str, Any]]:
    """Returns the type at ``path`` in a value of type ``kind``, and the metadata of its field; ``NO_KEY`` if there is no such key."""
    metadata: Mapping[str, Any] = {}
    for name in path:
        if kind.keyed:
            kind, field = keys_of(kind.base).get(name, (NO_KEY, None))
            metadata = field.metadata if field else {}
        elif kind.base is dict:
            kind = kind.holds
    return kind, metadata


@cache
def type_of_key(key: str, backend: str | None = None) -> tuple[ValueType, Mapping[str, Any]]:
    """Returns ``type_at`` of a dotted key of a run, on a cluster of ``backend`` or of any."""
    section, *path = key.split(".")
    if section != "cluster":
        return type_at(ValueType(Config), [section, *path])
    found = [type_at(ValueType(cluster_class(name)), path) for name in ([backend] if backend else backend_names())]
    return next((each for each in found if each[0] is not NO_KEY), (NO_KEY, {}))


def is_text(key: str, own: Sequence[type] = ()) -> bool:
    """Returns whether a key of a run, or of one of its ``own`` settings, is text, or each entry of its list."""
    kind = next((kind for root in own if (kind := type_at(ValueType(root), [key])[0]) is not NO_KEY), type_of_key(key)[0])
    while kind.base is list:
        kind = kind.holds
    return kind.base is str


def is_list(key: str, backend: str) -> bool:
    """Returns whether a key takes a list."""
    return type_of_key(key, backend)[0].base is list


def several_texts(override: str) -> bool:
    """Returns whether a comma in a sweep separates values of a key that takes any text, in which a comma may be meant."""
    key, _, value = override.lstrip("+").partition("=")
    kind, metadata = type_of_key(key)
    return kind.base is str and not metadata.get("choices") and len(split(value)) > 1


def in_quotes(text: str) -> str:
    """Quotes ``text`` so that Hydra's grammar reads it back."""
    from hydra.core.override_parser.types import Quote, QuotedString

    return QuotedString(text, Quote.double).with_quotes()


def exactly(text: str) -> str:
    """Quotes ``text`` so that neither Hydra nor an interpolation changes it."""
    return in_quotes(re.sub(r"(\\*)\$\{", r"\1\1\\${", text))


def set_texts(pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Returns the overrides that give keys their texts; texts of one key of a list are its entries. Raises ``ConfigError`` for a key that
    is not text."""
    texts: dict[str, list[str]] = {}
    for key, text in pairs:
        if not re.fullmatch(r"\+{0,2}[^\s=]+", key):
            raise ConfigError(f"--set {key!r}: a KEY and a TEXT are two words, as in --set sweep.name 'a,b'")
        texts.setdefault(key, []).append(text)
    return [_set_text(key, values) for key, values in texts.items()]


def _set_text(key: str, values: Sequence[str]) -> str:
    kind = type_of_key(key.lstrip("+"))[0]
    if kind.base is list and kind.holds.base is str:
        return f"{key}=[{','.join(map(exactly, values))}]"
    if kind not in (TEXT, NO_KEY, dataclasses.replace(TEXT, optional=True)):
        raise ConfigError(f"--set {key} {shlex.quote(values[0])}: {key} is not text; write {shlex.quote(f'{key}={values[0]}')}")
    return f"{key}={exactly(values[-1])}"


def as_typed(value: str, kind: ValueType, several: bool) -> str:
    """Returns the part of an override behind ``=``, with quotes around any value, nested too, that is text by ``kind`` and something else
    to Hydra. ``several``: a comma separates the values of a sweep."""
    bare = value.strip()
    if several and kind.base is str and (choice := _CHOICE.fullmatch(bare)):
        bare = choice[1]  # the same without choice(), which removes quotes
    if several and len(pieces := split(bare)) > 1:
        return ",".join(as_typed(piece, kind, False) for piece in pieces)
    if kind.base is str:
        return value if _is_word(bare) else in_quotes(bare)
    inside, brackets = bare[1:-1], bare[:1] + bare[-1:]
    if kind.base is list and brackets == "[]":
        return "[" + ",".join(as_typed(piece, kind.holds, False) for piece in split(inside)) + "]"
    if (kind.base is dict or kind.keyed) and brackets == "{}":
        pairs = [piece.partition(":") for piece in split(inside)]
        return "{" + ",".join(name + colon + as_typed(entry, type_at(kind, [name.strip()])[0], False) for name, colon, entry in pairs) + "}"
    return value


def _is_word(bare: str) -> bool:
    """Returns whether Hydra reads text, or a value that a key of text refuses or gives a meaning: null, a list, a mapping,
    ``range(1,3)``."""
    from hydra.core.override_parser.types import ChoiceSweep
    from hydra.errors import HydraException

    if _PLAIN.fullmatch(bare):
        return bare.lower() not in _OTHERWISE
    try:
        found = override_parser().parse_overrides([f"key={bare}"])[0].value()
    except (HydraException, ValueError, RecursionError):
        return False
    return not isinstance(found, (int, float)) and not (isinstance(found, ChoiceSweep) and found.simple_form)


def split(value: str) -> list[str]:
    """Splits ``value`` at commas that stand neither in quotes nor in brackets, by Hydra's grammar. Blank text has no pieces."""
    pieces, depth, quote, escaped = [""], 0, "", False
    for letter in value:
        if letter == "," and not (depth or quote or escaped):
            pieces.append("")
            continue
        if quote:
            quote = "" if letter == quote and not escaped else quote
        elif letter in "'\"" and pieces[-1].rstrip()[-1:] in "[{(:,":  # only at the beginning of a value: not the apostrophe of it's
            quote = letter
        elif not escaped:
            depth = max(0, depth + (letter in "[{(") - (letter in "]})"))
        escaped = letter == "\\" and not escaped
        pieces[-1] += letter
    return pieces if value.strip() else []
