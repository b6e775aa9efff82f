"""Makes the Kubernetes objects that all workloads share: a Service, a ConfigMap and the template of the pods. Pure.

The headless Service is the root of a job: created first under the job's deterministic name, it owns everything else, so its name decides
who came first and its deletion deletes all. (If the cluster removes the pods' maker, it goes with that.) It also gives every pod a DNS name
before the pod is ready.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.util
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.backends.kubernetes.cluster import KubernetesCluster, own_folders
from launcher.backends.kubernetes.provision import archive, digest
from launcher.backends.kubernetes.volumes import CODE_DIR, CONFIG_DIR, OUT_DIR, VolumeConfig, nfs_of
from launcher.config.secrets import secrets_in
from launcher.config.yaml_text import read_yaml
from launcher.trials.job import Job
from trainer.shared.records.trial_files import CONFIG
from trainer.shared.run.errors import ConfigError

Manifest = dict[str, Any]

CONTAINER = "node"
"""Name of the container in every pod; Kubeflow's runtimes expect this one."""
JOB, TRIAL, ATTEMPT, STORE, SWEEP = (f"trireme/{name}" for name in ("job", "trial", "attempt", "store", "sweep"))
"""Labels of every object."""
DIRECTORY = "trireme/directory"
"""Annotation of the root: the trial's directory."""
OURS = {"app.kubernetes.io/managed-by": "trireme"}
HOSTNAME = "kubernetes.io/hostname"
"""Label of every node: its name."""
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
ENTRY = Path(__file__).with_name("entry.py")
PROGRAMS = (ENTRY, ENTRY.with_name("provision.py"))
"""Programs that the image's Python runs before the ranks."""
PROGRAMS_VOLUME = "trireme"
"""Volume of every pod that brings them and the run."""
_LONGEST = 60
"""Characters of a value in an error."""
_LARGEST = 1_000_000
"""Bytes of a ConfigMap (the server's limit, 1 MiB, counts names as well)."""


def pods_of(job: Job) -> int:
    """One pod per node that the layout needs."""
    return math.ceil(job.world_size / job.cluster.gpus_per_node)


def object_name(job: Job) -> str:
    """Names the root object, which owns all others. The name tells users apart who measure the same layouts in one namespace."""
    return f"{job.name}-{store_of(job)}"


def labels_of(job: Job) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "trireme",
        **OURS,
        JOB: object_name(job),
        TRIAL: job.trial,
        ATTEMPT: str(job.attempt),
        STORE: store_of(job),
        SWEEP: _label(job.sweep),
    }


def store_of(job: Job) -> str:
    """Identifies a job's folder of trials: two launchers in one namespace must not adopt each other's jobs."""
    return hashlib.sha256(str(job.directory.parent).encode()).hexdigest()[:8]


def metadata(job: Job, cluster: KubernetesCluster, name: str | None = None) -> Manifest:
    """Name, labels and annotations of an object of the job."""
    data: Manifest = {"name": name or object_name(job), "namespace": cluster.namespace, "labels": {**cluster.labels, **labels_of(job)}}
    if cluster.annotations:
        data["annotations"] = dict(cluster.annotations)
    return data


def service(job: Job, cluster: KubernetesCluster) -> Manifest:
    """The root: headless, publishing the addresses of pods that are not ready, for rank 0 is looked up while it starts."""
    head = metadata(job, cluster)
    head["annotations"] = {**head.get("annotations", {}), DIRECTORY: str(job.directory)}
    port = meeting_port(job)
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {JOB: object_name(job)},
        "ports": [{"name": "rendezvous", "port": port, "protocol": "TCP", "targetPort": port}],
    }
    return {"apiVersion": "v1", "kind": "Service", "metadata": head, "spec": spec}


def config_map(job: Job, cluster: KubernetesCluster, config: str) -> Manifest:
    """Returns the content of the pods' ConfigMap: the resolved run, the trainer's code, and the programs that start it."""
    _refuse_secrets(config)
    files = {CONFIG: config, **{program.name: program.read_text() for program in PROGRAMS}}
    code = {"binaryData": {"trainer.tar.gz": _code().archive}} if cluster.code == "snapshot" else {}
    size = len("".join([*files.values(), *code.get("binaryData", {}).values()]).encode())
    if size > _LARGEST:
        raise ConfigError(
            f"the run and the trainer's code have {size} bytes, and a ConfigMap holds {_LARGEST}; use cluster.code=image, "
            f"and an image with this code"
        )
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata(job, cluster), **code, "data": files}


@dataclass(frozen=True)
class _Code:
    """The launcher's own trainer."""

    digest: str
    archive: str  # base64 of a tar.gz


