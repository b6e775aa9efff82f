"""Settings of a Kubernetes cluster: the form of a trial's pods and the site's demands. Every field but the image is optional."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, ClassVar, Optional

from launcher.backends.kubernetes.values import check_tolerations, check_values
from launcher.backends.kubernetes.volumes import CODE_DIR, CONFIG_DIR, DATA_DIR, OUT_DIR, VolumeConfig, check_volumes, host_mount, volume_on
from launcher.config.schema import ClusterConfig, Config
from launcher.config.secrets import refuse_secrets
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.keys import key
from trainer.shared.run.schema import DataConfig

WORKLOADS = ("job", "pods", "jobset", "trainjob", "volcano")
_DAY = 24 * 60 * 60
_REFERENCE = re.compile(r"[a-z0-9.-]+/[A-Za-z0-9._-]+")
_OWN_VARIABLES = re.compile(r"TRIREME_\w*|(LOCAL_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|JOB_COMPLETION_INDEX|VC_TASK_INDEX")
"""Variables that tell a pod its job and its peers."""


@dataclass
class KubernetesCluster(ClusterConfig):
    """Pods of a Kubernetes cluster. ``nodes`` pods of ``gpus_per_node`` ranks make a trial."""

    backend: str = key("kubernetes", "kubernetes", choices=("kubernetes",))

    kubeconfig: Optional[str] = key(
        None, "kubeconfig file; null = $KUBECONFIG, ~/.kube/config, or the service account of the pod we run in"
    )
    context: Optional[str] = key(None, "context of the kubeconfig; null = its current one")
    namespace: str = key("trireme", "namespace of all objects")
    workload: str = key(
        "job", "workload of a trial: an Indexed Job, plain pods, a JobSet, a Kubeflow TrainJob, a Volcano Job", choices=WORKLOADS
    )
    runtime: str = key("torch-distributed", "ClusterTrainingRuntime of a TrainJob")
    queue: Optional[str] = key(None, "queue that admits trials whole: a Kueue LocalQueue, or a Volcano queue for workload=volcano")
    queue_priority: Optional[str] = key(None, "Kueue WorkloadPriorityClass")
    topology: Optional[str] = key(
        None, "node label (rack, block) inside which the pods of a trial are placed: by Kueue when there is a queue, else by affinity"
    )
    topology_required: bool = key(False, "do not start outside one topology domain; false = prefer it")
    spread: bool = key(True, "every pod of a trial on a node of its own, or not at all; false = wherever there is room")
    service_account: Optional[str] = key(None, "service account of the pods; its token is not mounted")
    pull_policy: str = key("IfNotPresent", "when the image is pulled", choices=("Always", "IfNotPresent", "Never"))
    pull_secrets: list[str] = key(list, "names of image pull secrets")
    node_selector: dict[str, str] = key(dict, "labels that nodes must have")
    tolerations: list[dict[str, Any]] = key(list, "tolerations, as in a pod")
    affinity: dict[str, Any] = key(dict, "affinity, as in a pod")
    priority_class: Optional[str] = key(None, "priority class of the pods")
    scheduler: Optional[str] = key(None, "scheduler of the pods; null = the cluster's (volcano for workload=volcano)")
    gpu_resource: Optional[str] = key("nvidia.com/gpu", "resource that stands for one rank's device; null = CPU processes")
    rdma_resource: Optional[str] = key(None, "resource of the RDMA device plugin, such as rdma/ib; its pods may lock memory")
    rdma_count: int = key(1, "RDMA resources of one pod", minimum=1)
    cpu: Optional[str] = key(None, "CPUs of one pod, as a quantity: requested, and the limit")
    memory: Optional[str] = key(None, "memory of one pod, as a quantity: requested, and the limit")
    shared_memory: Optional[str] = key("8Gi", "size of /dev/shm; it counts as the pod's memory. null = the runtime's 64 MiB")
    volumes: list[VolumeConfig] = key(list, "further volumes (container.mounts are paths of the node)")
    run_dir: Optional[str] = key(
        None, "folder on a mounted volume for checkpoints and other output; null = lost with the pod, but for results and logs"
    )
    secrets: dict[str, str] = key(dict, "environment variables taken from secrets: {NAME: secret/key}")
    code: str = key(
        "snapshot",
        "code of the ranks: snapshot (the launcher's trainer, shipped with the run) or image (what the image holds, compared with it)",
        choices=("snapshot", "image"),
    )
    data: Optional[str] = key(
        None,
        "where pods have data.path from: present (on a mounted volume, or in the image) or prepare (each pod makes it of data.source before "
        "its ranks start); null = present if it is on a volume, else prepare, for data.source=stdlib",
        choices=("present", "prepare"),
    )
    user: Optional[int] = key(1000, "numeric user and group of the processes; null = the image's", minimum=0)
    restricted: bool = key(True, "settings of the 'restricted' Pod Security Standard, and a read-only root unless container.writable")
    labels: dict[str, str] = key(dict, "further labels of every object")
    annotations: dict[str, str] = key(dict, "further annotations of every object")
    python: str = key("python", "Python interpreter inside the image")
    grace_seconds: int = key(60, "seconds between SIGTERM and SIGKILL: time for a checkpoint", minimum=1)
    unreachable_seconds: int = key(60, "seconds after which the pods of a node that does not answer are given up", minimum=0)
    fault_timeout: float = key(
        300.0, "seconds a scheduled pod may stay in an error that rarely clears (e.g. ImagePullBackOff); 0 = no limit", minimum=0
    )
    deadline_seconds: Optional[int] = key(
        30 * _DAY, "seconds after which the cluster itself ends a trial, should nobody come back for it; null = never", minimum=60
    )
    ttl_seconds: Optional[int] = key(
        7 * _DAY,
        "seconds after which the cluster itself removes a trial that has ended and that no launcher has collected; null = never "
        "(workloads job, jobset, volcano)",
        minimum=3600,
    )
    keep: str = key(
        "nothing",
        "objects that stay in the namespace after a trial has ended (ttl_seconds at most): nothing, those of failed trials, all",
        choices=("nothing", "failed", "all"),
    )
    patch: dict[str, dict[str, Any]] = key(
        dict, "merged last, by kind: {Pod: {spec: {hostNetwork: true}}}; named list items are merged by name, null deletes, but not what the launcher "
        "itself needs"
    )

    secrets_go: ClassVar[str] = "store it in a Kubernetes Secret and refer to it with cluster.secrets.{name}=SECRET/KEY"
    passing: ClassVar[tuple[str, ...]] = (
        *ClusterConfig.passing,
        *("kubeconfig", "context", "queue", "queue_priority", "priority_class", "service_account", "pull_policy", "pull_secrets"),
        *("labels", "annotations", "secrets", "grace_seconds", "unreachable_seconds", "fault_timeout", "deadline_seconds", "ttl_seconds", "keep", "code", "data"),
    )
    found_by: ClassVar[tuple[str, ...]] = (*ClusterConfig.found_by, "kubeconfig", "context")
    shares_files: ClassVar[bool] = False
    own_network: ClassVar[bool] = True
    takes_launcher: ClassVar[bool] = True

    @property
    def in_container(self) -> bool:
        return True

    @property
    def mounted(self) -> list[VolumeConfig]:
        """All that is mounted into its pods by the configuration."""
        return [*map(host_mount, self.container.mounts), *self.volumes]

    def located(self, config: Config, stage: Mapping[str, Any] | None = None) -> Config:
        cluster = check_cluster(self)
        if stage is not None:
            made = {"sweep.dir": stage["folder"]} if stage["folder"] else {}
            check_mounted(cluster, made | {f"input {name}": folder for name, folder in stage["sources"].items()})
        data, cluster = locate_in_pods(config.data, cluster)
        return dataclasses.replace(config, data=data, cluster=cluster)


def check_cluster(cluster: ClusterConfig) -> KubernetesCluster:
    """``cluster``, if its fields agree with each other; ``ConfigError`` on the first that does not. Pure."""
    if not isinstance(cluster, KubernetesCluster):
        raise ConfigError(f"cluster.backend={cluster.backend} is not a Kubernetes cluster; use cluster=kubernetes")
    if cluster.container.image is None:
        raise ConfigError(
            "cluster.container.image is null, and pods need an image; give one that holds Python and this trainer (deploy/Dockerfile)"
        )
    _check_secrets(cluster)
    check_values(cluster)
    _check_variables(cluster)
    check_tolerations(cluster.tolerations)
    _check_queue(cluster)
    check_volumes(cluster.mounted, {CONFIG_DIR: "the run and its programs"} | {path: what for _, path, what in own_folders(cluster)})
    if cluster.run_dir is not None:
        _check_run_dir(cluster, cluster.run_dir)
    if cluster.restricted and cluster.user == 0:
        raise ConfigError("cluster.user=0 is root, which cluster.restricted=true forbids; use another user, or cluster.restricted=false")
    return cluster


def locate_in_pods(data: DataConfig, cluster: KubernetesCluster) -> tuple[DataConfig, KubernetesCluster]:
    """Both, with ``data.path`` as the pods will see it and ``cluster.data`` decided; ``ConfigError`` if they could not have the corpus. Pure."""
    if data.kind == "synthetic":
        return data, dataclasses.replace(cluster, data=None)
    path = data.path
    mounted = volume_on(path, cluster.mounted) is not None
    how = cluster.data or ("present" if mounted else "prepare" if data.source == "stdlib" else None)
    if how is None:
        raise ConfigError(
            f"data.path={data.path} is on none of the pods' volumes; mount the one that holds it (cluster.volumes), or set cluster.data=present "
            "if the image holds it, cluster.data=prepare if data.source is a path inside the pods, or data=synthetic"
        )
    if how == "present" and not path.startswith("/"):
        raise ConfigError(f"data.path={data.path} is relative, and pods start elsewhere; give the absolute path that it has inside the pods")
    if how == "prepare" and not mounted:
        path = f"{DATA_DIR}/{PurePosixPath(data.path).name}"
    return dataclasses.replace(data, path=path), dataclasses.replace(cluster, data=how)


def check_mounted(cluster: KubernetesCluster, folders: Mapping[str, str], written: str = "sweep.dir") -> None:
    """Raises ``ConfigError`` for the first of ``folders``, by key, that pods do not see by its local name, or cannot write if it is
    ``written``."""
    for name, folder in folders.items():
        volume = volume_on(folder, cluster.mounted)
        if volume is not None and name == written and not volume.writable:
            raise ConfigError(f"{name}={folder} is on {_read_only(volume)}, or name a folder that is on another")
        if volume is None:
            raise ConfigError(
                f"{name}={folder} is on none of the pods' volumes; mount the volume that holds it under the path that it has here (cluster.volumes)"
            )


def _check_variables(cluster: KubernetesCluster) -> None:
    """Raises ``ConfigError`` for duplicates: the later of two variables wins, and the launcher's come first."""
    for name in cluster.secrets:
        if name in cluster.env:
            raise ConfigError(f"cluster.secrets.{name} and cluster.env.{name} are one variable; leave one of them out")
    for given, names in (("env", cluster.env), ("secrets", cluster.secrets)):
        own = next(filter(_OWN_VARIABLES.fullmatch, names), None)
        if own is not None:
            raise ConfigError(f"cluster.{given}.{own} is set by the launcher in pods; rename it")


