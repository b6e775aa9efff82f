"""Makes the workload that owns a job's pods: an Indexed Job, plain pods, a JobSet, a Kubeflow TrainJob or a Volcano Job. Pure.

Each kind is one entry of ``KINDS``: its place in the API, the index and DNS names of its pods, its frame around the common template, and
the conditions that end it. Restarts are the launcher's: every kind gives up at the first failed pod, because a rank that restarts alone
would wait for peers in the middle of a step.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import yaml

from launcher.backends.kubernetes.cluster import KubernetesCluster
from launcher.backends.kubernetes.manifests import (
    CONTAINER,
    Manifest,
    config_map,
    labels_of,
    merge,
    metadata,
    object_name,
    pod_template,
    pods_of,
    service,
)
from launcher.backends.kubernetes.patches import patched
from launcher.config.yaml_text import LOADER
from launcher.trials.job import Job
from trainer.shared.run.errors import ConfigError, listed, nearest

Build = Callable[[Job, KubernetesCluster, Manifest], list[Manifest]]

KUEUE = "kueue.x-k8s.io"
_FAILED = ("Failed", "Aborted", "Terminated")
"""Conditions, or Volcano's phases, that mean that a workload has given up."""


@dataclass(frozen=True)
class WorkloadKind:
    """One way to run the pods of a job."""

    api: str  # group and version
    kind: str
    plural: str
    index: str  # environment variable in which a pod finds its index
    host0: str  # hostname of pod 0, with {name} for the job's
    build: Build
    complete: str  # condition, or phase, that means that all pods have succeeded

    @property
    def path(self) -> str:
        return f"{'apis' if '/' in self.api else 'api'}/{self.api}/namespaces/{{namespace}}/{self.plural}"

    @property
    def group(self) -> str:
        return self.api.rpartition("/")[0]

    @property
    def rights(self) -> list[tuple[str, str, str]]:
        """``(verb, group, resource)`` of everything that is done in the namespace: deploy/kubernetes/rbac.yaml grants no more."""
        wanted = {
            ("", "services"): "get list watch create delete", ("", "configmaps"): "get create", ("", "pods"): "get list watch delete",
            ("", "pods/log"): "get", ("", "events"): "list watch",
        }  # fmt: skip
        if self.kind == "Pod":
            wanted["", "pods"] += " create"
        else:  # patch: the Service goes with what makes the pods
            wanted["", "services"] += " patch"
            wanted[self.group, self.plural] = "get list watch create"
        return [(verb, *where) for where, verbs in wanted.items() for verb in verbs.split()]


def render(job: Job, cluster: KubernetesCluster, config: str) -> list[Manifest]:
    """Every object of a job, in order of creation, the root first; strictly valid. ``ConfigError`` where the cluster's settings are not."""
    kind = KINDS[cluster.workload]
    kinds = dict.fromkeys(("Pod", "Service", "ConfigMap", kind.kind))
    for name in cluster.patch:
        if name not in kinds:
            raise ConfigError(f"cluster.patch.{name} names no kind of this workload{nearest(name, kinds)}; it has {listed(kinds)}")
    own = list(labels_of(job))
    host0 = kind.host0.format(name=object_name(job))
    template = patched("Pod", pod_template(job, cluster, host0, kind.index), cluster.patch.get("Pod", {}), own)
    template = merge(template, {"metadata": {"annotations": _topology(cluster)}}) if _topology(cluster) else template
    if template["spec"].get("hostNetwork"):  # else such pods ask the node's own DNS, which does not know pod 0
        template["spec"].setdefault("dnsPolicy", "ClusterFirstWithHostNet")
    objects = [service(job, cluster), config_map(job, cluster, config), *kind.build(job, cluster, template)]
    whole = [patched(o["kind"], o, cluster.patch.get(o["kind"], {}), own) if o["kind"] != "Pod" else o for o in objects]
    for manifest in whole:
        check_schema(manifest)
    return whole


def to_text(objects: list[Manifest]) -> str:
    """YAML as a person would write it; ``kubectl apply -f`` takes it."""
    return "".join(f"---\n{yaml.dump(o, Dumper=_Dumper, sort_keys=False, width=140)}" for o in objects)


def from_text(text: str) -> list[Manifest]:
    return list(yaml.load_all(text, Loader=LOADER))


def check_schema(manifest: Manifest) -> None:
    """Refuses unknown fields and wrong types, which a server would drop or answer at length. Of other groups' kinds: the pod template."""
    from kubernetes import client
    from pydantic import ValidationError

    models: dict[str, Any] = {"Service": client.V1Service, "ConfigMap": client.V1ConfigMap, "Pod": client.V1Pod, "Job": client.V1Job}
    model, part = models.get(manifest["kind"]), manifest
    if model is None or "volcano" in manifest["apiVersion"]:
        model, part = client.V1PodTemplateSpec, _template_in(manifest)
    try:
        model.model_validate(part)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(step) for step in first["loc"])
        problem = "is not a field of Kubernetes" if first["type"] == "extra_forbidden" else f"is wrong: {first['msg'].lower()}"
        remedy = "correct it in cluster.patch, cluster.tolerations, cluster.affinity or where else it was given"
        raise ConfigError(f"{manifest['kind']} {place} {problem}; {remedy}") from None


