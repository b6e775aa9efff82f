"""Refuses values that YAML silently misreads: YAML 1.1 counts the time ``4:00:00`` in base 60, the number 14400, and where a key is text,
``2024_05_01`` becomes 20240501 and ``on`` true."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from launcher.config.text_keys import is_text
from launcher.config.yaml_text import ConfigLoader, read_config_yaml
from trainer.shared.run.errors import ConfigError

_NO_TEXT = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float", "tag:yaml.org,2002:bool")
_PACKAGE = re.compile(r"^#\s*@package\s+(\S+)", re.MULTILINE)
"""Hydra's line that states where the keys of a file belong."""


def says_package(text: str) -> bool:
    """Returns whether a file says where its keys belong."""
    return _PACKAGE.search(text) is not None


def refuse_misread(roots: Sequence[Path], group: str, name: str) -> list[tuple[str, str]]:
    """Raises ``ConfigError`` for the first value that would be misread: in the files of the option ``name`` of ``group`` in ``roots``, and
    in those that their ``defaults`` include. Leaves a file that is not YAML to its reader.

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
    """Reads a file and refuses values that would be misread. Returns None for a file that is not YAML."""
    try:
        text = path.read_text()
        root = yaml.compose(text, Loader=ConfigLoader)
        content = read_config_yaml(text)
    except yaml.YAMLError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{group}={name} names {path}, which cannot be read ({error}); fix or remove it") from None
    said = _PACKAGE.search(text)
    package = said[1].replace("_global_", "").replace("_group_", group) if said else group
    _refuse(root, str(path), lambda key: is_text(f"{package}.{key}".lstrip(".").replace("/", ".")))
    if content is not None and not isinstance(content, dict):
        raise ConfigError(f"{group}={name} names {path}, which is not a mapping of keys to values; write lines such as 'name: NAME'")
    return content


def refuse_misread_in(text: str, where: str, text_key: Callable[[str], bool]) -> None:
    """Raises ``ConfigError`` for the first value in ``text`` that would be misread, and ``yaml.YAMLError`` for text that is not YAML.
    ``where`` names the place of the text; ``text_key`` returns whether a dotted key takes text."""
    _refuse(yaml.compose(text, Loader=ConfigLoader), where, text_key)


def _refuse(root: yaml.Node | None, where: str, text_key: Callable[[str], bool]) -> None:
    for key, node in _scalars(root, ""):
        if node.tag not in _NO_TEXT or (":" not in node.value and not text_key(key)):
            continue
        value = read_config_yaml(node.value)
        if str(value) != node.value:
            name, what = key.rpartition(".")[2], str(value).lower() if isinstance(value, bool) else f"the number {value}"
            raise ConfigError(
                f"{where}, line {node.start_mark.line + 1}: YAML reads {name}: {node.value} as {what}; "
                f"write it in quotes, {name}: '{node.value}'"
            )


def _included(content: Any, group: str) -> Iterator[tuple[str, str]]:
    """Yields group and option of every entry of a file's ``defaults``, in Hydra's grammar: ``NAME``, or ``[override] [optional]
    [/]GROUP[@PACKAGE]: NAME``."""
    entries = content.get("defaults") if isinstance(content, dict) else None
    for entry in entries if isinstance(entries, list) else []:
        pairs = entry.items() if isinstance(entry, dict) else [("", entry)]
        for key, names in pairs:
            inner = str(key).split(" ")[-1].partition("@")[0]
            for name in names if isinstance(names, list) else [names]:
                where = posixpath.join("/", group, inner, str(name).partition("@")[0].removesuffix(".yaml"))
                yield posixpath.dirname(where)[1:], posixpath.basename(where)


def _scalars(node: yaml.Node | None, key: str) -> Iterator[tuple[str, yaml.ScalarNode]]:
    """Yields every scalar with its dotted key."""
    if isinstance(node, yaml.ScalarNode):
        yield key, node
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _scalars(item, key)
    elif isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            yield from _scalars(value, f"{key}.{name.value}".lstrip("."))
