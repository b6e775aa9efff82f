"""The configuration as a JSON schema (draft 2020-12), for editors that complete and check YAML files. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from launcher.config.clusters import backend_names, cluster_class
from launcher.config.schema import Config, HardwareConfig
from trainer.shared.run.errors import ConfigError, listed, nearest
from trainer.shared.run.value_types import ValueType, keys_of

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_TYPES = {int: "integer", float: "number", bool: "boolean", str: "string"}
_INTERPOLATION = {"type": "string", "pattern": r"\$\{.*\}"}


def json_schema(section: str | None = None) -> dict[str, Any]:
    """Returns the schema of a whole file (a recipe), or of the files of one ``section`` such as ``model`` or ``cluster``.

    A file holds only differences from the defaults, so no key is required; Hydra's ``defaults`` list may stand at the top. Raises
    ``ConfigError`` for an unknown section.
    """
    whole = _object(Config)
    whole["properties"]["cluster"] = {"anyOf": [_object(cluster_class(backend)) for backend in backend_names()]}
    if section is None:
        return _file(whole, "Trireme")
    sections = {**whole["properties"], "hardware": _object(HardwareConfig)}
    if "properties" not in sections.get(section, {}) and section != "cluster":
        known = [name for name, schema in sections.items() if name == "cluster" or "properties" in schema]
        raise ConfigError(f"--schema {section} names no section of the configuration{nearest(section, known)}; use {listed(known)}")
    return _file(sections[section], f"Trireme: {section}")


def _file(schema: dict[str, Any], title: str) -> dict[str, Any]:
    """Returns the schema of a file: its keys at the top, and the list of files that it starts from."""
    schemas = schema.get("anyOf", [schema])
    for one in schemas:
        one["properties"] = {
            "defaults": {"type": "array", "description": "Hydra's list of the files that this one starts from"},
            **one["properties"],
        }
    return {"$schema": DIALECT, "title": title, **schema}


def _object(cls: Any) -> dict[str, Any]:
    """Returns the schema of a dataclass: its keys, each with documentation, bounds and default."""
    return {
        "type": "object",
        "description": (cls.__doc__ or "").strip().splitlines()[0],
        "properties": {name: _of_key(kind, field) for name, (kind, field) in keys_of(cls).items()},
        "additionalProperties": False,
    }


def _of_key(kind: ValueType, field: dataclasses.Field[Any]) -> dict[str, Any]:
    schema = _of_type(kind, field.metadata)
    schema["description"] = field.metadata.get("doc", schema.get("description", ""))
    if field.default is not dataclasses.MISSING:
        schema["default"] = field.default
    return schema


def _of_type(kind: ValueType, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the schema of one value. A list's bounds apply to its entries, a mapping's choices to its keys."""
    if kind.optional:
        return {"anyOf": [_of_type(dataclasses.replace(kind, optional=False), metadata), {"type": "null"}]}
    if kind.keyed:
        return _object(kind.base)
    if kind.base is list:
        return {"type": "array", "items": _of_type(kind.holds, metadata)}
    if kind.base is dict:
        names = {"propertyNames": {"enum": list(metadata["choices"])}} if metadata.get("choices") else {}
        return {"type": "object", "additionalProperties": _of_type(kind.holds, {**metadata, "choices": None}), **names}
    return {} if kind.base is Any else {"anyOf": [_scalar(kind.base, metadata), _INTERPOLATION]}


def _scalar(hint: type, metadata: Mapping[str, Any]) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": _TYPES[hint]}
    if hint is str:  # sweep.name=2026 means the text
        schema["type"] = ["string", "number"]
    words = {"minimum": "minimum", "above": "exclusiveMinimum", "maximum": "maximum"}
    schema |= {words[name]: metadata[name] for name in words if metadata.get(name) is not None}
    return schema | ({"enum": list(metadata["choices"])} if metadata.get("choices") else {})
