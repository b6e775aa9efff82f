"""Indexed Jobs on a server that is too old for them: a custom kind with the fields of batch/v1 Job, and its controller, played.

Everything else is real: the server stores and deletes, the scheduler places, the garbage collector cascades, kubelets run. The
controller does what that of Kubernetes 1.36 does with a Job of ``completionMode: Indexed``: one pod per index with hostname
JOB-INDEX, JOB_COMPLETION_INDEX and a finalizer until it is counted; all pods end when more fail than ``backoffLimit`` allows;
conditions come in two steps (FailureTarget, then Failed; SuccessCriteriaMet, then Complete); a suspended Job has no pods.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import secrets
import threading
from pathlib import Path
from typing import Any

from launcher.backends.kubernetes.workloads import KINDS, WorkloadKind
from tests.clusters.kubernetes.control_plane import connect
from tests.clusters.slurm.process import wait_for

GROUP, VERSION, PLURAL = "indexed.trireme.test", "v1", "jobs"
_BATCH = "batch.kubernetes.io"
_TRACKING = f"{_BATCH}/job-tracking"

Object = dict[str, Any]


def kind() -> WorkloadKind:
    """``KINDS["job"]``, of our group."""
    job = KINDS["job"]
    return dataclasses.replace(
        job, api=f"{GROUP}/{VERSION}", build=lambda *given: [made | {"apiVersion": f"{GROUP}/{VERSION}"} for made in job.build(*given)]
    )


class IndexedJobs:
    """The kind and its controller."""

    def __init__(self, kubeconfig: Path):
        from kubernetes import client

        api = connect(kubeconfig)
        self._core, self._customs, self._kinds = client.CoreV1Api(api), client.CustomObjectsApi(api), client.ApiextensionsV1Api(api)
        self._api, self._closed = api, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        kept = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
        schema = {"openAPIV3Schema": {"type": "object", "properties": {"spec": kept, "status": kept}}}
        version = {"name": VERSION, "served": True, "storage": True, "schema": schema, "subresources": {"status": {}}}
        names = {"plural": PLURAL, "singular": "job", "kind": "Job", "listKind": "JobList"}
        spec = {"group": GROUP, "scope": "Namespaced", "names": names, "versions": [version]}
        self._kinds.create_custom_resource_definition({"metadata": {"name": f"{PLURAL}.{GROUP}"}, "spec": spec})
        wait_for(self._served, "the kind Job of our group to be served")
        self._thread.start()

    def close(self) -> None:
        """Pods of Jobs that nobody ended are let go, or their namespaces would stay for ever."""
        self._closed.set()
        self._thread.join()
        for pod in self._pods():
            self._release(pod)
        self._kinds.delete_custom_resource_definition(f"{PLURAL}.{GROUP}")

    def _served(self) -> bool:
        from kubernetes.client.exceptions import ApiException

        with contextlib.suppress(ApiException):
            return bool(self._customs.list_cluster_custom_object(GROUP, VERSION, PLURAL))
        return False

    def _run(self) -> None:
        from kubernetes.client.exceptions import ApiException

        while not self._closed.wait(0.2):
            with contextlib.suppress(ApiException):  # an object changed meanwhile: seen in the next round
                self._round()

    def _round(self) -> None:
        jobs = {job["metadata"]["uid"]: job for job in self._customs.list_cluster_custom_object(GROUP, VERSION, PLURAL)["items"]}
        pods = self._pods()
        for pod in pods:
            if pod["metadata"]["labels"][f"{_BATCH}/controller-uid"] not in jobs:
                self._release(pod)  # its Job is gone: the garbage collector may have it
        for uid, job in jobs.items():
            mine = [pod for pod in pods if pod["metadata"]["labels"][f"{_BATCH}/controller-uid"] == uid]
            if not job["metadata"].get("deletionTimestamp"):
                self._reconcile(job, mine)

    def _pods(self) -> list[Object]:
        listed = self._core.list_pod_for_all_namespaces(label_selector=f"{_BATCH}/controller-uid")
        return list(self._api.sanitize_for_serialization(listed)["items"])

    def _reconcile(self, job: Object, pods: list[Object]) -> None:
        status = copy.deepcopy(job.get("status") or {})
        active = [pod for pod in pods if _phase(pod) in ("Pending", "Running") and not _deleted(pod)]
        ending = [pod for pod in pods if _phase(pod) in ("Pending", "Running") and _deleted(pod)]
        spared = set(status.get("spared", []))  # ended by a suspension: no failures
        failed = [pod for pod in pods if _uid(pod) not in spared and (_phase(pod) == "Failed" or pod in ending)]
        succeeded = {_index(pod) for pod in pods if _phase(pod) == "Succeeded"} | set(status.get("succeededIndexes", []))
        self._decide(job, status, active, ending, failed, succeeded)
        for pod in pods:
            if _phase(pod) in ("Succeeded", "Failed") or _deleted(pod):
                self._release(pod)
        counts = {
            "active": len(active),
            "ready": len(active),
            "terminating": len(ending),
            "failed": len(failed),
            "succeeded": len(succeeded),
        }
        done = {"succeededIndexes": sorted(succeeded), "completedIndexes": ",".join(map(str, sorted(succeeded)))}
        self._report(job, status | counts | done | {"uncountedTerminatedPods": {}})

    def _decide(
        self, job: Object, status: Object, active: list[Object], ending: list[Object], failed: list[Object], succeeded: set[int]
    ) -> None:
        """Note in ``status`` how the Job stands, and make or end pods accordingly."""
        spec, true = job["spec"], {c["type"] for c in status.get("conditions", []) if c["status"] == "True"}
        if true & {"Complete", "Failed"}:
            return
        if spec.get("suspend"):
            self._end(job, active)
            status["spared"] = sorted({*status.get("spared", []), *map(_uid, active)})
            _say(status, "Suspended", "JobSuspended", "Job suspended")
        elif "FailureTarget" in true or len(failed) > spec["backoffLimit"]:
            self._end(job, active)
            for word in ("FailureTarget",) if active or ending else ("FailureTarget", "Failed"):
                _say(status, word, "BackoffLimitExceeded", "Job has reached the specified backoff limit")
        elif len(succeeded) == spec["completions"]:
            for word in ("SuccessCriteriaMet", "Complete"):
                _say(status, word, "CompletionsReached", "Reached expected number of succeeded pods")
        else:
            if "Suspended" in true:
                _say(status, "Suspended", "JobResumed", "Job resumed", "False")
            there = succeeded | set(map(_index, active))
            for index in sorted(set(range(spec["completions"])) - there):
                self._core.create_namespaced_pod(job["metadata"]["namespace"], _pod(job, index))

    def _end(self, job: Object, pods: list[Object]) -> None:
        """And say so, as every controller does."""
        head = job["metadata"]
        about = {"apiVersion": job["apiVersion"], "kind": "Job", "name": head["name"], "namespace": head["namespace"], "uid": head["uid"]}
        for pod in pods:
            name = pod["metadata"]["name"]
            self._core.delete_namespaced_pod(name, head["namespace"])
            said = {"type": "Normal", "reason": "SuccessfulDelete", "message": f"Deleted pod: {name}", "involvedObject": about}
            self._core.create_namespaced_event(head["namespace"], {"metadata": {"generateName": f"{head['name']}."}, **said})

    def _release(self, pod: Object) -> None:
        """Take away the finalizer: the pod has been counted."""
        if _TRACKING in pod["metadata"].get("finalizers", []):
            self._core.patch_namespaced_pod(pod["metadata"]["name"], pod["metadata"]["namespace"], {"metadata": {"finalizers": None}})

    def _report(self, job: Object, status: Object) -> None:
        if status != job.get("status"):
            head = job["metadata"]
            self._customs.patch_namespaced_custom_object_status(GROUP, VERSION, head["namespace"], PLURAL, head["name"], {"status": status})


def _phase(pod: Object) -> str:
    return str((pod.get("status") or {}).get("phase"))


def _deleted(pod: Object) -> bool:
    return bool(pod["metadata"].get("deletionTimestamp"))


def _uid(pod: Object) -> str:
    return str(pod["metadata"]["uid"])


def _index(pod: Object) -> int:
    return int(pod["metadata"]["annotations"][f"{_BATCH}/job-completion-index"])


def _say(status: Object, word: str, reason: str, message: str, value: str = "True") -> None:
    others = [condition for condition in status.get("conditions", []) if condition["type"] != word]
    status["conditions"] = [*others, {"type": word, "status": value, "reason": reason, "message": message}]


def _pod(job: Object, index: int) -> Object:
    """As the controller of 1.36 makes it from the template."""
    head, template = job["metadata"], copy.deepcopy(job["spec"]["template"])
    labels = {"job-name": head["name"], "controller-uid": head["uid"]}
    labels |= {f"{_BATCH}/{name}": value for name, value in labels.items()} | {f"{_BATCH}/job-completion-index": str(index)}
    owner = {"apiVersion": job["apiVersion"], "kind": "Job", "name": head["name"], "uid": head["uid"]}
    metadata = {
        "name": f"{head['name']}-{index}-{secrets.token_hex(3)[:5]}",
        "labels": {**template["metadata"].get("labels", {}), **labels},
        "annotations": {**template["metadata"].get("annotations", {}), f"{_BATCH}/job-completion-index": str(index)},
        "ownerReferences": [owner | {"controller": True, "blockOwnerDeletion": True}],
        "finalizers": [_TRACKING],
    }
    spec = template["spec"] | {"hostname": f"{head['name']}-{index}"}
    source = {"fieldRef": {"fieldPath": f"metadata.labels['{_BATCH}/job-completion-index']"}}
    for container in spec["containers"]:
        container["env"] = [*container.get("env", []), {"name": "JOB_COMPLETION_INDEX", "valueFrom": source}]
    return {"metadata": metadata, "spec": spec}
