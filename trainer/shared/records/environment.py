"""The environment of a run beyond its configuration: the driver of the node's devices, the modules that its job loaded."""

from __future__ import annotations

import os
import platform
from pathlib import Path

_DRIVERS = ("/sys/module/nvidia/version", "/sys/module/amdgpu/version")


def environment() -> dict[str, str]:
    """Returns the environment of this process, by name; unknown entries are left out."""
    found = {"python": platform.python_version(), "driver": _driver(), "modules": os.environ.get("LOADEDMODULES", "")}
    return {name: words for name, words in found.items() if words}


def _driver() -> str:
    return next((path.read_text().strip() for path in map(Path, _DRIVERS) if path.is_file()), "")
