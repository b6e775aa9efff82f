"""A documented key of the configuration: a dataclass field with its manual, its bounds and its choices."""

from __future__ import annotations

from dataclasses import field, fields
from typing import Any

MOST = 10**9
"""The largest rank count, degree or batch: columns of layouts hold 32 bits, and no cluster is near."""


def key(
    default: Any,
    doc: str,
    *,
    choices: tuple[Any, ...] | None = None,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    empty: bool = False,
) -> Any:
    """Makes a documented field. ``minimum`` and ``maximum`` are inclusive, ``above`` is not; a mutable default is given as a callable.

    The ``choices`` of a list are its entries, at least one unless it may be ``empty``; those of a mapping its keys, and its values
    keep the bounds.
    """
    metadata = {"doc": doc, "choices": choices, "minimum": minimum, "above": above, "maximum": maximum, "empty": empty}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def field_docs(cls: type, prefix: str = "") -> dict[str, str]:
    """Returns ``{"layout.tensor": "tensor-parallel ranks", ...}`` for a config class, depth first."""
    docs: dict[str, str] = {}
    for f in fields(cls):
        nested = f.default_factory if isinstance(f.default_factory, type) else None
        if nested is not None and hasattr(nested, "__dataclass_fields__"):
            docs |= field_docs(nested, f"{prefix}{f.name}.")
        else:
            docs[prefix + f.name] = f.metadata["doc"]
    return docs
