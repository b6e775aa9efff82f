"""Whether this machine can run the test cluster, and the installation of the Debian packages that it is made of."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "slurmdbd", "sbatch", "sacct", "mariadbd", "ip", "nsenter", "unshare", "cc", "runc")
INSTALL = Path(__file__).parents[2] / "system-packages"


def missing_programs() -> list[str]:
    """Programs of ``PROGRAMS`` that are not installed."""
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    return [name for name in PROGRAMS if shutil.which(name, path=path) is None]


def why_not() -> str | None:
    """Why the test cluster cannot run on this machine, in one line; ``None`` if it can (after ``install``)."""
    if os.geteuid() != 0:
        return "the Slurm test cluster needs root (network and process namespaces)"
    if missing_programs() and shutil.which("apt-get") is None:
        return f"the Slurm test cluster needs {', '.join(missing_programs())}, and there is no apt-get to install them"
    probe = ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "true"]
    if subprocess.run(probe, capture_output=True).returncode:
        return "the Slurm test cluster needs namespaces, which this machine does not allow (unshare fails)"
    return None


def install() -> None:
    """Install what is missing; nothing is done when all is there. No service of theirs is started."""
    if missing_programs() or not Path("/usr/include/slurm/spank.h").exists():
        subprocess.run([INSTALL, "slurm"], check=True)