@functools.cache
def _code() -> _Code:
    """Archives the code once: all trials of a launcher run the same."""
    spec = importlib.util.find_spec("trainer")
    assert spec is not None and spec.origin is not None
    package = Path(spec.origin).parent
    return _Code(digest(package), base64.b64encode(archive(package)).decode())


def pod_template(job: Job, cluster: KubernetesCluster, host0: str, index_variable: str) -> Manifest:
    """``{"metadata", "spec"}`` of every pod. ``host0`` is pod 0's hostname; each pod finds its index in ``index_variable``."""
    volumes = _volumes(job, cluster)
    head = metadata(job, cluster)
    del head["name"], head["namespace"]
    spec: Manifest = {
        "restartPolicy": "Never",
        "subdomain": object_name(job),
        "enableServiceLinks": False,
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": cluster.grace_seconds,
        **_placement(job, cluster),
        **_security(cluster),
        "containers": [_container(job, cluster, host0, index_variable, [mount for _, mount in volumes])],
        "volumes": [volume for volume, _ in volumes],
    }
    return {"metadata": head, "spec": spec}


def launcher_job(name: str, words: Sequence[str], cluster: KubernetesCluster, image: str) -> Manifest:
    """Returns a restartable Job that runs ``trireme`` with ``words`` as the service account of deploy/kubernetes/rbac.yaml."""
    volumes = _given_volumes(cluster)
    if all(mount["mountPath"].rstrip("/") != "/tmp" for _, mount in volumes):
        volumes.append(({"name": "tmp", "emptyDir": {}}, {"name": "tmp", "mountPath": "/tmp"}))
    values = {"HOME": "/tmp", **cluster.env}
    container: Manifest = {
        "name": "launcher",
        "image": image,
        "imagePullPolicy": cluster.pull_policy,
        "command": [_literal(word) for word in (cluster.python, "-m", "launcher", *words)],
        "env": [{"name": key, "value": _literal(value)} for key, value in values.items()],
        "workingDir": cluster.container.workdir or "/tmp",
        "volumeMounts": [mount for _, mount in volumes],
        **({"securityContext": _container_security(cluster)} if cluster.restricted else {}),
    }
    spec = {
        "restartPolicy": "Never",
        "serviceAccountName": "launcher",
        "imagePullSecrets": [{"name": secret} for secret in cluster.pull_secrets],
        "nodeSelector": dict(cluster.node_selector),
        "tolerations": cluster.tolerations,
        **_security(cluster),
        "containers": [container],
        "volumes": [volume for volume, _ in volumes],
    }
    head = {"name": name, "namespace": cluster.namespace, "labels": {**cluster.labels, "app.kubernetes.io/name": "trireme-launcher"}}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": head, "spec": {"backoffLimit": 10, "template": {"spec": spec}}}


def meeting_port(job: Job) -> int:
    """Returns the port of pod 0; ranks use the next one. Differs between trials, for pods on the host's network."""
    return 20000 + 2 * (int(job.trial, 16) % 5000)


def merge(base: Any, patch: Any) -> Any:
    """``base`` with ``patch`` laid over it: mappings key by key (null deletes), lists of named items by name, all else replaced."""
    if isinstance(patch, Mapping):
        merged = dict(base) if isinstance(base, Mapping) else {}
        for name, value in patch.items():
            if value is None:
                merged.pop(name, None)
            else:
                merged[name] = merge(merged.get(name), value)
        return merged
    if _named(base) and _named(patch):
        changes = {item["name"]: item for item in patch}
        kept = [merge(item, changes.pop(item["name"], {})) for item in base]
        return kept + list(changes.values())
    return patch


def _named(items: Any) -> bool:
    return isinstance(items, list) and bool(items) and all(isinstance(item, Mapping) and "name" in item for item in items)


