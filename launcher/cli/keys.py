"""Prints the keys of a configuration: each with its default and meaning, and as a JSON schema."""

from __future__ import annotations

import json
from typing import Any

from rich.table import Table
from rich.text import Text

from launcher.cli.console import wide_console
from launcher.config.clusters import backend_names, cluster_class
from launcher.config.json_schema import json_schema
from launcher.config.schema import Config
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.keys import field_docs
from trainer.shared.run.read import flatten


def print_keys(words: list[str]) -> int:
    """Every key of which the name or the meaning, with its backend, contains one of ``words`` (all without); ``ConfigError`` for none."""
    table = Table("key", "default", "meaning", box=None, pad_edge=False)
    for name, (default, doc) in key_docs().items():
        if not words or any(word.lower() in f"{name} {doc}".lower() for word in words):
            table.add_row(name, Text("null" if default is None else str(default)), Text(doc))
    if not table.row_count:
        raise ConfigError(f"no key matches {' or '.join(map(repr, words))}; 'trireme train --keys' lists all")
    wide_console().print(table)
    return 0


def print_schema(words: list[str]) -> int:
    """The JSON schema of a recipe file, or of the files of one section: ``--schema cluster``."""
    if len(words) > 1:
        raise ConfigError(f"--schema takes one section, not {' '.join(words)}; name one, or none for a whole recipe")
    print(json.dumps(json_schema(*words), indent=1))
    return 0


def key_docs() -> dict[str, tuple[Any, str]]:
    """``{key: (default, meaning)}`` of the whole configuration with ``cluster=local``, and of the other backends' clusters."""
    docs, defaults = field_docs(Config), flatten(Config())
    of_all, owners = set(docs), dict[str, list[str]]()
    for backend in backend_names():
        cluster = cluster_class(backend)
        for key, doc in field_docs(cluster, "cluster.").items():
            docs.setdefault(key, doc)
            owners.setdefault(key, []).append(backend)
        defaults |= {k: v for k, v in flatten(cluster(), "cluster.").items() if k not in defaults}
    return {key: (defaults.get(key), doc if key in of_all else f"{doc} ({', '.join(owners[key])})") for key, doc in docs.items()}
