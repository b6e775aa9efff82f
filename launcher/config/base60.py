"""Times in YAML files. YAML 1.1 counts ``4:00:00`` in base 60 and reads the number 14400: nothing tells afterwards that it was a time."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from launcher.config.yaml_text import LOADER, read_yaml
from trainer.spec import ConfigError


def refuse_base60(roots: Sequence[Path], group: str, name: str) -> list[tuple[str, str]]:
    """``ConfigError`` on the first value that would become a number in base 60: in the files of the option ``name`` of ``group`` in
    ``roots``, and in those that their ``defaults`` bring along. A file that is no YAML is left to whoever reads it.

    Returns all these options, each with its group.
    """
    options = [(group, name)]
    seen: set[Path] = set()
    left = [(group, name)]
    while left:
        chosen = left.pop()
        for path in (root / chosen[0] / f"{chosen[1]}.yaml" for root in roots):
            if path not in seen and path.is_file():
                seen.add(path)
                found = list(_included(_read(path, *chosen), chosen[0]))
                left += found
                options += found
    return list(dict.fromkeys(options))


def _read(path: Path, group: str, name: str) -> Any:
    """The content of a file in which no number is in base 60."""
    try:
        text = path.read_text()
        root = yaml.compose(text, Loader=LOADER)
        content = read_yaml(text)
    except yaml.YAMLError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{group}={name} names {path}, which cannot be read ({error}); mend or remove it") from None
    _refuse(root, str(path))
    if content is not None and not isinstance(content, dict):
        raise ConfigError(f"{group}={name} names {path}, which is no mapping of keys to values; write lines such as 'name: NAME'")
    return content


def refuse_base60_in(text: str, where: str) -> None:
    """``ConfigError`` on the first value in ``text`` that would become a number in base 60; ``where`` it stands. ``yaml.YAMLError`` for
    what is no YAML."""
    _refuse(yaml.compose(text, Loader=LOADER), where)


def _refuse(root: yaml.Node | None, where: str) -> None:
    for key, node in _scalars(root, ""):
        if node.tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float") and ":" in node.value:
            number = read_yaml(node.value)
            raise ConfigError(
                f"{where}, line {node.start_mark.line + 1}: YAML reads {key}: {node.value} as the number {number}; "
                f"write it in quotes, {key}: '{node.value}'"
            )


def _included(content: Any, group: str) -> Iterator[tuple[str, str]]:
    """Group and option of every entry of a file's ``defaults``, in Hydra's grammar: ``NAME``, ``[override] [optional] [/]GROUP[@PACKAGE]:
    NAME``."""
    entries = content.get("defaults") if isinstance(content, dict) else None
    for entry in entries if isinstance(entries, list) else []:
        pairs = entry.items() if isinstance(entry, dict) else [("", entry)]
        for key, names in pairs:
            inner = str(key).split(" ")[-1].partition("@")[0]
            for name in names if isinstance(names, list) else [names]:
                where = posixpath.join("/", group, inner, str(name).partition("@")[0].removesuffix(".yaml"))
                yield posixpath.dirname(where)[1:], posixpath.basename(where)


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
