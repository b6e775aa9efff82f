"""Whether the Debian packages that a test cluster is made of are there, and their installation."""

from __future__ import annotations

import os
import shutil
import subprocess

from tests.clusters.kubernetes import build
from tests.clusters.kubernetes.control_plane import CURRENT
from tests.clusters.slurm.packages import INSTALL

PROGRAMS = ("etcd", "containerd", "runc", "busybox", "ip", "nsenter", "/usr/lib/cni/bridge")


def install() -> None:
    """As root, where there is apt-get, install what is missing, and build Kubernetes; services that come along are not started."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    there = all(shutil.which(program, path=path) for program in PROGRAMS) and (CURRENT or build.built())
    if not there and os.geteuid() == 0 and shutil.which("apt-get"):
        subprocess.run([INSTALL, "kubernetes"], check=True)
