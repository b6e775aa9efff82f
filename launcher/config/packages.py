"""Optional Python packages, and the command that installs missing ones."""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from importlib.metadata import PackageNotFoundError, requires

from trainer.shared.run.errors import ConfigError

MODULES = {"train": ("torch", "tokenizers", "safetensors"), "mlflow": ("mlflow",), "functions": ("cloudpickle",)} | {
    name: (module,) for name, module in (("parquet", "pyarrow"), ("tensorboard", "tensorboard"), ("wandb", "wandb"))
}
"""Packages of each extra, by the names under which they are imported."""


def missing(extra: str) -> str | None:
    """Returns the first package of ``extra`` that is not installed; None if all are."""
    return next((name for name in MODULES[extra] if importlib.util.find_spec(name) is None), None)


def need(extra: str, what: str) -> None:
    """Raises ``ConfigError`` if ``what`` cannot be done for lack of a package of ``extra``."""
    if name := missing(extra):
        raise ConfigError(f"{what} needs the Python package {name!r}; run {install_command(extra, name)}")


def install_command(extra: str, package: str = "") -> str:
    """Returns the shell command that installs the packages of Trireme's ``extra`` in the same environment, or ``package`` if it has none.

    The packages are named themselves: with ``trireme[kubernetes]`` pip would put another Trireme in place of an editable installation.
    """
    try:
        found = [line.partition(";") for line in requires("trireme") or ()]
    except PackageNotFoundError:  # run from the sources
        found = []
    wanted = [requirement.strip() for requirement, _, marker in found if re.search(rf"extra\s*==\s*['\"]{extra}['\"]", marker)]
    packages = [requirement for requirement in wanted if not requirement.startswith("trireme[")] or [package or extra]
    return shlex.join([sys.executable, "-m", "pip", "install", *packages])