def _label(text: str) -> str:
    """``text`` as the value of a label: at most 63 characters, beginning and ending with a letter or digit."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", text)[:63].strip("-._")


def _literal(text: str) -> str:
    """``text`` so that a container gets it as it is: in commands and variables Kubernetes replaces ``$(NAME)``, and ``$$`` by ``$``."""
    return text.replace("$", "$$")


def _refuse_secrets(config: str) -> None:
    """A ConfigMap can be read by many: the run, too, may carry no secret, such as a password in an address."""
    for key, what in secrets_in(read_yaml(config), free=()):
        raise ConfigError(
            f"{key} looks like {what}, which a manifest would show; take it out and give it by reference, "
            "as in cluster.secrets.MLFLOW_TRACKING_PASSWORD=SECRET/KEY"
        )


def _container(job: Job, cluster: KubernetesCluster, host0: str, index_variable: str, mounts: list[Manifest]) -> Manifest:
    container: Manifest = {
        "name": CONTAINER,
        "image": cluster.container.image,
        "imagePullPolicy": cluster.pull_policy,
        "command": [_literal(cluster.python), "-u", f"{CONFIG_DIR}/entry.py"],
        "env": _environment(job, cluster, host0, index_variable),
        "resources": _resources(job, cluster),
        "volumeMounts": mounts,
    }
    if cluster.container.workdir:
        container["workingDir"] = cluster.container.workdir
    if cluster.restricted or cluster.rdma_resource:
        container["securityContext"] = _container_security(cluster)
    return container


def _environment(job: Job, cluster: KubernetesCluster, host0: str, index_variable: str) -> list[Manifest]:
    port = meeting_port(job)
    values = {
        **cluster.env,
        "TRIREME_CONFIG": f"{CONFIG_DIR}/config.yaml",
        "TRIREME_OUT": f"{(cluster.run_dir or OUT_DIR).rstrip('/')}/{job.trial}",
        "TRIREME_ATTEMPT": str(job.attempt),
        "TRIREME_CODE": _code().digest,
        **({"TRIREME_CODE_DIR": CODE_DIR} if cluster.code == "snapshot" else {}),
        **({"TRIREME_PREPARE": "1"} if cluster.data == "prepare" else {}),
        "TRIREME_INDEX_FROM": index_variable,
        "TRIREME_RANKS_PER_NODE": str(job.cluster.gpus_per_node),
        "WORLD_SIZE": str(job.world_size),
        "MASTER_ADDR": f"{host0}.{object_name(job)}.{cluster.namespace}.svc",
        "MASTER_PORT": str(port + 1),
    }
    plain: list[Manifest] = [{"name": name, "value": _literal(value)} for name, value in values.items()]
    secret = [(name, *reference.split("/", 1)) for name, reference in cluster.secrets.items()]
    return plain + [{"name": name, "valueFrom": {"secretKeyRef": {"name": holder, "key": item}}} for name, holder, item in secret]


def _resources(job: Job, cluster: KubernetesCluster) -> Manifest:
    """Returns requests equal to limits: a measured pod gets exactly its share."""
    wanted = {"cpu": cluster.cpu, "memory": cluster.memory}
    if cluster.gpu_resource:
        wanted[cluster.gpu_resource] = str(min(job.world_size, job.cluster.gpus_per_node))
    if cluster.rdma_resource:
        wanted[cluster.rdma_resource] = str(cluster.rdma_count)
    limits = {name: amount for name, amount in wanted.items() if amount is not None}
    return {"requests": dict(limits), "limits": limits} if limits else {}


def _volumes(job: Job, cluster: KubernetesCluster) -> list[tuple[Manifest, Manifest]]:
    """Pairs of a volume and its mount, one name for both."""
    pairs: list[tuple[Manifest, Manifest]] = []

    def add(name: str, source: Manifest, mount: Manifest) -> None:
        pairs.append(({"name": name, **source}, {"name": name, **mount}))

    add(PROGRAMS_VOLUME, {"configMap": {"name": object_name(job), "defaultMode": 0o444}}, {"mountPath": CONFIG_DIR, "readOnly": True})
    for name, path, _ in own_folders(cluster):
        memory = {"medium": "Memory", "sizeLimit": cluster.shared_memory} if name == "shared-memory" else {}
        add(name, {"emptyDir": memory}, {"mountPath": path})
    return pairs + _given_volumes(cluster)


def _given_volumes(cluster: KubernetesCluster) -> list[tuple[Manifest, Manifest]]:
    """Returns the mounts of the cluster's configuration."""
    pairs: list[tuple[Manifest, Manifest]] = []
    for number, volume in enumerate(cluster.mounted):
        mount: Manifest = {"name": f"volume-{number}", "mountPath": volume.mount}
        if volume.sub_path:
            mount["subPath"] = volume.sub_path
        if volume.read_only:
            mount["readOnly"] = True
        pairs.append(({"name": f"volume-{number}", **_source(volume)}, mount))
    return pairs


def _source(volume: VolumeConfig) -> Manifest:
    if volume.claim is not None:
        return {"persistentVolumeClaim": {"claimName": volume.claim}}
    if volume.host_path is not None:
        return {"hostPath": {"path": volume.host_path}}
    if volume.nfs is not None:
        server, path = nfs_of(volume.nfs)
        return {"nfs": {"server": server, "path": path}}
    if volume.config_map is not None:
        return {"configMap": {"name": volume.config_map}}
    return {"secret": {"secretName": volume.secret}}