def outcome(kind: WorkloadKind, workload: Manifest) -> tuple[str, str, str]:
    """``(word, reason, message)`` of a workload's status; word is complete, failed, suspended, or empty while it runs."""
    status = workload.get("status") or {}
    if "state" in status:  # Volcano has a phase, the others conditions
        said = [{"type": status["state"].get("phase"), "status": "True", **status["state"]}]
    else:
        said = [condition for condition in status.get("conditions") or [] if condition.get("status") == "True"]
    for word, names in (("failed", _FAILED), ("complete", (kind.complete,)), ("suspended", ("Suspended",))):
        for condition in said:
            if condition.get("type") in names:
                return word, condition.get("reason") or "", condition.get("message") or ""
    return "", "", ""


# -- the kinds ------------------------------------------------------------------------------------------------------------


def _indexed_job(job: Job, cluster: KubernetesCluster, template: Manifest) -> list[Manifest]:
    spec = _indexed_spec(job, cluster, template) | _ttl(cluster)
    if cluster.queue:
        spec["suspend"] = True
    return [{"apiVersion": "batch/v1", "kind": "Job", "metadata": _queued(job, cluster), "spec": spec}]


def _pods(job: Job, cluster: KubernetesCluster, template: Manifest) -> list[Manifest]:
    """Pods with the hostnames that an Indexed Job's would have. Kueue takes them as one group."""
    count, template = pods_of(job), _ended_in_time(template, cluster)
    pods = []
    for index in range(count):
        head = merge(template["metadata"], {**metadata(job, cluster, f"{object_name(job)}-{index}")})
        if cluster.queue:
            labels = {**_queue_labels(cluster), f"{KUEUE}/pod-group-name": object_name(job)}
            head = merge(head, {"labels": labels, "annotations": {f"{KUEUE}/pod-group-total-count": str(count)}})
        own = [{"name": CONTAINER, "env": [{"name": "TRIREME_NODE", "value": str(index)}]}]
        spec = merge(template["spec"], {"hostname": f"{object_name(job)}-{index}", "containers": own})
        pods.append({"apiVersion": "v1", "kind": "Pod", "metadata": head, "spec": spec})
    return pods


def _job_set(job: Job, cluster: KubernetesCluster, template: Manifest) -> list[Manifest]:
    labels = template["metadata"]["labels"]
    node = {"metadata": {"labels": labels}, "spec": _indexed_spec(job, cluster, template)}
    spec: Manifest = {
        "network": {"enableDNSHostnames": True, "subdomain": object_name(job), "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": 0},
        "replicatedJobs": [{"name": CONTAINER, "replicas": 1, "template": node}],
        **_ttl(cluster),
    }
    if cluster.queue:
        spec["suspend"] = True
    return [{"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": _queued(job, cluster), "spec": spec}]


