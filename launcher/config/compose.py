"""From override strings to one typed ``Config``: Hydra composes, we check strictly and speak plainly.

Hydra is given the schema as plain data: it knows every key, and every value is converted and checked by
``trainer.spec.from_dict``, so that there is one place and one wording for wrong values.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from launcher.config.base60 import refuse_base60
from launcher.config.clusters import CLUSTER_CLASSES, cluster_class, cluster_from_dict
from launcher.config.folders import conf_dir, group_folders, refuse_hidden
from launcher.config.renamed import refuse_renamed
from launcher.config.schema import Config
from launcher.config.secrets import refuse_secret_address, refuse_secrets
from launcher.config.yaml_text import read_yaml
from trainer.spec import ConfigError, from_dict, to_dict
from trainer.spec.errors import listed, nearest
from trainer.spec.model_files import read_model
from trainer.spec.schema import METHODS

PACKAGES = {"hardware": "cluster.hardware", "recipe": "_global_"}
"""Groups whose files hold keys of other sections, and of which."""

MODEL_FROM = "model.from"
"""No key of a run, but words for all of ``model``: a folder in the Hugging Face layout. Other keys of ``model`` overrule it."""


@cache
def register_schema() -> None:
    """Tell Hydra every key and its default. The files in conf/ only hold what differs."""
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance()
    root = to_dict(Config())
    del root["cluster"]  # a cluster's keys depend on its backend: conf/cluster/NAME.yaml starts from _BACKEND
    store.store(name="schema", node=root)
    for backend in CLUSTER_CLASSES:
        try:
            cluster = cluster_class(backend)
        except ImportError:  # an optional backend whose room is not there
            continue
        store.store(group="cluster", name=f"_{backend}", node={**to_dict(cluster()), "backend": backend})


def compose(overrides: Sequence[str] = (), folder: Path | None = None) -> Config:
    """Compose conf/ with ``overrides`` (Hydra's grammar). ``ConfigError`` for anything that is wrong with them.

    ``folder`` holds config groups of the user's own, as Hydra's ``--config-dir`` does.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir

    register_schema()
    checked = check_overrides(overrides, folder=folder)
    if folder is not None:
        if not folder.is_dir():
            raise ConfigError(f"--config-dir={folder} is no folder; give one that holds config groups, such as trainer/NAME.yaml")
        checked.append(f"hydra.searchpath=[file://runs,'file://{folder.absolute()}']")
    with plain_errors(), initialize_config_dir(str(conf_dir()), version_base="1.3"):
        composed = hydra_compose("config", overrides=checked)
    return to_config(composed)


def to_config(composed: Any) -> Config:
    """The typed form of what Hydra composed. Strict: unknown keys, added with ``+``, are refused as well."""
    with plain_errors():  # section by section: Hydra's own may hold values that are only known later
        sections = {str(name): composed[name] for name in composed if name != "hydra"}
        data: dict[str, Any] = {k: _plain(v) for k, v in sections.items()}
    for group, package in PACKAGES.items():
        if group in data:  # the group itself is no key: its files say where their keys belong
            raise ConfigError(
                f"the file chosen with {group}=... does not say where its keys belong; begin it with the line '# @package {package}'"
            )
    cluster = data.pop("cluster", {})
    config = from_dict(Config, data)
    config = dataclasses.replace(config, cluster=cluster_from_dict(cluster))
    refuse_secrets(config.cluster)  # before anything is written: what is refused later is recorded with the words that asked for it
    refuse_secret_address(config.tracking.uri)
    return config


def _plain(value: Any) -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.to_container(value, resolve=True, throw_on_missing=True) if OmegaConf.is_config(value) else value


def check_overrides(overrides: Sequence[str], *, sweep: bool = False, folder: Path | None = None) -> list[str]:
    """Refuse overrides of keys and group options that do not exist, naming the nearest that do; several values only in a ``sweep``. Options
    may also be files of ``folder``, which Hydra calls ``--config-dir``.

    Returns the overrides as Hydra needs them: a new key of an open mapping (``cluster.env.NAME=value``) is marked as an addition.
    """
    files = [text for text in overrides if text.startswith(f"{MODEL_FROM}=")]
    overrides = [word for text in files for word in _described(text)] + [text for text in overrides if text not in files]
    parsed = [parse_override(text) for text in overrides]
    options = [o.value() for o in parsed if o.key_or_group == "cluster"]
    with plain_errors():
        keys = known_keys(_backend_of(options[-1], folder) if options and isinstance(options[-1], str) else "local")
    groups = config_groups(folder)
    checked = []
    for text, override in zip(overrides, parsed):
        name = override.key_or_group
        if override.is_sweep_override() and not sweep:
            raise ConfigError(f"{text} gives several values; sweep over them with `trireme train -m`, or write a list as {name}=[...]")
        if name.split(".")[0].split("/")[0] == "hydra":
            pass
        elif override.is_delete():
            raise ConfigError(f"~{name} deletes a setting, and every setting is needed; give it a value, {name}=null for its default")
        elif isinstance(override.value(), dict):
            _check_keys(override.value(), "cluster.hardware" if name == "hardware" else name, keys)
            text = "++" + text.lstrip("+") if keys.get(name) else text
        elif name in groups:
            _check_group_value(override, groups[name], folder)
        elif any(is_open and name.startswith(key + ".") for key, is_open in keys.items()):
            text = "++" + text.lstrip("+")
        elif name not in keys:
            raise _unknown(name, [*keys, *groups])
        checked.append(text)
    _check_method([override.key_or_group for override in parsed])
    return checked


def _check_method(names: Sequence[str]) -> None:
    """A key of a method without the method would train all weights, and look as if it did not."""
    of_method = [name for name in names if name.startswith("tune.") and name != "tune.base"]
    if of_method and not {"tune.method", "tune", "recipe"} & set(names):
        raise ConfigError(
            f"{of_method[0]} is of a method that adds weights, and none is named: tune.method=full would train all; "
            f"give tune.method ({', '.join(METHODS[1:])}), or leave {of_method[0]} out"
        )


def _described(text: str) -> list[str]:
    """``model.from=FOLDER`` as the keys of the model that the folder's ``config.json`` describes."""
    path = Path(str(parse_override(text).value())).expanduser()
    try:
        shape = read_model(path.parent if path.name == "config.json" else path)
    except ConfigError as error:
        raise ConfigError(f"{text}: {error}") from None
    return [f"model.{name}={value}" for name, value in to_dict(shape).items()]


def _check_keys(values: Mapping[Any, Any], prefix: str, keys: Mapping[str, bool]) -> None:
    """The keys of a mapping given as a value, as in ``layout={tensor: 2}``."""
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
    """One override in Hydra's grammar; ``ConfigError`` with the text if it is not one."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return OverridesParser.create().parse_overrides([text])[0]
    except (HydraException, ValueError, RecursionError):
        raise ConfigError(
            f"cannot read {text!r} as KEY=VALUE; quote special characters inside the value, as in 'sweep.name=\"a b\"'"
        ) from None


def known_keys(backend: str = "local") -> dict[str, bool]:
    """Every dotted key, with whether it is an open mapping (such as ``cluster.env``) that takes keys of its own."""
    tree = to_dict(Config())
    tree["cluster"] = to_dict(cluster_class(backend)())
    return dict(_walk(tree, ""))


def config_groups(own: Path | None = None) -> dict[str, list[str]]:
    """Hydra's config groups and the options of each."""
    groups: dict[str, set[str]] = {}
    for root in group_folders(own):
        for folder in ("model", "layout", "cluster", "hardware", "trainer", "data", "optimizer", "search", "engine", "workload", "recipe"):
            found = {str(p.relative_to(root / folder).with_suffix("")) for p in sorted((root / folder).glob("**/*.yaml")) if p.is_file()}
            if found:
                groups.setdefault(folder, set()).update(found)
    return {name: sorted(options) for name, options in groups.items()}


@contextmanager
def plain_errors() -> Iterator[None]:
    """Turn Hydra's and OmegaConf's errors into ``ConfigError`` with their own first sentence and ours around it."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    warnings.filterwarnings("ignore", message="provider=hydra.searchpath")  # runs/ need not exist yet
    try:
        yield
    except ConfigError:
        raise
    except RecursionError:
        raise ConfigError("a file that the run names builds on itself; correct 'defaults' in it") from None
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError, AssertionError) as error:
        # conf/ is fixed, so whatever composition stumbles over came with the overrides; Hydra lets some of it through as plain ValueError.
        raise ConfigError(_first_sentence(error)) from None


def _first_sentence(error: BaseException) -> str:
    """What a person needs of a Hydra error: its words without the advice about HYDRA_FULL_ERROR and internal keys."""
    noise = ("full_key:", "object_type=", "reference_type=", "Set the environment variable", "See https://")
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and not line.strip().startswith(noise)]
    cause = error.__cause__
    if cause is not None and str(cause).strip() and str(cause).strip().splitlines()[0] not in " ".join(lines):
        lines.append(str(cause).strip().splitlines()[0])
    text = "; ".join(lines[:4]) or type(error).__name__
    key = getattr(error, "full_key", None)
    return f"{key}: {text}" if key and str(key) not in text else text


def _check_group_value(override: Any, options: list[str], own: Path | None) -> None:
    from hydra.core.override_parser.types import Glob, Sweep

    value, group = override.value(), override.key_or_group
    values = value.filter(options) if isinstance(value, Glob) else getattr(value, "list", []) if isinstance(value, Sweep) else [value]
    if isinstance(value, Glob) and not values:
        raise ConfigError(f"{override.input_line} stands for nothing; conf/{group}/ has {listed(options)}")
    for name in map(str, values):
        if name not in options and not name.startswith("_"):
            raise ConfigError(f"{group}={name} does not exist{nearest(name, options)}; conf/{group}/ has {listed(options)}")
        for option in refuse_base60(group_folders(own), group, name):
            refuse_hidden(*option, own)
        if group == "trainer" and name in options:
            from launcher.config.trainers import composed

            composed(name, own)  # what it builds on exists, too: Hydra's words name its own places


def _backend_of(cluster_option: str, own: Path | None) -> str:
    """The backend of a cluster file, from its leading ``_BACKEND`` default; local when in doubt (composition reports what is wrong)."""
    for root in group_folders(own):
        path = root / "cluster" / f"{cluster_option}.yaml"
        if os.path.isfile(path):  # False, too, for a name that is too long for a file
            read = read_yaml(path.read_text())
            for item in read.get("defaults", []) if isinstance(read, dict) else []:
                if isinstance(item, str) and item.removeprefix("_") in CLUSTER_CLASSES:
                    return item.removeprefix("_")
                if isinstance(item, str) and item != "_self_":
                    return _backend_of(item, own)
    return "local"


def _walk(node: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, bool]]:
    for name, value in node.items():
        if isinstance(value, Mapping):
            yield prefix + name, not value
            yield from _walk(value, f"{prefix}{name}.")
        else:
            yield prefix + name, False
