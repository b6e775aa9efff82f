"""Our packages and this installation's own Python. Another package ``trainer`` may be installed, or lie in the folder in which the user
stands, or in one that PYTHONPATH names: neither the launcher nor the processes that it starts take it for ours."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

FOLDER = Path(__file__).parents[1]
"""Holds ``launcher`` and ``trainer``."""


def find_trainer() -> str:
    """Puts ``FOLDER`` first on the path where another ``trainer`` would be found. Returns why ours cannot be had; empty if it can."""
    path = FOLDER / "trainer" / "__init__.py"
    if "trainer" not in sys.modules and ((found := find_spec("trainer")) is None or found.origin != str(path)):
        sys.path.insert(0, str(FOLDER))
    elif (there := getattr(sys.modules.get("trainer"), "__file__", None) or str(path)) != str(path):
        return f"{there}, another package called trainer, was imported first; import launcher before it"
    if path.is_file() and b"Trireme" in path.read_bytes():
        return ""
    return f"{path} is of another package called trainer, installed over Trireme's; uninstall that, then install Trireme again"


TROUBLE = find_trainer()
"""Why nothing here can work: a line for whoever starts the program, or imports it."""


def module(name: str, *words: str) -> list[str]:
    """The command that runs one of our modules, or an installed one, whatever lies in the working folder."""
    return [sys.executable, "-P", "-m", name, *words]


def finding_ours() -> dict[str, str]:
    """Environment variables with which Python finds our packages before others of their names."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(FOLDER), os.environ.get("PYTHONPATH")]))}


def run(name: str, *words: str) -> int:
    """Runs one of our modules in the foreground; its exit code."""
    return subprocess.run(module(name, *words), env=os.environ | finding_ours()).returncode
