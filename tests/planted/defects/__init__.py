"""The defects, one module a room: ``DEFECTS`` in each."""

from __future__ import annotations

import importlib
import pkgutil

from tests.planted.defect import Defect


def rooms() -> dict[str, list[Defect]]:
    """The defects of each room, by its name."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return {name: list(importlib.import_module(f"{__name__}.{name}").DEFECTS) for name in names}
