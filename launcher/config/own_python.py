"""Processes of this installation's own Python. The folder in which the user stands may have a ``trainer.py`` of its own, or name one in
PYTHONPATH: they take neither for ours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def module(name: str, *words: str) -> list[str]:
    """The command that runs one of our modules, or an installed one, whatever lies in the working folder."""
    return [sys.executable, "-P", "-m", name, *words]


def finding_ours() -> dict[str, str]:
    """Environment variables with which Python finds our packages before others of their names."""
    given = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), given]))}


def run(name: str, *words: str) -> int:
    """Runs one of our modules in the foreground; its exit code."""
    return subprocess.run(module(name, *words), env=os.environ | finding_ours()).returncode
