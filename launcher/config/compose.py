"""Turns override strings into one typed ``Config``: Hydra composes, the project checks strictly and words the errors.

Hydra is given the schema as plain data, so that it knows every key; ``trainer.shared.run.read.from_dict`` converts and checks every value,
so that one place words all errors of values.
"""

from __future__ import annotations

import copy
import inspect
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from launcher.config.clusters import DEFAULT, backend_names, cluster_class
from launcher.config.composed import override_parser, plain_errors, to_config
from launcher.config.folders import conf_dir, content, files_of, group_folders, groups_of, refuse_hidden
from launcher.config.hardware import refuse_renamed
from launcher.config.jobs import Jobs
from launcher.config.misread import refuse_misread, says_package
from launcher.config.schema import Config
from launcher.config.text_keys import TEXT, as_typed, in_quotes, is_list, split, type_of_key
from launcher.config.trainers import TRAINERS
from launcher.config.yaml_text import read_yaml
from trainer.shared.records.artifacts import newest_checkpoint
from trainer.shared.records.model_files import model_of, read_model
from trainer.shared.run.errors import ConfigError, nearest, options_listed
from trainer.shared.run.read import flatten, to_dict
from trainer.shared.run.schema import METHODS
from trainer.shared.run.value_types import ValueType, value_type

MODEL_FROM = "model.from"
"""Override that fills in all keys of ``model`` from a folder in the Hugging Face layout, or from its config.json. Other overrides of
``model`` take precedence."""


@cache
def register_schema() -> None:
    """Tells Hydra every key and its default. The files in conf/ hold only differences."""
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance()
    again: dict[str, Any] = {"replace": True} if "replace" in inspect.signature(store.store).parameters else {}  # Hydra 1.4 warns otherwise
    root = to_dict(Config())
    del root["cluster"]  # a cluster's keys depend on its backend: conf/cluster/NAME.yaml starts from _BACKEND
    store.store(name="schema", node=root, **again)
    for backend in backend_names():
        store.store(group="cluster", name=f"_{backend}", node=to_dict(cluster_class(backend)()), **again)


def compose(overrides: Sequence[str] = (), folder: Path | None = None) -> Config:
    """Composes conf/ with ``overrides`` (Hydra's grammar). Raises ``ConfigError`` for anything wrong with them.

    ``folder`` holds config groups of the user's own, as Hydra's ``--config-dir`` does.
    """
    register_schema()
    chosen: list[tuple[str, str]] = []
    checked = check_overrides(overrides, folder=folder, chosen=chosen)
    of_hydra = any(text.lstrip("+~").startswith("hydra") for text in checked)  # may set where files are looked for
    checked = [*checked, search_path(folder)] if of_hydra else [search_path(folder), *checked]
    with plain_errors():
        files = None if of_hydra else _user_files(chosen, folder)
        if files is None:
            return to_config(_hydra_compose(checked))
        if files not in _COMPOSED:
            _COMPOSED[files] = Jobs(_hydra_compose)
        return copy.deepcopy(_COMPOSED[files].config(checked))  # other configurations share its sections


def search_path(own: Path | None = None, primary: str | None = None) -> str:
    """Returns the override that names further folders of config groups: ``runs``, since what earlier runs wrote (the winner of a search, a
    measured machine) can be named like what ships, the user's ``own``, and those that a ``primary`` configuration of it asks for.
    ``hydra.searchpath`` in conf/config.yaml would keep others from building on that file."""
    asked: list[Any] = []
    if own is not None and primary is not None:
        data = content(own / f"{primary}.yaml")
        of_hydra = data.get("hydra") if isinstance(data, dict) else None
        asked = of_hydra.get("searchpath") or [] if isinstance(of_hydra, dict) else []
    folders = [f"file://{own.absolute()}"] if own is not None and primary is None else []
    return f"hydra.searchpath=[file://runs,{','.join(map(in_quotes, [*folders, *map(str, asked)]))}]".replace(",]", "]")


_TEXTS = value_type(dict[str, str])
_COMPOSED: dict[tuple[tuple[str, str], ...], Jobs] = {}
"""Compositions of this process, by the content of the user's files that they were made from."""