def _placement(job: Job, cluster: KubernetesCluster) -> Manifest:
    """Returns selectors, affinity and tolerations: where pods may run, and when a silent node is given up."""
    silent = ("node.kubernetes.io/unreachable", "node.kubernetes.io/not-ready")
    patience = [
        {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": cluster.unreachable_seconds} for key in silent
    ]
    optional = {
        "serviceAccountName": cluster.service_account,
        "imagePullSecrets": [{"name": name} for name in cluster.pull_secrets],
        "nodeSelector": dict(cluster.node_selector),
        "affinity": _affinity(job, cluster),
        "priorityClassName": cluster.priority_class,
        "schedulerName": cluster.scheduler,
    }
    return {"tolerations": [*cluster.tolerations, *patience], **{name: value for name, value in optional.items() if value}}


def _affinity(job: Job, cluster: KubernetesCluster) -> Manifest:
    """Returns the site's affinity with ours: one pod per node, one domain of the topology (unless a queue sees to it), no bad nodes."""
    affinity = _given_affinity(cluster)
    if cluster.topology is not None and cluster.queue is None:
        affinity = _together(affinity, job, cluster.topology, cluster.topology_required)
    if cluster.spread:
        affinity = _apart(affinity, job)
    return _avoiding(affinity, job.avoid) if job.avoid else affinity


def _given_affinity(cluster: KubernetesCluster) -> Manifest:
    """Returns the site's fields without nulls. Raises ``ConfigError`` for a field or value that Kubernetes does not accept."""
    from kubernetes import client
    from pydantic import ValidationError

    given: Manifest = _without_nulls(cluster.affinity)
    try:
        client.V1Affinity.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        key, value = ".".join(("cluster.affinity", *map(str, first["loc"]))), json.dumps(first["input"], default=str)[:_LONGEST]
        wrong = first["msg"].lower().partition(" or instance of ")[0].replace("dictionary", "mapping")
        problem = {"missing": f"{key} is missing", "extra_forbidden": f"{key}={value} is not a field of Kubernetes"}
        said = problem.get(first["type"], f"{key}={value} is wrong: {wrong}")
        raise ConfigError(f"{said}; give what 'kubectl explain pod.spec.affinity' allows, or leave it out") from None
    return given


def _without_nulls(item: Any) -> Any:
    if isinstance(item, Mapping):
        return {name: _without_nulls(value) for name, value in item.items() if value is not None}
    return [_without_nulls(value) for value in item] if isinstance(item, list) else item


def _apart(affinity: Manifest, job: Job) -> Manifest:
    """No two pods of the job on one node. (A topologySpreadConstraint would allow a second pod once every node has one.)"""
    term = {"labelSelector": {"matchLabels": {JOB: object_name(job)}}, "topologyKey": HOSTNAME}
    return _also(affinity, "podAntiAffinity", _REQUIRED, term)


def _together(affinity: Manifest, job: Job, topology: str, required: bool) -> Manifest:
    term = {"labelSelector": {"matchLabels": {JOB: object_name(job)}}, "topologyKey": topology}
    if required:
        return _also(affinity, "podAffinity", _REQUIRED, term)
    return _also(affinity, "podAffinity", _PREFERRED, {"weight": 100, "podAffinityTerm": term})


def _avoiding(affinity: Manifest, nodes: Sequence[str]) -> Manifest:
    """Prefers other nodes without requiring them: a possibly bad node is better than none."""
    others = {"matchExpressions": [{"key": HOSTNAME, "operator": "NotIn", "values": list(nodes)}]}
    return _also(affinity, "nodeAffinity", _PREFERRED, {"weight": 100, "preference": others})


def _also(affinity: Manifest, kind: str, force: str, term: Manifest) -> Manifest:
    """Adds one term to ``affinity``, next to the site's."""
    own = affinity.get(kind, {})
    return {**affinity, kind: {**own, force: [*own.get(force, []), term]}}


def _security(cluster: KubernetesCluster) -> Manifest:
    context: Manifest = {}
    if cluster.user is not None:
        context = {"runAsUser": cluster.user, "runAsGroup": cluster.user, "fsGroup": cluster.user}
    if cluster.restricted:
        context = {"runAsNonRoot": True, **context, "seccompProfile": {"type": "RuntimeDefault"}}
    return {"securityContext": context} if context else {}


def _container_security(cluster: KubernetesCluster) -> Manifest:
    capabilities: Manifest = {"drop": ["ALL"]} if cluster.restricted else {}
    if cluster.rdma_resource:
        capabilities["add"] = ["IPC_LOCK"]  # RDMA registers pinned memory
    context: Manifest = {"capabilities": capabilities}
    if cluster.restricted:
        context |= {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": not cluster.container.writable}
    return context
