"""Checks names, labels, quantities and variables for an API server before anything is sent. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from launcher.config.schema import ClusterConfig
from trainer.shared.run.errors import ConfigError, listed, nearest

_LONGEST = 60
"""Characters of a value in an error."""
_LABEL = r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?"
_DNS = rf"{_LABEL}(?:\.{_LABEL})*"
_WORD = r"[A-Za-z0-9](?:[-_.A-Za-z0-9]{0,61}[A-Za-z0-9])?"
_WORDS = "up to 63 letters, digits, '-', '_' and '.', a letter or digit at both ends"


@dataclass(frozen=True)
class Syntax:
    """Describes a form of text. ``what`` names it, ``allowed`` tells the user which values are valid."""

    what: str
    allowed: str
    pattern: str
    longest: int = 253

    def check(self, value: str, said: str) -> None:
        """``ConfigError`` if ``value`` is not of this form; ``said`` is how it was given."""
        if len(value) > self.longest or not re.fullmatch(self.pattern, value):
            raise ConfigError(f"{said} is not {self.what}; give {self.allowed}")


_SUFFIXES = "Ki, Mi, Gi, Ti (powers of 1024), k, M, G, T (of 1000), m (a thousandth)"
NAME = Syntax("the name of an object", "small letters, digits, '-' and '.', a letter or digit at both ends", _DNS)
QUEUE = Syntax(NAME.what, f"up to 63 {NAME.allowed}", _DNS, 63)
NAMESPACE = Syntax("the name of a namespace", "up to 63 small letters, digits and '-', a letter or digit at both ends", _LABEL, 63)
LABEL_KEY = Syntax("the name of a label or annotation", f"{_WORDS}; with or without DOMAIN/ before it", rf"(?:{_DNS}/)?{_WORD}", 317)
LABEL_VALUE = Syntax("the value of a label", f"{_WORDS}, or nothing", rf"(?:{_WORD})?", 63)
RESOURCE = Syntax("a resource of a device plugin", "VENDOR/NAME, such as nvidia.com/gpu, or null", rf"{_DNS}/{_WORD}", 317)
VARIABLE = Syntax(
    "the name of a variable",
    "letters, digits, '_', '-' and '.', no digit or '..' at its beginning",
    r"(?!\.\.|\.$)[-._a-zA-Z][-._a-zA-Z0-9]*",
    1000,
)
QUANTITY = Syntax(
    "a quantity",
    f"a number, 0 or more, with one of Kubernetes' suffixes or none: {_SUFFIXES}",
    r"\+?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[KMGTPE]i|[numkMGTPE]|[eE][-+]?[0-9]+)?",
)
IMAGE = Syntax("the name of an image", "one without spaces, such as REGISTRY/trireme:1", r"\S+", 4096)
FOLDER = Syntax("an absolute path", "one that begins with '/'", r"/[^\0]*", 4096)

_VALUES = {
    "namespace": NAMESPACE, "runtime": NAME, "queue": QUEUE, "queue_priority": QUEUE, "topology": LABEL_KEY, "service_account": NAME,
    "priority_class": NAME, "pull_secrets": NAME, "gpu_resource": RESOURCE, "rdma_resource": RESOURCE, "cpu": QUANTITY, "memory": QUANTITY,
    "shared_memory": QUANTITY,
}  # fmt: skip
"""The form of a key's value, or of each in its list."""
_PAIRS: dict[str, tuple[Syntax, Syntax | None]] = {
    "node_selector": (LABEL_KEY, LABEL_VALUE), "labels": (LABEL_KEY, LABEL_VALUE), "annotations": (LABEL_KEY, None),
    "env": (VARIABLE, None), "secrets": (VARIABLE, None),
}  # fmt: skip
"""The forms of names and values in a mapping."""


def check_values(cluster: ClusterConfig) -> None:
    """``ConfigError`` for the first value of a Kubernetes cluster that an API server would refuse for its form."""
    image, workdir = cluster.container.image, cluster.container.workdir
    IMAGE.check(image or "", said("cluster.container.image", image))
    if workdir is not None:
        FOLDER.check(workdir, said("cluster.container.workdir", workdir))
    for field, syntax in _VALUES.items():
        given = getattr(cluster, field)
        for value in given if isinstance(given, list) else [] if given is None else [given]:
            syntax.check(value, said(f"cluster.{field}", value))
    for field, (names, values) in _PAIRS.items():
        for name, value in getattr(cluster, field).items():
            names.check(name, f"cluster.{field}: {name[:_LONGEST]!r}")
            if values is not None:
                values.check(value, said(f"cluster.{field}.{name[:_LONGEST]}", value))


def said(key: str, value: object) -> str:
    return f"{key}={str(value)[:_LONGEST]!r}"


OPERATORS = ("Exists", "Equal", "Lt", "Gt")
EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")


def check_tolerations(tolerations: Sequence[Any]) -> None:
    """``ConfigError`` for the first that no server takes. Types and names of fields are Kubernetes' schema's to check."""
    for number, given in enumerate(tolerations):
        place, operator = f"cluster.tolerations.{number}", given.get("operator") or "Equal"
        for name, value, known in (("operator", operator, OPERATORS), ("effect", given.get("effect") or "NoSchedule", EFFECTS)):
            if value not in known:
                raise ConfigError(f"{said(f'{place}.{name}', value)} is not one of {listed(known)}{nearest(str(value), known)}")
        if operator == "Exists" and given.get("value"):
            raise ConfigError(f"{said(f'{place}.value', given['value'])} is compared with nothing by operator=Exists; use operator: Equal")
        if operator != "Exists" and not given.get("key"):
            raise ConfigError(f"{place} has no key, which only operator=Exists can do without; give one, or operator: Exists")
        if given.get("tolerationSeconds") is not None and given.get("effect") != "NoExecute":
            raise ConfigError(f"{place}.tolerationSeconds is for effect=NoExecute alone; give that effect, or leave the seconds out")
