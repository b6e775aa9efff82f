"""Optional Python packages: the command that installs what is missing."""

from __future__ import annotations

import re
import shlex
import sys
from importlib.metadata import PackageNotFoundError, requires


def install_command(extra: str) -> str:
    """What installs the packages of Trireme's ``extra`` (slurm, kubernetes) in the same environment, for a shell.

    They are named themselves: ``trireme[slurm]`` would have pip put another Trireme in place of an editable installation.
    """
    try:
        found = [line.partition(";") for line in requires("trireme") or ()]
    except PackageNotFoundError:  # run from its sources
        found = []
    wanted = [requirement.strip() for requirement, _, marker in found if re.search(rf"extra\s*==\s*['\"]{extra}['\"]", marker)]
    packages = [requirement for requirement in wanted if not requirement.startswith("trireme[")] or [_OF_EXTRA[extra]]
    return shlex.join([sys.executable, "-m", "pip", "install", *packages])


_OF_EXTRA = {"slurm": "submitit", "kubernetes": "kubernetes"}
