"""Turns Hydra's results into the project's own types, and its errors into plain ones."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from launcher.config.clusters import cluster_from_dict
from launcher.config.schema import Config
from launcher.config.secrets import refuse_secret_address, refuse_secrets
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.read import from_dict

PACKAGES = {"hardware": "cluster.hardware", "network": "cluster.hardware", "recipe": "_global_"}
"""Groups whose files hold keys of another section, and that section."""


def to_config(composed: Any) -> Config:
    """Returns the typed form of a composition. Strict: unknown keys, added with ``+``, are refused as well."""
    with plain_errors():  # section by section: Hydra's own may hold values that are only known later
        sections = {str(name): composed[name] for name in composed if name != "hydra"}
        data: dict[str, Any] = {k: _plain(v) for k, v in sections.items()}
    for group, package in PACKAGES.items():
        if group in data:  # the group itself is not a key: its files say where their keys belong
            raise ConfigError(
                f"the file chosen with {group}=... does not say where its keys belong; begin it with the line '# @package {package}'"
            )
    cluster = data.pop("cluster", {})
    config = from_dict(Config, data)
    config = dataclasses.replace(config, cluster=cluster_from_dict(cluster))
    return without_secrets(config)


def without_secrets(config: Config) -> Config:
    """Returns ``config``. Raises ``ConfigError`` for a secret in it before anything is written: a later refusal would be recorded with the
    overrides that hold the secret."""
    refuse_secrets(config.cluster)
    refuse_secret_address(config.tracking.uri)
    return config


def _plain(value: Any) -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.to_container(value, resolve=True, throw_on_missing=True) if OmegaConf.is_config(value) else value


@cache
def override_parser() -> Any:
    """Returns Hydra's parser, which is kept: making it takes longer than parsing an override."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    return OverridesParser.create()


@contextmanager
def plain_errors() -> Iterator[None]:
    """Turns errors of Hydra and OmegaConf into ``ConfigError``, with the part of their text that a person needs."""
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
        # conf/ is fixed, so every error of composition comes from the overrides; Hydra raises some as plain ValueError.
        raise ConfigError(_first_sentence(error)) from None


def _first_sentence(error: BaseException) -> str:
    """Returns the part of a Hydra error that a person needs: its words without the advice about HYDRA_FULL_ERROR and internal keys."""
    noise = ("full_key:", "object_type=", "reference_type=", "Set the environment variable", "See https://")
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and not line.strip().startswith(noise)]
    cause = error.__cause__
    if cause is not None and str(cause).strip() and str(cause).strip().splitlines()[0] not in " ".join(lines):
        lines.append(str(cause).strip().splitlines()[0])
    text = "; ".join(lines[:4]) or type(error).__name__
    key = getattr(error, "full_key", None)
    return f"{key}: {text}" if key and str(key) not in text else text
