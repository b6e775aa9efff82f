"""Times in YAML files. YAML 1.1 counts ``4:00:00`` in base 60 and reads the number 14400: nothing tells afterwards that it was a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import yaml

from trainer.spec import ConfigError


def refuse_base60(path: Path) -> None:
    """``ConfigError`` on the first value in the file ``path`` that would become a number in base 60. A file that is no YAML is left to
    whoever reads it."""
    try:
        root = yaml.compose(path.read_text(), Loader=yaml.SafeLoader)
    except yaml.YAMLError:
        return
    for key, node in _scalars(root, ""):
        if node.tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float") and ":" in node.value:
            number = yaml.safe_load(node.value)
            raise ConfigError(
                f"{path}, line {node.start_mark.line + 1}: YAML reads {key}: {node.value} as the number {number}; "
                f"write it in quotes, {key}: '{node.value}'"
            )


def _scalars(node: yaml.Node | None, key: str) -> Iterator[tuple[str, yaml.ScalarNode]]:
    """Every scalar with the name that it stands under."""
    if isinstance(node, yaml.ScalarNode):
        yield key, node
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _scalars(item, key)
    elif isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            yield from _scalars(value, str(name.value))