def hydra_behaviour() -> dict[str, Any]:
    """Returns the argument with which Hydra 1.3 is told to behave as itself. Later versions do without, and warn of it."""
    from hydra import __version__

    return {"version_base": "1.3"} if __version__.startswith("1.3.") else {}


def _hydra_compose(overrides: list[str]) -> Any:
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir

    with initialize_config_dir(str(conf_dir()), **hydra_behaviour()):
        return hydra_compose("config", overrides=overrides)


def _user_files(options: Sequence[tuple[str, str]], own: Path | None) -> tuple[tuple[str, str], ...] | None:
    """Returns path and text of the chosen options' files outside conf/: unlike conf/, they may be written between two compositions, as a
    search writes its winner. None if a choice depends on more than these files."""
    if any("$" in name for option in options for name in option):  # an interpolation among the defaults
        return None
    paths = [root / group / f"{name}.yaml" for root in group_folders(own)[1:] for group, name in dict.fromkeys(options)]
    return tuple((str(path.absolute()), path.read_text()) for path in paths if path.is_file())


def check_overrides(
    overrides: Sequence[str],
    *,
    sweep: bool = False,
    folder: Path | None = None,
    chosen: list[tuple[str, str]] | None = None,
    primary: str | None = None,
) -> list[str]:
    """Refuses overrides of keys and group options that do not exist, naming the nearest that do, and several values outside a ``sweep``.
    Options may also be files of ``folder``, Hydra's ``--config-dir``, and of groups that only it has; ``primary`` is the file in it that
    builds on conf/config.yaml, Hydra's ``--config-name``.

    Returns the overrides as Hydra needs them: a new key of an open mapping (``cluster.env.NAME=value``) is marked as an addition. Adds to
    ``chosen`` the group and name of every option that they choose, and of those that its files include.
    """
    groups = config_groups(folder)
    clusters = [parse_override(_as_typed(text, TEXT, True)).value() for text in overrides if _key_of(text) == "cluster"]
    clusters = clusters or _clusters_of(overrides, groups, folder, primary)
    with plain_errors():
        backend = backend_of(clusters[-1], folder) if clusters and isinstance(clusters[-1], str) else DEFAULT
        keys = known_keys(backend)
    overrides = [_with_text(text, groups, backend, sweep) for text in overrides]
    files = [text for text in overrides if text.startswith(f"{MODEL_FROM}=")]
    overrides = [word for text in files for word in _described(text)] + [text for text in overrides if text not in files]
    checked = []
    parsed = [parse_override(text) for text in overrides]
    for text, override in zip(overrides, parsed):
        name = override.key_or_group
        if override.is_sweep_override() and not sweep:
            values = text.partition("=")[2]
            a_list = f", or write a list: {shlex.quote(f'{name}=[{values}]')}" if is_list(name, backend) else ""
            raise ConfigError(f"{text} gives several values; sweep over them: trireme train -m {shlex.quote(text)}{a_list}")
        if name.split(".")[0].split("/")[0] == "hydra":
            pass
        elif override.is_delete():
            raise ConfigError(f"~{name} deletes a setting, and every setting is needed; give it a value, {name}=null for its default")
        elif isinstance(override.value(), dict):
            _check_keys(override.value(), "cluster.hardware" if name in OF_HARDWARE else name, keys)
            text = "++" + text.lstrip("+") if keys.get(name) else text
        elif name in groups:
            if name not in GROUPS:
                _check_own_group(override, keys, folder, primary)
            options = _check_group_value(override, groups[name], folder)
            if chosen is not None:
                chosen += options
        elif any(is_open and name.startswith(key + ".") for key, is_open in keys.items()):
            text = "++" + text.lstrip("+")
        elif name not in keys:
            if folder is None and override.is_add() and "." not in name:
                raise ConfigError(f"{text}: no key or group {name!r}; a group of your own is found with --config-dir DIR, as DIR/{name}/")
            raise _unknown(name, [*keys, *groups])
        checked.append(text)
    _check_method([override.key_or_group for override in parsed])
    return checked


def _key_of(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]


