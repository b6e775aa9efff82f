"""A real node on this machine: containerd and the kubelet, which run pods with addresses of their own.

Both live in a mount namespace in which /var/lib/kubelet, /var/lib/cni, /var/log and /run are folders of the test cluster, and in
which the kernel settings that a kubelet would change are shielded by files. Outside there is, while it runs: one bridge, one
cgroup in each hierarchy, and net.ipv4.ip_forward. No image is pulled from anywhere: an image that is not here fails, as it would.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from pathlib import Path

import yaml

from tests.clusters.kubernetes.control_plane import CURRENT, Settings, environment, flags_of
from tests.clusters.kubernetes.image import IMAGE, PAUSE, save
from tests.clusters.slurm.process import MARK, Daemon, succeeds, wait_for

NAME = "127.0.0.1"
"""Of the node: then the kubelet listens on loopback, and logs and exec work."""
PLUGINS = Path("/usr/lib/cni")
PROGRAMS = ("containerd", "containerd-shim-runc-v2", "ctr", "runc", "busybox", "ip", "nsenter", "unshare")
SHIELDED = {
    "vm/overcommit_memory": 1, "vm/panic_on_oom": 0, "kernel/panic": 10, "kernel/panic_on_oops": 1,
    "kernel/keys/root_maxkeys": 1000000, "kernel/keys/root_maxbytes": 25000000,
}  # fmt: skip
"""Settings of the whole machine that a kubelet writes, with the values that it wants."""
_CGROUPS = Path("/sys/fs/cgroup")
_FORWARD = Path("/proc/sys/net/ipv4/ip_forward")
_PATH = {"PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"}


def obstacle() -> str | None:
    """Why no node can run here; None if one can."""
    if os.geteuid() != 0:
        return "a kubelet needs root"
    missing = [name for name in PROGRAMS if shutil.which(name, path=_PATH["PATH"]) is None]
    if missing or not (PLUGINS / "bridge").exists():
        return f"{', '.join(missing) or PLUGINS} is missing: apt-get install containerd runc containernetworking-plugins busybox-static iproute2"
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        return "mount namespaces are not allowed (unshare fails)"
    return None


class Node:
    """One real node."""

    def __init__(self, settings: Settings):
        self._settings = settings
        self.folder = settings.directory / "node"
        self._bridge, self._group = f"trireme{settings.number}", f"trireme-test-{settings.number}"
        self._socket = settings.directory / "run" / "containerd.sock"
        self._containerd = self._daemon("containerd", self._containerd_command(), self._serves)

    def start(self) -> None:
        self.clean()  # what a killed run of the same number left
        for name in ("kubelet", "log", "cni", "networks", "hosts/_default", "shield", "plugins"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        (self.folder / "ip_forward").write_text(_FORWARD.read_text())
        self._write_files()
        self._make_groups()
        self._make_bridge()
        self._containerd.start(environment() | _PATH, self._settings.with_parent)
        self._import_images()
        self._kubelet().start(environment() | _PATH, self._settings.with_parent)

    def kill(self) -> None:
        """The kubelet dies; pods go on, and nobody reports on them."""
        self._kubelet().kill()

    def revive(self) -> None:
        self._kubelet().start(environment() | _PATH, self._settings.with_parent)

    def stop(self) -> None:
        self._kubelet().kill()
        self._containerd.kill()
        self.remove()

    def remove(self) -> None:
        """What is left when kubelet and containerd have ended."""
        self.clean()
        with contextlib.suppress(FileNotFoundError):
            _FORWARD.write_text((self.folder / "ip_forward").read_text())

    # -- programs -------------------------------------------------------------------------------------------------------------

    def _daemon(self, name: str, command: list[str], ready: object = None) -> Daemon:
        return Daemon(name, command, self._settings.directory, ready or (lambda: True), log=name)  # type: ignore[arg-type]

    def _containerd_command(self) -> list[str]:
        config = str(self.folder / "containerd.toml")
        return ["unshare", "--mount", "--propagation", "private", "--", str(self.folder / "enter"), "containerd", "--config", config]

    def _kubelet(self) -> Daemon:
        """In containerd's mount namespace."""
        flags: dict[str, object] = {
            "config": self.folder / "kubelet.yaml", "kubeconfig": self._settings.directory / "kubelet.kubeconfig",
            "hostname-override": NAME, "container-runtime": "remote", "container-runtime-endpoint": f"unix://{self._socket}",
            "cert-dir": self.folder / "certificates", "node-labels": "real=true",
        }  # fmt: skip
        enter = ["nsenter", "--target", str(self._containerd.pid()), "--mount", "--root", "--wd", "--"]
        program = [str(self._settings.programs / "kubelet"), *flags_of(flags)]
        return self._daemon("kubelet", enter + program)

    def _serves(self) -> bool:
        return succeeds(["ctr", "-a", str(self._socket), "version"], _PATH)

    def _import_images(self) -> None:
        busybox = Path(shutil.which("busybox") or "")
        for name, entry, program in ((PAUSE, ["/busybox", "sleep", "2147483647"], busybox), (IMAGE, [], None)):
            archive = self.folder / "image.tar"
            save(archive, name, entry, program)
            command = ["ctr", "-a", str(self._socket), "-n", "k8s.io", "images", "import", str(archive)]
            subprocess.run(command, check=True, capture_output=True, env=_PATH)

    # -- files ----------------------------------------------------------------------------------------------------------------

    def _write_files(self) -> None:
        for setting, value in SHIELDED.items():
            (self.folder / "shield" / setting.replace("/", "_")).write_text(f"{value}\n")
        (self.folder / "resolv.conf").write_text("nameserver 127.0.0.1\n")  # no name is looked up outside
        # containerd 1.6 wants a [host] table; a file with 'server' alone is ignored, and the real registry is asked.
        nowhere = 'server = "http://127.0.0.1:1"\n[host."http://127.0.0.1:1"]\n  capabilities = ["pull", "resolve"]\n'
        (self.folder / "hosts/_default/hosts.toml").write_text(nowhere)
        (self.folder / "networks/10-test.conflist").write_text(self._network())
        (self.folder / "containerd.toml").write_text(self._containerd_config())
        (self.folder / "kubelet.yaml").write_text(yaml.safe_dump(self._kubelet_config()))
        enter = self.folder / "enter"
        enter.write_text(self._enter_script())
        enter.chmod(0o755)

    def _enter_script(self) -> str:
        folder = self.folder
        shields = [
            f"mount --bind {folder}/shield/{name.replace('/', '_')} /proc/sys/{name}"
            for name in SHIELDED
            if Path("/proc/sys", name).exists()
        ]
        lines = [
            "#!/bin/sh", "set -e", "mkdir -p /var/lib/kubelet /var/lib/cni", "mount --make-rshared /",
            f"mount --bind {folder}/kubelet /var/lib/kubelet", f"mount --bind {folder}/log /var/log", f"mount --bind {folder}/cni /var/lib/cni",
            f"mount --bind {folder}/resolv.conf $(readlink -f /etc/resolv.conf)", "mount -t tmpfs -o mode=755 tmpfs /run",
            *shields, 'exec "$@"',
        ]  # fmt: skip
        return "\n".join(lines) + "\n"

    def _network(self) -> str:
        """No masquerading and no way out of the machine: pods reach each other and this host."""
        return f"""{{"cniVersion": "0.4.0", "name": "test", "plugins": [
            {{"type": "bridge", "bridge": "{self._bridge}", "isGateway": true, "ipMasq": false, "hairpinMode": true,
              "ipam": {{"type": "host-local", "dataDir": "{self.folder}/addresses", "ranges": [[{{"subnet": "{self._settings.pod_network}.0/24"}}]]}}}},
            {{"type": "loopback"}}]}}"""

    def _containerd_config(self) -> str:
        """restrict_oom_score_adj: root without CAP_SYS_RESOURCE may not lower a score, and every sandbox would fail."""
        return f"""version = 2
root = "{self.folder}/containerd"
state = "{self.folder}/state"
disabled_plugins = ["io.containerd.internal.v1.opt", "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.zfs",
  "io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.devmapper"]
[grpc]
  address = "{self._socket}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE}"
  stream_server_address = "127.0.0.1"
  netns_mounts_under_state_dir = true
  restrict_oom_score_adj = true
  cni = {{ bin_dir = "{PLUGINS}", conf_dir = "{self.folder}/networks" }}
  registry = {{ config_path = "{self.folder}/hosts" }}
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    options = {{ SystemdCgroup = false }}
"""

    def _kubelet_config(self) -> dict[str, object]:
        ports, pki = self._settings.ports, self._settings.pki
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
            "address": "127.0.0.1", "port": ports[5], "readOnlyPort": 0, "healthzBindAddress": "127.0.0.1", "healthzPort": ports[6],
            "tlsCertFile": str(pki / "kubelet.crt"), "tlsPrivateKeyFile": str(pki / "kubelet.key"),
            "authentication": {"anonymous": {"enabled": False}, "webhook": {"enabled": False}, "x509": {"clientCAFile": str(pki / "ca.crt")}},
            "authorization": {"mode": "AlwaysAllow"}, "cgroupDriver": "cgroupfs", "cgroupRoot": f"/{self._group}",
            "failSwapOn": False, "makeIPTablesUtilChains": False, "clusterDNS": [self._settings.gateway], "clusterDomain": "cluster.local",
            "volumePluginDir": str(self.folder / "plugins"), "syncFrequency": "10s", "nodeStatusUpdateFrequency": "3s",
            "imageMinimumGCAge": "24h", "imageGCHighThresholdPercent": 100, "imageGCLowThresholdPercent": 99,
            "evictionHard": {"memory.available": "200Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
            **({"failCgroupV1": False} if CURRENT else {}),
        }  # fmt: skip

    # -- what is outside of its folder --------------------------------------------------------------------------------------------

    def clean(self) -> None:
        """Remove it: shims, the pods' processes, cgroups, the bridge."""
        wait_for(self._kill_pods, "the pods' processes to end")
        self._kill_shims()
        for root in self._groups():
            for folder, _, _ in os.walk(root, topdown=False):
                with contextlib.suppress(OSError):
                    os.rmdir(folder)
        subprocess.run(["ip", "link", "delete", self._bridge], capture_output=True, env=_PATH)

    def _kill_pods(self) -> bool:
        """Whatever is in our cgroups is ours. True when nothing is."""
        alive = {pid for root in self._groups() for folder, _, _ in os.walk(root) for pid in _processes(Path(folder))}
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        return not alive

    def _kill_shims(self) -> None:
        """They outlive containerd; their command line names its socket, and their environment the cluster."""
        mark = f"{MARK}={self._settings.directory}".encode()
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if (process / "comm").read_text().startswith("containerd-shim") and mark in (process / "environ").read_bytes().split(b"\0"):
                    os.kill(int(process.name), signal.SIGKILL)

    def _groups(self) -> list[Path]:
        return [root for root in [_CGROUPS / self._group, *_CGROUPS.glob(f"*/{self._group}")] if root.is_dir()]

    def _make_groups(self) -> None:
        """The kubelet's cgroup has to be there before it starts; in a version 1 hierarchy its cpuset starts empty."""
        unified = (_CGROUPS / "cgroup.procs").exists()
        for hierarchy in [_CGROUPS] if unified else [path for path in _CGROUPS.iterdir() if path.is_dir() and path.name != "unified"]:
            group = hierarchy / self._group
            group.mkdir(exist_ok=True)
            for name in ("cpuset.cpus", "cpuset.mems"):
                if (hierarchy / name).exists() and (group / name).exists():
                    (group / name).write_text((hierarchy / name).read_text())

    def _make_bridge(self) -> None:
        address = f"{self._settings.gateway}/24"
        for command in (
            ["link", "add", self._bridge, "type", "bridge"],
            ["address", "add", address, "dev", self._bridge],
            ["link", "set", self._bridge, "up"],
        ):
            subprocess.run(["ip", *command], check=True, capture_output=True, env=_PATH)


def _processes(group: Path) -> list[str]:
    """Of a cgroup; none of one that vanishes while it is read."""
    try:
        return (group / "cgroup.procs").read_text().split()
    except OSError:
        return []
