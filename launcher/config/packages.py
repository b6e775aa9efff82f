"""Optional Python packages: the command that installs what is missing."""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from importlib.metadata import PackageNotFoundError, requires

from trainer.shared.run.errors import ConfigError

MODULES = {"train": ("torch", "tokenizers", "safetensors"), "mlflow": ("mlflow",)}
"""What an extra brings, as it is imported."""


def missing(extra: str) -> str | None:
    """The first package of ``extra`` that is not installed; None where all are."""
    return next((name for name in MODULES[extra] if importlib.util.find_spec(name) is None), None)


def need(extra: str, what: str) -> None:
    """``ConfigError`` where ``what`` cannot be done for lack of the packages of ``extra``."""
    if name := missing(extra):
        raise ConfigError(f"{what} needs the Python package {name!r}; run {install_command(extra, name)}")


def install_command(extra: str, package: str = "") -> str:
    """Returns what installs the packages of Trireme's ``extra`` in the same environment, for a shell; or ``package`` where it has none.

    They are named themselves: ``trireme[kubernetes]`` would have pip put another Trireme in place of an editable installation.
    """
    try:
        found = [line.partition(";") for line in requires("trireme") or ()]
    except PackageNotFoundError:  # run from its sources
        found = []
    wanted = [requirement.strip() for requirement, _, marker in found if re.search(rf"extra\s*==\s*['\"]{extra}['\"]", marker)]
    packages = [requirement for requirement in wanted if not requirement.startswith("trireme[")] or [package or extra]
    return shlex.join([sys.executable, "-m", "pip", "install", *packages])
