"""The families by name, found by listing this folder: a new one is one file with a ``FAMILY``."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from pathlib import Path

from trainer.shared.families.family import Family


def _found() -> dict[str, Family]:
    """Returns the ``FAMILY`` of each module in this folder that has one, in their order."""
    modules = [import_module(f"{__package__}.{module.name}") for module in pkgutil.iter_modules([str(Path(__file__).parent)])]
    families = [module.FAMILY for module in modules if hasattr(module, "FAMILY")]
    return {family.name: family for family in sorted(families, key=lambda family: (family.order, family.name))}


FAMILIES = _found()
"""Families by ``model.family``."""
