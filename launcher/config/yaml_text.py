"""Reads YAML with libyaml if it is available: several times faster than pure Python, which shortens the start of a command."""

from __future__ import annotations

import re
from typing import Any

import yaml

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_yaml(text: str) -> Any:
    """Reads one document. Raises ``yaml.YAMLError`` for text that is not YAML."""
    return yaml.load(text, Loader=LOADER)


class ConfigLoader(LOADER):  # type: ignore[misc, valid-type]
    """Reads numbers as OmegaConf does: ``1e-3``, which YAML 1.1 takes for text, is one."""


class ConfigDumper(yaml.SafeDumper):
    """Quotes text that ``ConfigLoader`` would take for a number."""


for _kind in (ConfigLoader, ConfigDumper):
    _kind.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?([0-9][0-9_]*\.?[0-9_]*|\.[0-9_]+)[eE][-+]?[0-9]+\Z"), list("-+.0123456789")
    )


def read_config_yaml(text: str) -> Any:
    """Reads a document as a configuration. Raises ``yaml.YAMLError`` for text that is not YAML."""
    return yaml.load(text, Loader=ConfigLoader)


def as_config_yaml(data: Any, **form: Any) -> str:
    """Writes a configuration as text from which it is read back equal. ``form``: arguments of ``yaml.dump``."""
    return str(yaml.dump(data, Dumper=ConfigDumper, sort_keys=False, **form))
