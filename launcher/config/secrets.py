"""Finds secrets that stand in clear in a cluster's settings. The settings of a trial are stored, printed, mirrored and read by many.

A setting is taken for a secret by its name (``OPENAI_KEY``, ``PGPASS``) or by its value (the prefix of a known sort of token, a private
key, an address with a password). Names count where people choose them: variables, labels, annotations, data, assignments in commands.
Elsewhere, as in ``topologyKey`` or ``secretName``, a schema sets them. Pure.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

from launcher.config.schema import ClusterConfig
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.limits.training import TRACKING_REMEDY, check_tracking_uri

_NAMES = ("env", "environment", "labels", "annotations", "data", "stringData", "matchLabels", "nodeSelector", "node_selector")
"""Mappings whose keys people choose."""

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_SURE = re.compile(r"[a-z]*(token|secrets?|passwords?|passwd|passphrase|pwd|credentials?|creds?|apikeys?|accesskeys?|privatekey)")
"""Words that name a secret anywhere in a name."""
_PAIRS = {("api", "key"), ("access", "key"), ("private", "key")}
_LIKELY = re.compile(r"keys?|auth|authorization|pat|jwt|cookie|dsn|(?!by|com|multi|tres)[a-z]*pass")
"""Words that name a secret at the end of a name, unless the value is a small number."""
_ABOUT = {"file", "path", "dir", "folder", "name", "url", "uri", "arn", "type", "count", "limit", "length", "ttl", "expiry"}
"""Last words of names that refer to a secret without holding one."""
_HARMLESS = re.compile(r"(?i)|true|false|yes|no|on|off|none|null|(/[\w.@-]{1,40})+/?")
"""Values that are not secrets under any name: switches and paths."""
_VALUES = {what: re.compile(pattern) for what, pattern in {
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY",
    "an address with a password": r"://[^/\s:@]*:[^/\s@]+@",
    "an authorization": r"(?i)\b(?:bearer|basic)\s+[\w.~+/=-]{16,}",
    "a token": r"(?<![A-Za-z0-9])(?:"
    r"gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|hf_[A-Za-z0-9]{20,}|sk-[\w-]{16,}|[sr]k_(?:live|test)_\w{16,}"
    r"|xox[a-z]-[\w-]{10,}|AIza[\w-]{30,}|ya29\.[\w-]{20,}|(?:AKIA|ASIA)[A-Z0-9]{16}|npm_[A-Za-z0-9]{30,}|pypi-[\w-]{30,}|dop_v1_\w{30,}"
    r"|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*|https://hooks\.slack\.com/services/\S+)",
}.items()}  # fmt: skip
_ASSIGNMENT = re.compile(r"(?<![\w$./-])-{0,2}([A-Za-z][\w.-]*)(?:=|[\"']?:\s|[\"']:)\s*(?=(\"[^\"]*\"|'[^']*'|[^\s;&|]+))")
"""``NAME=value``, ``--name=value``, ``name: value`` or ``"name":"value"`` in a command, an address or a file."""


def secrets_in(settings: Any, place: str = "", free: Sequence[str] = _NAMES) -> Iterator[tuple[str, str]]:
    """Yields ``(key, sort of secret)`` for every secret in ``settings`` (dataclasses, mappings, lists, scalars). ``place`` is the key of
    the whole; ``free`` are the mappings whose keys people choose."""
    yield from _search(settings, place, free, named=False)


def refuse_secrets(cluster: ClusterConfig) -> None:
    """Raises ``ConfigError`` for the first secret in the settings of ``cluster``. The message names the key and never repeats the value;
    its remedy names the variable, or ``NAME`` if the secret is not in one."""
    settings = {name: value for name, value in vars(cluster).items() if name != "hardware"}  # large, and measured, not typed
    for key, what in secrets_in(settings, "cluster"):
        last = key.rpartition(".")[2]
        name = last if re.fullmatch(r"[A-Z_][A-Z0-9_]*", last) else "NAME"
        raise ConfigError(
            f"{key} looks like {what} in clear, which whoever reads the trial would see; {cluster.secrets_go.format(name=name)}"
        )


def refuse_secret_address(uri: str | None) -> None:
    """Raises ``ConfigError`` for a password or token in ``tracking.uri``, and does not repeat the address."""
    check_tracking_uri(uri)
    if uri is not None and (what := _looks_like(uri)):
        raise ConfigError(f"tracking.uri holds {what} in clear, which whoever reads the trial would see; {TRACKING_REMEDY}")


def _search(item: Any, place: str, free: Sequence[str], named: bool) -> Iterator[tuple[str, str]]:
    """Yields the secrets in ``item``. ``named``: people have chosen the keys of ``item``, a mapping."""
    if is_dataclass(item):
        yield from _search(vars(item), place, free, named)
    elif isinstance(item, Mapping):
        yield from _search_mapping(item, place, free, named)
    elif isinstance(item, Sequence) and not isinstance(item, str):
        yield from _search_list(item, place, free)
    elif item is not None and (what := _looks_like(str(item))):
        yield place, what


def _search_mapping(item: Mapping[str, Any], place: str, free: Sequence[str], named: bool) -> Iterator[tuple[str, str]]:
    if not named and isinstance(item.get("value"), str) and isinstance(item.get("name"), str):
        yield from _search({item["name"]: item["value"]}, place, free, named=True)  # a variable as Kubernetes writes it
        return
    for name, value in item.items():
        inner = f"{place}.{name}" if place else str(name)
        if named and not isinstance(value, Mapping | list) and names_a_secret(str(name), "" if value is None else str(value)):
            yield inner, "a secret"
        else:
            yield from _search(value, inner, free, named=name in free)


def _search_list(items: Sequence[Any], place: str, free: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields the secrets in a list, by the number of the item; ``--password`` and its value may be two items."""
    for number, item in enumerate(items):
        following = items[number + 1] if number + 1 < len(items) else None
        option = isinstance(item, str) and re.fullmatch(r"--?[A-Za-z][\w-]*", item)
        if option and isinstance(following, str) and not following.startswith("-") and names_a_secret(item.lstrip("-"), following):
            yield f"{place}.{number + 1}", "a secret"
        else:
            yield from _search(item, f"{place}.{number}", free, named=False)


def _looks_like(text: str) -> str:
    """Returns the sort of secret that ``text`` holds; empty if none."""
    for what, pattern in _VALUES.items():
        if pattern.search(text):
            return what
    given = [(name, value.strip("\"'")) for name, value in _ASSIGNMENT.findall(text)]
    return "a secret" if any(names_a_secret(name, value) and not value.startswith("$") for name, value in given) else ""


def names_a_secret(name: str, value: str) -> bool:
    """Returns whether a variable of this name and value holds a secret, by the words of its name."""
    words = [word.lower() for word in _WORD.findall(name)]
    while words and words[-1].isdigit():
        words.pop()
    if not words or words[-1] in _ABOUT or _HARMLESS.fullmatch(value):
        return False
    sure = any(map(_SURE.fullmatch, words)) or any(pair in _PAIRS for pair in itertools.pairwise(words))
    return sure or (_LIKELY.fullmatch(words[-1]) is not None and not re.fullmatch(r"\d{1,3}", value))
