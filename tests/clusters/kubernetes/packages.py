"""The Debian packages that a test cluster is made of."""

from __future__ import annotations

import os
import shutil
import subprocess

from tests.clusters.kubernetes import build
from tests.clusters.kubernetes.control_plane import CURRENT
from tests.clusters.slurm.packages import services_kept_down

PACKAGES = {
    "etcd": "etcd-server",
    "containerd": "containerd",
    "runc": "runc",
    "busybox": "busybox-static",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "/usr/lib/cni/bridge": "containernetworking-plugins",
}
"""By one of their programs."""
BUILDERS = {"go": "golang-go", "dpkg-source": "dpkg-dev"}
"""The same of what is only needed until Kubernetes has been built."""
SEARCHED = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def lacking() -> list[str]:
    """Packages that are not installed."""
    wanted = PACKAGES | ({} if CURRENT or build.built() else BUILDERS)
    return [package for program, package in wanted.items() if shutil.which(program, path=SEARCHED) is None]


def install() -> None:
    """As root, where there is apt-get, install what is lacking; services that come along are not started."""
    packages = lacking()
    if not packages or os.geteuid() != 0 or shutil.which("apt-get") is None:
        return
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    command = ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=600"]
    with services_kept_down():
        subprocess.run([*command, "update"], check=True, env=environment, stdout=subprocess.DEVNULL)
        subprocess.run(
            [*command, "install", "-y", "--no-install-recommends", *packages], check=True, env=environment, stdout=subprocess.DEVNULL
        )
