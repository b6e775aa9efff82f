"""Whether this machine can run the test cluster, and the Debian packages that it is made of."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PACKAGES = (
    "munge",
    "slurmctld",
    "slurmd",
    "slurmdbd",
    "slurm-client",
    "slurm-wlm-basic-plugins",
    "slurm-wlm-mysql-plugin",
    "mariadb-server-core",
    "mariadb-client-core",
    "libeatmydata1",
    "iproute2",
    "util-linux",
    "procps",
    "libslurm-dev",
    "gcc",
    "libc6-dev",  # the container plugin is compiled
    "runc",  # Slurm's own --container
)
PROGRAMS = ("munged", "slurmctld", "slurmd", "slurmdbd", "sbatch", "sacct", "mariadbd", "ip", "nsenter", "unshare", "cc", "runc")
POLICY = Path("/usr/sbin/policy-rc.d")


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
    """Install what is missing of ``PACKAGES``; nothing is done when all is there. No service of theirs is started."""
    if not missing_programs() and Path("/usr/include/slurm/spank.h").exists():
        return
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    options = ["-qq", "--no-install-recommends", "-o", "DPkg::Lock::Timeout=600"]
    with services_kept_down():
        subprocess.run(["apt-get", "update", "-qq"], check=True, env=environment, stdout=subprocess.DEVNULL)
        subprocess.run(["apt-get", "install", "-y", *options, *PACKAGES], check=True, env=environment, stdout=subprocess.DEVNULL)


@contextmanager
def services_kept_down() -> Iterator[None]:
    """While packages are installed their own daemons must not start: Debian asks ``policy-rc.d`` for permission."""
    ours = not POLICY.exists()
    if ours:
        POLICY.write_text("#!/bin/sh\nexit 101\n")
        POLICY.chmod(0o755)
    try:
        yield
    finally:
        if ours:
            POLICY.unlink(missing_ok=True)