def _train_job(job: Job, cluster: KubernetesCluster, template: Manifest) -> list[Manifest]:
    """Overrides the runtime through ``trainer`` and, for pods, a patch of the runtime."""
    pod, container = dict(template["spec"]), dict(template["spec"]["containers"][0])
    patch = {name: pod.pop(name) for name in _TRAIN_JOB_POD if name in pod}
    own = {name: container.pop(name) for name in ("volumeMounts", "securityContext") if name in container}
    trainer: Manifest = {"numNodes": pods_of(job), "numProcPerNode": job.cluster.gpus_per_node}
    trainer |= {name: container.pop(name) for name in ("image", "command", "env") if name in container}
    trainer["resourcesPerNode"] = container.pop("resources", {})
    _refuse_rest(pod, container)
    pod_patch = {"metadata": template["metadata"], "spec": {**patch, "containers": [{"name": CONTAINER, **own}]}}
    nodes = [{"name": CONTAINER, "template": {"spec": {"template": pod_patch}}}]
    spec: Manifest = {
        "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "ClusterTrainingRuntime", "name": cluster.runtime},
        "trainer": trainer,
        "runtimePatches": [{"manager": "trireme/launcher", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": nodes}}}}],
        **_deadline(cluster),
    }
    if cluster.queue:
        spec["suspend"] = True
    return [{"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "metadata": _queued(job, cluster), "spec": spec}]


def _volcano_job(job: Job, cluster: KubernetesCluster, template: Manifest) -> list[Manifest]:
    """Gang-scheduled by ``minAvailable``; the svc plugin gives the pods their hostnames, the env plugin their index."""
    count, template = pods_of(job), _ended_in_time(template, cluster)
    spec: Manifest = {
        "minAvailable": count,
        "schedulerName": cluster.scheduler or "volcano",
        "maxRetry": 1,
        "plugins": {"env": [], "svc": ["--publish-not-ready-addresses=true", "--disable-network-policy=true"]},
        "policies": [{"event": event, "action": "TerminateJob"} for event in ("PodFailed", "PodEvicted")],
        "tasks": [{"name": CONTAINER, "replicas": count, "template": template}],
        **_ttl(cluster),
    }
    if cluster.queue:
        spec["queue"] = cluster.queue
    return [{"apiVersion": "batch.volcano.sh/v1alpha1", "kind": "Job", "metadata": metadata(job, cluster), "spec": spec}]


_INDEX = "JOB_COMPLETION_INDEX"

KINDS = {
    "job": WorkloadKind("batch/v1", "Job", "jobs", _INDEX, "{name}-0", _indexed_job, "Complete"),
    "pods": WorkloadKind("v1", "Pod", "pods", "TRIREME_NODE", "{name}-0", _pods, ""),
    "jobset": WorkloadKind("jobset.x-k8s.io/v1alpha2", "JobSet", "jobsets", _INDEX, "{name}-node-0-0", _job_set, "Completed"),
    "trainjob": WorkloadKind("trainer.kubeflow.org/v1alpha1", "TrainJob", "trainjobs", _INDEX, "{name}-node-0-0", _train_job, "Complete"),
    "volcano": WorkloadKind("batch.volcano.sh/v1alpha1", "Job", "jobs", "VC_TASK_INDEX", "{name}-node-0", _volcano_job, "Completed"),
}
"""By ``cluster.workload``."""

_TRAIN_JOB_POD = (
    "affinity", "imagePullSecrets", "nodeSelector", "securityContext", "serviceAccountName", "terminationGracePeriodSeconds",
    "tolerations", "volumes",
)  # fmt: skip
_FROM_RUNTIME = {"restartPolicy", "subdomain", "enableServiceLinks", "automountServiceAccountToken", "containers"}


def _indexed_spec(job: Job, cluster: KubernetesCluster, template: Manifest) -> Manifest:
    count = pods_of(job)
    head = {"completionMode": "Indexed", "completions": count, "parallelism": count, "backoffLimit": 0, **_deadline(cluster)}
    return head | {"template": template}


def _ended_in_time(template: Manifest, cluster: KubernetesCluster) -> Manifest:
    """The pods' template with a deadline, unless a patch has given it one of its own."""
    return template if "activeDeadlineSeconds" in template["spec"] else merge(template, {"spec": _deadline(cluster)})


def _deadline(cluster: KubernetesCluster) -> Manifest:
    return {} if cluster.deadline_seconds is None else {"activeDeadlineSeconds": cluster.deadline_seconds}


def _ttl(cluster: KubernetesCluster) -> Manifest:
    """Pods and TrainJobs have nothing of the sort."""
    return {} if cluster.ttl_seconds is None else {"ttlSecondsAfterFinished": cluster.ttl_seconds}


def _refuse_rest(pod: Manifest, container: Manifest) -> None:
    """Refuses settings that a TrainJob cannot express."""
    usual = {"name": CONTAINER, "imagePullPolicy": "IfNotPresent"}
    rest = [f"spec.{name}" for name in pod if name not in _FROM_RUNTIME]
    rest += [f"containers.{name}" for name, value in container.items() if usual.get(name) != value]
    if rest:
        remedy = "set it in the ClusterTrainingRuntime, or use workload=jobset"
        raise ConfigError(f"cluster.workload=trainjob has no place for the pod's {listed(rest)}; {remedy}")


def _queued(job: Job, cluster: KubernetesCluster) -> Manifest:
    head = metadata(job, cluster)
    return merge(head, {"labels": _queue_labels(cluster)}) if cluster.queue else head


def _queue_labels(cluster: KubernetesCluster) -> dict[str, str]:
    labels = {f"{KUEUE}/queue-name": cluster.queue, f"{KUEUE}/priority-class": cluster.queue_priority}
    return {name: value for name, value in labels.items() if value}


def _topology(cluster: KubernetesCluster) -> dict[str, str]:
    """Kueue places all pods of a job inside one domain of this level."""
    if cluster.queue is None or cluster.topology is None:
        return {}
    return {f"{KUEUE}/podset-{'required' if cluster.topology_required else 'preferred'}-topology": cluster.topology}


def _template_in(manifest: Manifest) -> Manifest:
    """The pod template inside a kind of another group, whole after every patch; an empty one where the kind has none."""
    spec: Manifest = manifest["spec"]
    if manifest["kind"] == "JobSet":
        return dict(spec["replicatedJobs"][0]["template"]["spec"]["template"])
    return dict(spec["tasks"][0]["template"]) if "tasks" in spec else {}


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """Block style for text of several lines, and no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_AMBIGUOUS = re.compile(
    r"""[-+._]*(?:[0-9][-+.:_0-9a-foptxz\s]*|inf|infinity|nan)    # numbers of every base and form, times, dates
      | y|n|yes|no|on|off|true|false|null|~""",
    re.IGNORECASE | re.VERBOSE,
)
"""Text that YAML 1.1, YAML 1.2 or Kubernetes' parser (gopkg.in/yaml.v2, resolve.go) would read as another type, such as an id ``1e3``."""


def _style(text: str) -> str | None:
    return "|" if "\n" in text else "'" if _AMBIGUOUS.fullmatch(text) else None


_Dumper.add_representer(str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style=_style(text)))