def _with_text(override: str, groups: Mapping[str, Any], backend: str, sweep: bool) -> str:
    """Quotes text in an override that Hydra would read as something else. Without a ``sweep`` a comma is a part of text, unless the key
    takes one of a few words."""
    key = _key_of(override)
    if key in groups or key == MODEL_FROM:
        return _as_typed(override, TEXT, key in groups or sweep)
    kind, metadata = type_of_key(key, backend)
    if (named := _entry(key, backend)) is not None:
        values = as_typed(override.partition("=")[2], TEXT, sweep)
        return f"++{named[0]}=" + ",".join(f"{{{named[1]}: {value}}}" for value in (split(values) if sweep else [values]))
    return _as_typed(override, kind, sweep or bool(metadata.get("choices")))


def _entry(key: str, backend: str) -> tuple[str, str] | None:
    """Splits a key into a mapping of texts and the name of an entry that Hydra would take for several keys: ``cluster.labels`` and
    ``app.kubernetes.io/name``. None for other keys."""
    parts = key.split(".")
    for end in range(2, len(parts)):
        name = ".".join(parts[end:])
        if type_of_key(".".join(parts[:end]), backend)[0] == _TEXTS and re.fullmatch(r"[\w./-]*[./-][\w./-]*", name):
            return ".".join(parts[:end]), name
    return None


def _as_typed(override: str, kind: ValueType, several: bool) -> str:
    key, equals, value = override.partition("=")
    return f"{key}{equals}{as_typed(value, kind, several)}"


def _check_method(names: Sequence[str]) -> None:
    """Raises ``ConfigError`` for a key of a method without the method, which would silently train all weights."""
    of_method = [name for name in names if name.startswith("tune.") and name != "tune.base"]
    if of_method and not {"tune.method", "tune", "recipe"} & set(names):
        raise ConfigError(
            f"{of_method[0]} is of a method that adds weights, and none is named: tune.method=full would train all; "
            f"give tune.method ({', '.join(METHODS[1:])}), or leave {of_method[0]} out"
        )


def _described(text: str) -> list[str]:
    """Returns ``model.from=PATH`` as the keys of a model: that of a checkpoint, or of a ``config.json``, the path itself or that file in
    it."""
    path = Path(str(parse_override(text).value())).expanduser()
    try:
        shape = read_model(path) if newest_checkpoint(path) is None else model_of(path)
    except ConfigError as error:
        raise ConfigError(f"{text}: {error}") from None
    return [f"model.{name}={json.dumps(value)}" for name, value in flatten(shape).items()]


def _check_keys(values: Mapping[Any, Any], prefix: str, keys: Mapping[str, bool]) -> None:
    """Raises ``ConfigError`` for an unknown key in a mapping given as a value, as in ``layout={tensor: 2}``."""
    for key, value in values.items():
        name = f"{prefix}.{key}"
        if keys.get(prefix):
            return
        if name not in keys:
            raise _unknown(name, list(keys))
        if isinstance(value, Mapping):
            _check_keys(value, name, keys)


def _unknown(name: str, known: list[str]) -> ConfigError:
    section, _, key = name.rpartition(".")
    if section == "cluster.hardware":
        refuse_renamed([key])
    return ConfigError(f"unknown key {name!r}{nearest(name, known)} (all keys: 'trireme train --cfg job')")


def parse_override(text: str) -> Any:
    """Parses one override in Hydra's grammar. Raises ``ConfigError`` with the text if it is not one."""
    from hydra.errors import HydraException

    try:
        return override_parser().parse_overrides([text])[0]
    except (HydraException, ValueError, RecursionError):
        raise ConfigError(
            f"cannot read {text!r} as KEY=VALUE; quote special characters inside the value, as in 'data.path=\"a b\"', or give text as "
            "--set KEY TEXT"
        ) from None


@cache
def known_keys(backend: str = DEFAULT) -> Mapping[str, bool]:
    """Returns every dotted key, with whether it is an open mapping (such as ``cluster.env``) that takes new keys."""
    tree = to_dict(Config())
    tree["cluster"] = to_dict(cluster_class(backend)())
    return dict(_walk(tree, ""))


