"""The test cluster itself leaves nothing behind, however the process ends that started it."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clusters.kubernetes.fixture import PROJECT, Kubernetes
from tests.clusters.slurm.process import MARK, wait_for

OWNER = """
import subprocess, sys, time
from pathlib import Path
from tests.clusters.kubernetes import OwnCluster

cluster = OwnCluster(Path(sys.argv[1]), real=True, played=0)
for name in ("log", "run"):
    (cluster.directory / name).mkdir()
cluster.node.start()
pod = subprocess.Popen(["sleep", "1000"])  # as a pod's process: in a cgroup of the cluster, of which it knows nothing
for group in cluster.node._groups():
    (group / "cgroup.procs").write_text(str(pod.pid))
print(cluster.settings.number, pod.pid, flush=True)
time.sleep(1000)
"""
"""Starts containerd and a kubelet that has no server; what they need of the machine is there all the same."""


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.campaign("kubernetes"))])
def test_a_killed_owner_leaves_no_process_cgroup_or_network_interface(real_node: Kubernetes, tmp_path: Path, how: signal.Signals) -> None:
    if real_node.own is None:
        pytest.skip("no cluster is started where KUBECONFIG names one")
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], cwd=PROJECT, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    number, pod = owner.stdout.readline().split()
    assert _there(number) and _marked(tmp_path) and Path(f"/proc/{pod}").exists()
    owner.send_signal(how)
    owner.wait()
    wait_for(lambda: not _marked(tmp_path) and not _there(number) and not Path(f"/proc/{pod}").exists(), "everything to be removed")
    with open(f"/tmp/trireme-kubernetes-{number}.lock") as lock:
        wait_for(lambda: _free(lock.fileno()), "the number to be free for another cluster")


def _there(number: str) -> list[Path]:
    """What a cluster of that number has of this machine, beside processes."""
    # os.walk passes over folders that vanish while they are read; cgroups do just then. Path.glob raises there (Python 3.11).
    groups = [Path(at) / name for at, names, _ in os.walk("/sys/fs/cgroup") for name in names if name == f"trireme-test-{number}"]
    return [place for place in (Path(f"/sys/class/net/trireme{number}"), *groups) if place.exists()]


def _marked(directory: Path) -> list[int]:
    mark, found = f"{MARK}={directory}".encode(), []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (process / "environ").read_bytes().split(b"\0"):
                found.append(int(process.name))
        except OSError:
            continue
    return found


def _free(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(lock, fcntl.LOCK_UN)
    return os.fstat(lock).st_size == 0