def own_folders(cluster: KubernetesCluster) -> list[tuple[str, str, str]]:
    """Lists the launcher's folders that begin empty in every pod: name, path, content."""
    known = (
        (cluster.run_dir is None, "trials", OUT_DIR, "the output of the ranks"),
        (cluster.code == "snapshot", "code", CODE_DIR, "the code of the ranks"),
        (cluster.data == "prepare", "corpus", DATA_DIR, "the corpus that pods prepare"),
        (cluster.restricted and not cluster.container.writable, "tmp", "/tmp", "the folder of temporary files (cluster.container.writable=true has none of its own)"),
        (cluster.shared_memory, "shared-memory", "/dev/shm", "shared memory (cluster.shared_memory=null leaves it out)"),
    )
    return [(name, path, what) for wanted, name, path, what in known if wanted]


def _check_run_dir(cluster: KubernetesCluster, folder: str) -> None:
    volume = volume_on(folder, cluster.mounted)
    if volume is None:
        raise ConfigError(
            f"cluster.run_dir={folder} is not inside a mounted volume; name one in cluster.volumes, or set cluster.run_dir=null"
        )
    if not volume.writable:
        raise ConfigError(f"cluster.run_dir={folder} is on {_read_only(volume)}, set cluster.run_dir=null, or name a folder that is on another")


def _read_only(volume: VolumeConfig) -> str:
    remedy = "take away its read_only" if volume.read_only else "take a volume of another source"
    return f"the volume at {volume.mount}, which pods cannot write to; {remedy}"


def _check_secrets(cluster: KubernetesCluster) -> None:
    """Secrets travel by reference only: nothing that looks like one may stand in a manifest in clear."""
    for name, reference in cluster.secrets.items():
        if not _REFERENCE.fullmatch(reference):
            raise ConfigError(f"cluster.secrets.{name} is not SECRET/KEY, the name of a Secret in the namespace and one of its keys")
    refuse_secrets(cluster)


def _check_queue(cluster: KubernetesCluster) -> None:
    if cluster.queue_priority is not None and (cluster.queue is None or cluster.workload == "volcano"):
        raise ConfigError(
            f"cluster.queue_priority={cluster.queue_priority} is a class of Kueue's; it needs cluster.queue, and not workload=volcano"
        )
    if cluster.workload == "volcano" and cluster.topology is not None:
        raise ConfigError("cluster.topology is not passed on to Volcano; use cluster.affinity, or another cluster.workload")
