"""The files that make a test cluster, as text. Pure: nothing is written or started here."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

FIRST_JOB = "first_job.conf"
"""The file that gives every start of the controller job ids of its own."""


@dataclass(frozen=True)
class Settings:
    """One test cluster. ``number`` tells clusters apart that run at the same time: their ports and addresses."""

    directory: Path  # short: a unix socket's path has at most 107 characters
    number: int = 0  # 0..99
    nodes: int = 4
    cpus: int = 8  # of a node; need not exist
    gpus: int = 8  # of a node; /dev/null in disguise
    memory_mb: int = 64000
    max_array_size: int = 9  # small, so that ordinary sweeps are longer than one array
    pyxis: Path | None = None  # where the script `pyxis` has built the real one; None: the stand-in, container.c

    @property
    def names(self) -> list[str]:
        return [f"n{i + 1}" for i in range(self.nodes)]

    @property
    def controller_address(self) -> str:
        return f"10.213.{self.number}.1"

    def address(self, node: str) -> str:
        return f"10.213.{self.number}.{10 + int(node[1:])}"

    @property
    def bridge(self) -> str:
        return f"tslurm{self.number}"

    def namespace(self, node: str) -> str:
        return f"{self.bridge}-{node}"

    @property
    def port(self) -> int:
        """The controller's port; the accounting daemon has the next one, node i the one 20 + i higher."""
        return 20001 + 200 * self.number

    @property
    def conf(self) -> Path:
        return self.directory / "etc" / "slurm.conf"

    @property
    def containers(self) -> Path:
        """Where the nodes keep the file systems of running containers, in a folder each."""
        return self.directory / "containers" if self.pyxis is None else self.pyxis / "containers"

    def run(self, name: str) -> Path:
        return self.directory / "run" / name

    def log(self, name: str) -> Path:
        return self.directory / "log" / f"{name}.log"


def real_pyxis() -> Path | None:
    """The folder in which the script `pyxis` has built pyxis and enroot, from ``TRIREME_TEST_PYXIS``."""
    folder = os.environ.get("TRIREME_TEST_PYXIS")
    return Path(folder) if folder else None


def files(settings: Settings) -> dict[str, str]:
    """All configuration files, by name, for ``directory/etc``."""
    return {
        "slurm.conf": slurm_conf(settings),
        "slurmdbd.conf": slurmdbd_conf(settings),
        "gres.conf": f"NodeName=n[1-{settings.nodes}] Name=gpu Type=h100 File={settings.directory}/dev/gpu[0-{settings.gpus - 1}]\n",
        "topology.conf": topology_conf(settings),
        "plugstack.conf": plugstack_conf(settings),
        "cgroup.conf": "CgroupAutomount=no\n",
        "hosts": hosts(settings),
    }


def plugstack_conf(settings: Settings) -> str:
    """The container plugin."""
    if settings.pyxis is None:
        return f"required {settings.directory}/container.so {settings.containers}\n"
    return f"required {settings.pyxis}/lib/slurm/spank_pyxis.so runtime_path={settings.directory}/run/pyxis\n"


def oci_conf(settings: Settings) -> str:
    """``oci.conf``, which a site has that allows ``srun --container=BUNDLE``. Not one of ``files``: most sites have none."""
    runc, name = f"runc --root={settings.directory}/run/oci.%n", "%n.%u.%j.%s.%t"
    verbs = {"Query": f"state {name}", "Kill": f"kill -a {name}", "Delete": f"delete --force {name}", "Run": f"run {name} -b %b"}
    return "".join(f'RunTime{verb}="{runc} {words}"\n' for verb, words in verbs.items())


def hosts(settings: Settings) -> str:
    """Names as the nodes see them; outside the namespaces node names do not resolve, as on many login nodes."""
    lines = ["127.0.0.1 localhost", f"{settings.controller_address} {socket.gethostname().split('.')[0]}"]
    lines += [f"{settings.address(node)} {node}" for node in settings.names]
    return "\n".join(lines) + "\n"


def topology_conf(settings: Settings) -> str:
    """Two nodes on each leaf switch."""
    leaves = [settings.names[i : i + 2] for i in range(0, settings.nodes, 2)]
    lines = [f"SwitchName=leaf{i} Nodes={','.join(leaf)}" for i, leaf in enumerate(leaves)]
    return "\n".join([*lines, f"SwitchName=spine Switches=leaf[0-{len(leaves) - 1}]"]) + "\n"


def slurmdbd_conf(settings: Settings) -> str:
    return f"""\
AuthType=auth/munge
AuthInfo=socket={settings.run("munge.sock")}
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={settings.port + 1}
SlurmUser=root
PidFile={settings.run("slurmdbd-own.pid")}
LogFile={settings.log("slurmdbd")}
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm_acct_db
CommitDelay=1
"""


def slurm_conf(settings: Settings) -> str:
    """A cluster as a site would have it (accounting, limits, GPUs, preemption, topology), with the waits made short."""
    directory = settings.directory
    node_lines = "".join(
        f"NodeName={node} NodeHostname={node} NodeAddr={settings.address(node)} Port={settings.port + 20 + int(node[1:])} "
        f"CPUs={settings.cpus} RealMemory={settings.memory_mb} Gres=gpu:h100:{settings.gpus} Feature=h100\n"
        for node in settings.names
    )
    return f"""\
ClusterName=test{settings.number}
SlurmctldHost={socket.gethostname().split(".")[0]}({settings.controller_address})
SlurmctldPort={settings.port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# a requeued job waits for its old credential to expire: 120 s by default, 5 s at least; a launch that takes longer is refused
AuthInfo=socket={settings.run("munge.sock")},cred_expire=10
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool/%n
SlurmctldPidFile={settings.run("slurmctld-own.pid")}
SlurmdPidFile={directory}/run/slurmd-own-%n.pid
SlurmctldLogFile={settings.log("slurmctld")}
SlurmdLogFile={directory}/log/slurmd-%n.log
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
PropagateResourceLimits=NONE
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=500
# CPUs, memory and GPUs that the machine does not have
SlurmdParameters=config_overrides
# tells a job's batch shell of a coming preemption; an option of PreemptParameters in later versions
SlurmctldParameters=preempt_send_user_signal
GresTypes=gpu
ReturnToService=2
JobRequeue=1
MaxArraySize={settings.max_array_size}
MaxJobCount=20000
Include {directory}/etc/{FIRST_JOB}
DebugFlags=NO_CONF_HASH
SlurmdTimeout=20
SlurmctldTimeout=10
MessageTimeout=20
BatchStartTimeout=20
KillWait=2
# tests ask the queue about jobs that have ended
MinJobAge=3600
InactiveLimit=0
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,sched_min_interval=0,bf_interval=1,bf_resolution=1,preempt_youngest_first
PriorityType=priority/basic
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobAcctGatherType=jobacct_gather/linux
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={settings.port + 1}
AccountingStoragePass={settings.run("munge.sock")}
AccountingStorageTRES=gres/gpu
AccountingStorageEnforce=associations,limits,qos
AccountingStoreFlags=job_comment
TopologyPlugin=topology/tree
PlugStackConfig={directory}/etc/plugstack.conf
{node_lines}\
PartitionName=DEFAULT Nodes=ALL State=UP MaxTime=INFINITE DefaultTime=10
PartitionName=main Default=YES PriorityTier=5 PreemptMode=OFF
PartitionName=low PriorityTier=1 PreemptMode=REQUEUE GraceTime=20
PartitionName=high PriorityTier=10 PreemptMode=OFF
PartitionName=one PriorityTier=5 PreemptMode=OFF MaxNodes=1 MaxTime=1
"""
