"""Settings of a Slurm cluster for sbatch, srun and the job script, beyond ``ClusterConfig``. All are optional."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Optional

from launcher.backends.slurm.mounts import check_paths, given_mounts, host_paths, runtime
from launcher.config.mounts import Mount
from launcher.config.schema import ClusterConfig, Config
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.keys import key
from trainer.shared.run.read import SECTION


@dataclass
class SubmitConfig:
    """Where Slurm's commands run."""

    ssh: Optional[str] = key(
        None, "login node on which sbatch, squeue, sacct, scancel and scontrol run, as ssh knows it; null = this machine. The folder of the sweep "
        "must have the same path here and there"
    )
    ssh_options: list[str] = key(list, "further options of ssh, one each: '-p2222', '-Jgateway', '-F/path/of/a/config'")


@dataclass
class SlurmCluster(ClusterConfig):
    """Jobs under Slurm. ``nodes`` and ``gpus_per_node`` become --nodes, --ntasks-per-node and the request for GPUs."""

    backend: str = key("slurm", "slurm", choices=("slurm",))

    partition: Optional[str] = key(None, "partition, or several with commas; null = the site's default")
    account: Optional[str] = key(None, "account to be charged")
    qos: Optional[str] = key(None, "quality of service")
    time: Optional[str] = key(
        None, "time limit of one job: minutes, or as Slurm writes it: 'H:M:S', 'D-H', 'D-H:M:S' (in quotes in a file), UNLIMITED; "
        "null = the partition's default",
    )  # fmt: skip
    gpu_request: str = key(
        "gpus_per_node", "how GPUs are asked for: --gpus-per-node, --gres, or none (CPU ranks, or a site without GPU accounting)",
        choices=("gpus_per_node", "gres", "none"),
    )  # fmt: skip
    gpu_type: Optional[str] = key(None, "type of GPU, as the site names it (h100)")
    cpus: Optional[int] = key(None, "CPUs of one rank (--cpus-per-task)", minimum=1)
    mem_gb: Optional[float] = key(None, "memory of one node in GiB (--mem); 0 = all of it; null = the site's default", minimum=0)
    constraint: Optional[str] = key(None, "features that nodes must have, as Slurm writes them: 'h100&ib'")
    exclusive: Optional[bool] = key(
        None, "whole nodes, shared with nobody; null = for trials that take gpus_per_node GPUs of each of their nodes"
    )
    nodelist: Optional[str] = key(None, "nodes that must be used: 'n[1-4]'")
    exclude: Optional[str] = key(None, "nodes that must not be used")
    reservation: Optional[str] = key(None, "reservation to run in")
    dependency: Optional[str] = key(None, "condition for the start: 'afterok:123'")
    switches: Optional[int] = key(None, "leaf switches that a trial may span", minimum=1)
    switches_wait: Optional[int] = key(None, "minutes that a trial waits for so few switches; null = the site's limit", minimum=0)
    segment: Optional[int] = key(
        None, "nodes of a trial that lie in one block of the site's topology (racks of NVL72: 16 or 18); it divides the trial's nodes, and a "
        "smaller trial lies in one block whole", minimum=1,
    )  # fmt: skip
    comment: Optional[str] = key(None, "comment of the jobs; null = the sweep's name")
    mail_type: Optional[str] = key(None, "when Slurm sends mail: 'END,FAIL'")
    mail_user: Optional[str] = key(None, "who gets the mail")
    extra: list[str] = key(list, "further options of sbatch, one each: '--licenses=scratch:1'")
    srun_args: list[str] = key(list, "further options of srun, one each: '--mpi=none'")
    setup: list[str] = key(
        list, "shell lines run on the job's first node before the ranks start: 'module load cuda'. The first that fails ends the trial"
    )
    setup_may_fail: list[str] = key(list, "further such lines, after those of setup; the ranks start whatever becomes of these")

    env_from: Optional[str] = key(
        None, "file of lines NAME=value that the job reads on its node: environment variables of the ranks that must not be stored (secrets). "
        "On a file system that the nodes share, and readable by you alone",
    )  # fmt: skip
    env_inherit: list[str] = key(list, "environment variables of the ranks, by name, that the job takes along from where the command is run")

    launch: Optional[str] = key(
        None, "how ranks start: srun (one task per rank) or torchrun (one task per node); null = srun, torchrun in an OCI bundle",
        choices=("srun", "torchrun"),
    )  # fmt: skip
    python: Optional[str] = key(None, "interpreter of the ranks; null = the launcher's own, python3 in a container")
    code: str = key(
        "snapshot",
        "code of the ranks: snapshot (the launcher's, as it is at submission) or image (what the container holds)",
        choices=("snapshot", "image"),
    )
    stop_signal: int = key(120, "seconds before time limit or preemption at which ranks are told to save a checkpoint", minimum=1)
    requeues: int = key(100, "how often one job may put itself back into the queue after such a checkpoint", minimum=0)
    health_check: bool = key(
        False, "before each attempt, let every node prove its devices, memory and network; a bad node is named and avoided"
    )
    submit: SubmitConfig = key(SubmitConfig, "where Slurm's commands run")
    poll_seconds: float = key(5.0, "seconds between questions to the controller, at least", minimum=0)
    linger_s: float = key(
        300.0, "seconds for which a job may continue after its result (a container is removed) before it is cancelled; one that only "
        "completes, by Slurm's word, is left alone", minimum=0,
    )  # fmt: skip
    visibility_s: float = key(
        70.0, "seconds for which results that the nodes wrote may stay unseen on this machine (NFS caches folders for up to 60 s) before a "
        "job that has ended is taken to have left none", minimum=0,
    )  # fmt: skip

    secrets_go: ClassVar[str] = (
        "put it into a file of lines NAME=value that only you can read and name the file with cluster.env_from, or export it and name it "
        "in cluster.env_inherit=[{name}]"
    )
    passing: ClassVar[tuple[str, ...]] = (
        *ClusterConfig.passing,
        *("account", "qos", "time", "reservation", "dependency", "comment", "mail_type", "mail_user", "exclude"),
        *("switches_wait", "code", "stop_signal", "requeues", "health_check", "poll_seconds", "visibility_s", "env_from", "env_inherit", "submit"),
    )
    """A training continues from its checkpoints under another time limit or account."""
    found_by: ClassVar[tuple[str, ...]] = (*ClusterConfig.found_by, "submit")

    @property
    def container_runtime(self) -> str:
        return runtime(self.container)

    @property
    def in_container(self) -> bool:
        return self.container_runtime != "none"

    @property
    def starter(self) -> str:
        """Returns the program that starts the ranks: srun or torchrun."""
        return self.launch or ("torchrun" if self.container_runtime == "oci" else "srun")

    @property
    def interpreter(self) -> str:
        return self.python or ("python3" if self.in_container else sys.executable)

    def mounts(self) -> list[Mount]:
        return given_mounts(self.container) if self.in_container else []

    def located(self, config: Config, stage: Mapping[str, Any] | None = None) -> Config:
        if self.in_container:
            run = {"data": vars(config.data), "run": {"checkpoint": vars(config.run.checkpoint)}, SECTION: stage}
            mounts = self.mounts()
            check_paths(self.container, mounts, host_paths(run, Path(os.path.abspath(config.sweep.dir)), None, mounts))
        return config


_MINUTES = re.compile(r"(?P<m>\d+)(:(?P<s>\d+))?", re.ASCII)
_HOURS = re.compile(r"(?P<h>\d+):(?P<m>\d+):(?P<s>\d+)", re.ASCII)
_DAYS = re.compile(r"(?P<d>\d+)-(?P<h>\d+)(:(?P<m>\d+)(:(?P<s>\d+))?)?", re.ASCII)
_NO_LIMIT = ("UNLIMITED", "INFINITE")


def seconds_of(time: str) -> float:
    """Returns seconds of M, M:S, H:M:S, D-H, D-H:M or D-H:M:S; infinite for UNLIMITED. Raises ``ConfigError`` for anything else."""
    if str(time).upper() in _NO_LIMIT:
        return math.inf
    found = next((match for form in (_MINUTES, _HOURS, _DAYS) if (match := form.fullmatch(str(time)))), None)
    parts = {name: int(value or 0) for name, value in found.groupdict().items()} if found else {}
    seconds = sum(parts.get(name, 0) * size for name, size in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)))
    if seconds == 0:
        raise ConfigError(f"cluster.time={time} is not a valid time limit; use minutes, H:M:S, D-H, D-H:M:S or UNLIMITED")
    return seconds