OF_HARDWARE = ("hardware", "network")
"""Groups whose files hold keys of ``cluster.hardware``, the one that wins last."""
GROUPS = ("model", "layout", "cluster", *OF_HARDWARE, "trainer", "data", "optimizer", "search", "engine", "workload", "recipe")
"""Groups of conf/ that conf/config.yaml chooses from."""


def config_groups(own: Path | None = None) -> dict[str, list[str]]:
    """Returns Hydra's config groups and the options of each: those that ship, and any other folder in ``own``. Raises ``ConfigError`` if
    that is not a folder."""
    if own is not None and not own.is_dir():
        raise ConfigError(f"--config-dir={own} is not a folder; give one that holds config groups, such as trainer/NAME.yaml")
    return {group: list(files) for group in (*GROUPS, *groups_of(own, (*GROUPS, "pipeline"))) if (files := files_of(group, own))}


def _clusters_of(overrides: Sequence[str], groups: Mapping[str, Any], own: Path | None, primary: str | None) -> list[str]:
    """Returns the options of ``cluster`` that files of the user's own choose, the one that counts last."""
    files = [("", primary)] if primary is not None else []
    for text in overrides:
        if (group := _key_of(text)) in groups and group not in GROUPS:
            files += [(group, name) for name in split(text.partition("=")[2])]
    included = [option for group, name in files for option in refuse_misread(group_folders(own), group, name)]
    return [name for group, name in included if group == "cluster" and not name.startswith("_")]


def _check_own_group(override: Any, keys: Mapping[str, bool], own: Path | None, primary: str | None) -> None:
    """Raises ``ConfigError`` for an option of a group that only ``own`` has, if no default is replaced by it, or if its keys would be of no
    section."""
    group, text = override.key_or_group, override.input_line
    if primary is None and not override.is_add():
        raise ConfigError(f"{text}: no file of this group is chosen yet, which this would replace; add one with +{text.lstrip('+')}")
    if group.split("/")[0] in keys or override.package is not None:
        return
    for name, path in files_of(group, own).items():
        if name in split(text.partition("=")[2]) and not says_package(path.read_text()):
            raise ConfigError(f"{path} does not say where its keys belong; begin it with the line '# @package _global_'")


def _check_group_value(override: Any, options: list[str], own: Path | None) -> list[tuple[str, str]]:
    """Returns group and name of the options that ``override`` chooses, and of those that their files include. Raises ``ConfigError`` for
    unknown ones."""
    from hydra.core.override_parser.types import Glob, Sweep

    value, group = override.value(), override.key_or_group
    values = value.filter(options) if isinstance(value, Glob) else getattr(value, "list", []) if isinstance(value, Sweep) else [value]
    there = f"{'conf' if group in GROUPS else own}/{group}/ has {options_listed(options)}"
    if isinstance(value, Glob) and not values:
        raise ConfigError(f"{override.input_line} stands for nothing; {there}")
    chosen: list[tuple[str, str]] = []
    for name in map(str, values):
        if name not in options and not name.startswith("_"):
            raise ConfigError(f"{group}={name} does not exist{nearest(name, options)}; {there}")
        found = refuse_misread(group_folders(own), group, name)
        for option in found:
            refuse_hidden(*option, own)
        chosen += found
        if group == "trainer" and name in options:
            TRAINERS.keys(name, own)  # its bases exist, too: an error of Hydra's would name internal places
    return chosen


def backend_of(cluster_option: str, own: Path | None) -> str:
    """Returns the backend of a cluster file, from its leading ``_BACKEND`` default; local when in doubt (composition reports the error)."""
    path = files_of("cluster", own).get(cluster_option)
    read = read_yaml(path.read_text()) if path else None
    for item in read.get("defaults", []) if isinstance(read, dict) else []:
        if isinstance(item, str) and item.removeprefix("_") in backend_names():
            return item.removeprefix("_")
        if isinstance(item, str) and item != "_self_":
            return backend_of(item, own)
    return DEFAULT


def _walk(node: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, bool]]:
    for name, value in node.items():
        if isinstance(value, Mapping):
            yield prefix + name, not value
            yield from _walk(value, f"{prefix}{name}.")
        else:
            yield prefix + name, False
