"""The test cluster itself: munge, MariaDB, accounting, controller and nodes, each a foreground process of its own.

A node is one process tree in network, host-name, mount and process namespaces of its own: killing it is a power cut.
All state is in the cluster's directory, so any process can go on with a cluster that another one started.
"""

from __future__ import annotations

import glob
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.clusters.slurm.configuration import FIRST_JOB, Settings, files
from tests.clusters.slurm.process import Daemon, succeeds, wait_for

NODE = """\
mount -t proc proc /proc && hostname "$1" && mount --bind "$2" /etc/hosts || exit 1
slurmd -D -N "$1" & wait $!  # the shell stays: process 1 of a node has to reap what ended jobs leave
"""
CONTAINER = Path(__file__).with_name("container.c")
UP = {"idle", "allocated", "mixed", "completing", "planned"}


class Cluster:
    """Start, stop and break one cluster. Every method may be called from any process, any number of times."""

    def __init__(self, settings: Settings, with_parent: bool = False):
        """``with_parent``: no daemon outlives the process that started it, whatever ends that."""
        self.settings = settings
        self.with_parent = with_parent

    # ---------------------------------------------------------------- what a client needs

    @property
    def env(self) -> dict[str, str]:
        """Environment of daemons and clients: the caller's, without settings of another Slurm."""
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_", "SRUN_", "SQUEUE_", "SACCT_"))}
        enroot = "" if self.settings.pyxis is None else f":{self.settings.pyxis}/bin"
        return clean | {"SLURM_CONF": str(self.settings.conf), "PATH": clean.get("PATH", "") + ":/usr/sbin:/sbin" + enroot}

    def output(self, *command: str) -> str:
        """Standard output of a client command; ``CalledProcessError`` when it fails."""
        return subprocess.run(command, env=self.env, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL).stdout

    def node_states(self) -> dict[str, str]:
        """State of each node by name; a '*' is appended to that of one that does not answer."""
        return dict(line.split() for line in self.output("sinfo", "-h", "-N", "-p", "main", "-o", "%N %T").splitlines())

    # ---------------------------------------------------------------- verbs

    def start(self) -> None:
        """From nothing to all nodes idle; what runs already is left alone."""
        self._write_files()
        self._network_up()
        for name in ("munged", "mariadb", "slurmdbd", "slurmctld", *self.settings.names):
            self.boot(name)
        self._accounts()
        self._wait_until_up()

    def mend(self) -> None:
        """End all jobs and start again whatever was broken or held."""
        for name in ("munged", "mariadb", "slurmdbd", "slurmctld"):
            self.daemon(name).send(signal.SIGCONT)
        for node in self.settings.names:
            self.plug(node)
        self.start()
        for job in self.output("squeue", "-h", "-o", "%F").split():
            succeeds(["scancel", job], self.env)  # not if it has just ended
        wait_for(lambda: not self.output("squeue", "-h"), "all jobs to end")
        self._wait_until_up()

    def stop(self) -> None:
        """End everything and remove all traces. Nodes are cut off, jobs and all."""
        for node in self.settings.names:
            self.kill(node)
        for name in ("slurmctld", "slurmdbd", "mariadb", "munged"):
            self.daemon(name).kill(signal.SIGTERM)
        self._network_down()
        for folder in (self.settings.directory, self.settings.containers):
            shutil.rmtree(folder, ignore_errors=True)

    def kill(self, name: str) -> None:
        """``kill -9``: a daemon crashes, a node loses its power."""
        self.daemon(name).kill()

    def boot(self, name: str) -> None:
        """Start a daemon or a node (again)."""
        daemon = self.daemon(name)
        if name == "slurmctld" and daemon.pid() is None:
            self._new_job_ids()
        daemon.start(self.env, self.with_parent)

    def cut(self, node: str) -> None:
        """Unplug a node's cable: its tasks run on."""
        self._ip("link", "set", self.settings.namespace(node), "down")

    def plug(self, node: str) -> None:
        self._ip("link", "set", self.settings.namespace(node), "up")

    def _wait_until_up(self) -> None:
        """Nodes that a controller has drained, because of a job that it had forgotten say, are taken back.

        A controller that began anew also needs the accounts, which it refuses all jobs without: should the accounting daemon be killed next, it
        would never get them.
        """
        known = ["scontrol", "show", "assoc_mgr", "users=root", "flags=users"]
        wait_for(lambda: "UserName=root" in self.output(*known), "the controller to know its users")

        def up() -> bool:
            states = self.node_states()
            for node, state in states.items():
                if state.startswith(("down", "drain")):
                    succeeds(["scontrol", "update", f"nodename={node}", "state=resume"], self.env)  # not if it has just come back by itself
            return UP.issuperset(state.rstrip("-") for state in states.values())  # "-": the scheduler has plans for it

        try:
            wait_for(up, "all nodes to be up")
        except TimeoutError as error:
            raise TimeoutError(f"{error}: {self.output('sinfo', '-N', '-p', 'main', '-o', '%N %T %E')}") from None

    # ---------------------------------------------------------------- daemons

    def daemon(self, name: str) -> Daemon:
        """One of munged, mariadb, slurmdbd, slurmctld, or a node's name."""
        known = {"munged": self._munged, "mariadb": self._mariadb, "slurmdbd": self._slurmdbd, "slurmctld": self._slurmctld}
        if name in known:
            return known[name]()
        if name in self.settings.names:
            return self._node(name)
        raise ValueError(f"no daemon or node {name!r}; there are {', '.join([*known, *self.settings.names])}")

    def _munged(self) -> Daemon:
        s = self.settings
        socket = str(s.run("munge.sock"))
        command = [
            "munged",
            "--foreground",
            "--force",
            f"--socket={socket}",
            f"--key-file={s.directory}/munge.key",
            f"--pid-file={s.run('munged-own.pid')}",
            f"--log-file={s.log('munged')}",
            f"--seed-file={s.directory}/munge.seed",
        ]
        return Daemon("munged", command, s.directory, lambda: succeeds(["munge", "-n", "-S", socket], self.env))

    def _mariadb(self) -> Daemon:
        s = self.settings
        socket = f"--socket={s.run('mysql.sock')}"
        command = [
            "mariadbd",
            "--no-defaults",
            "--user=root",
            f"--datadir={s.directory}/db",
            socket,
            "--skip-networking",
            "--skip-name-resolve",
            f"--log-error={s.log('mariadb')}",
            "--innodb-buffer-pool-size=64M",
            "--innodb-log-file-size=8M",
            "--innodb-lock-wait-timeout=900",
        ]
        ready = ["mariadb", "--no-defaults", socket, "-e", "select 1"]
        return Daemon("mariadb", command, s.directory, lambda: succeeds(ready, self.env), _without_fsync())

    def _slurmdbd(self) -> Daemon:
        # slurmdbd.conf cannot name the database's socket; the client library takes it from this variable
        environment = {"MYSQL_UNIX_PORT": str(self.settings.run("mysql.sock"))}
        ready = ["sacctmgr", "-n", "list", "cluster"]
        return Daemon("slurmdbd", ["slurmdbd", "-D"], self.settings.directory, lambda: succeeds(ready, self.env), environment)

    def _slurmctld(self) -> Daemon:
        return Daemon("slurmctld", ["slurmctld", "-D"], self.settings.directory, lambda: succeeds(["scontrol", "ping"], self.env))

    def _node(self, node: str) -> Daemon:
        # not 'ip netns exec': it hides /sys/fs/cgroup. --kill-child: the node dies with the process that is kept track of
        command = [
            "nsenter",
            f"--net=/run/netns/{self.settings.namespace(node)}",
            "unshare",
            "--uts",
            "--mount",
            "--pid",
            "--fork",
            "--kill-child",
            "--propagation",
            "private",
            "bash",
            "-c",
            NODE,
            "node",
            node,
            str(self.settings.directory / "etc" / "hosts"),
        ]
        return Daemon(node, command, self.settings.directory)

    # ---------------------------------------------------------------- what they need

    def _write_files(self) -> None:
        """Folders, configuration, key, fake GPUs and an empty database."""
        s = self.settings
        for folder in ("etc", "run", "log", "state", "dev", "run/pyxis", *(f"spool/{node}" for node in s.names)):
            (s.directory / folder).mkdir(parents=True, exist_ok=True)
        for name, text in files(s).items():
            path = s.directory / "etc" / name
            path.write_text(text)
            path.chmod(0o600 if name == "slurmdbd.conf" else 0o644)
        if not (s.directory / "etc" / FIRST_JOB).exists():
            self._new_job_ids()
        for i in range(s.gpus):  # slurmd wants character devices with distinct names
            device = s.directory / "dev" / f"gpu{i}"
            if not device.is_symlink():
                device.symlink_to("/dev/null")
        key = s.directory / "munge.key"
        if not key.exists():
            key.touch(mode=0o600)
            key.write_bytes(os.urandom(1024))
        if s.pyxis is None and not (s.directory / "container.so").exists():
            subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", s.directory / "container.so", CONTAINER], check=True)
        if not (s.directory / "db" / "mysql").exists():
            self._create_database()

    def _new_job_ids(self) -> None:
        """A controller that crashes forgets the jobs of its last seconds, and would give their ids to others.

        Nodes that remember the former job of an id refuse the latter, and Slurm then drains them: "Duplicate jobid".
        """
        path = self.settings.directory / "etc" / FIRST_JOB
        before = int(path.read_text().partition("=")[2]) if path.exists() else 0
        path.write_text(f"FirstJobId={before // 10000 * 10000 + 10001}\n")

    def _create_database(self) -> None:
        command = [
            "mariadb-install-db",
            "--no-defaults",
            "--user=root",
            f"--datadir={self.settings.directory}/db",
            "--skip-test-db",
            "--skip-name-resolve",
            "--auth-root-authentication-method=socket",
            "--innodb-log-file-size=8M",
        ]
        subprocess.run(command, env=self.env | _without_fsync(), check=True, capture_output=True)

    def _accounts(self) -> None:
        """With limits enforced each user needs an association; the quality of service 'small' refuses what is over its limits."""
        marker = self.settings.directory / "db" / "accounts"
        if marker.exists():
            return
        for arguments in (
            ["add", "account", "test", "Description=test", "Organization=test"],
            ["add", "user", "root", "DefaultAccount=test"],
            ["add", "qos", "small", "MaxNodesPerJob=1", "Flags=DenyOnLimit"],
            ["add", "qos", "one", "MaxJobsPerUser=1"],
            ["add", "qos", "few", "MaxSubmitJobsPerUser=3"],
            ["add", "qos", "brief", "MaxWall=1"],
            ["modify", "user", "root", "set", "qos+=small,one,few,brief,normal"],
        ):
            self.output("sacctmgr", "-i", "-Q", *arguments)
        marker.touch()

    def _network_up(self) -> None:
        """A bridge on this machine and one cable from it to each node's namespace."""
        s = self.settings
        if not Path(f"/sys/class/net/{s.bridge}").exists():
            self._ip("link", "add", s.bridge, "type", "bridge")
            self._ip("addr", "add", f"{s.controller_address}/24", "dev", s.bridge)
            self._ip("link", "set", s.bridge, "up")
        for node in s.names:
            name = s.namespace(node)
            if Path(f"/run/netns/{name}").exists():
                continue
            self._ip("netns", "add", name)
            self._ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
            self._ip("link", "set", name, "master", s.bridge, "up")
            self._ip("-n", name, "link", "set", "lo", "up")
            self._ip("-n", name, "addr", "add", f"{s.address(node)}/24", "dev", "eth0")
            self._ip("-n", name, "link", "set", "eth0", "up")

    def _network_down(self) -> None:
        for node in self.settings.names:
            name = self.settings.namespace(node)
            succeeds(["ip", "netns", "del", name], self.env)
            succeeds(["ip", "link", "del", name], self.env)
        succeeds(["ip", "link", "del", self.settings.bridge], self.env)

    def _ip(self, *arguments: str) -> Sequence[str]:
        return self.output("ip", *arguments).splitlines()


def _without_fsync() -> dict[str, str]:
    """The database of a test need not survive a power cut: its set-up takes a third of the time."""
    libraries = glob.glob("/usr/lib/*/libeatmydata.so")
    return {"LD_PRELOAD": libraries[0]} if libraries else {}
