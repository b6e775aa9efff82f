"""Creating a job's objects: whole or not at all, once however often it is asked, and never while an older attempt of the trial exists."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from launcher.backends.contract import BackendError
from launcher.backends.kubernetes.causes import ended
from launcher.backends.kubernetes.client import Client
from launcher.backends.kubernetes.errors import ApiError, dropped, explain
from launcher.backends.kubernetes.manifests import ATTEMPT, DIRECTORY, JOB, STORE, TRIAL, Manifest, object_name, store_of
from launcher.backends.kubernetes.workloads import KINDS, WorkloadKind, outcome
from launcher.trials.job import Job
from trainer.shared.run.errors import ConfigError

SERVICES = "api/v1/namespaces/{namespace}/services"
CONFIG_MAPS = "api/v1/namespaces/{namespace}/configmaps"
PODS_PATH = "api/v1/namespaces/{namespace}/pods"
_END_SECONDS = 60.0
"""Seconds, beyond their grace period, for objects to be deleted."""
_PAUSE = 0.3
_TIME_TO_LIVE = "spec.ttlSecondsAfterFinished"
_LATER = {_TIME_TO_LIVE, "spec.suspend"}
"""Fields of ours that earlier versions of other groups' kinds do not have."""


class Submission:
    """Creates the objects of jobs, all of one kind of workload."""

    def __init__(self, client: Client, kind: WorkloadKind, grace: float):
        self._client, self._kind = client, kind
        self._end_seconds = grace + _END_SECONDS

    def start(self, job: Job, objects: Sequence[Manifest]) -> None:
        """Creates the root, then the objects it owns; undoes a partial creation. Raises ``ApiError`` or ``ConfigError``."""
        if job.attempt > 0:
            self._fence(job)
        root = self._root(job, objects[0])
        owner = {"apiVersion": "v1", "kind": "Service", "name": object_name(job), "uid": root["metadata"]["uid"]}
        try:
            for manifest in objects[1:]:
                child = self._child(manifest, owner)
            self._tie(object_name(job), child)
        except (ApiError, ConfigError):
            self._client.delete(SERVICES, object_name(job), owner["uid"])
            raise

    def await_end(self, name: str) -> None:
        """Returns when no pod of the job runs any more; deletes by force pods on a lost node, which never confirms their end."""
        self._end(f"{JOB}={name}", lambda _: True)

    def rehearse(self, objects: Sequence[Manifest], doing: str = "submit") -> list[str]:
        """Asks the server for a dry run and returns its answers, a line each. Raises ``ConfigError`` if it would refuse objects or drop
        fields."""
        return [self._rehearse(manifest, f"{manifest['kind']} {manifest['metadata']['name']}", doing) for manifest in objects]

    def _rehearse(self, manifest: Manifest, what: str, doing: str) -> str:
        try:
            stored = self._create(self._path(manifest), manifest, dry_run=True)
        except ApiError as error:
            if error.over_quota or error.exists or "does not support dry run" in error.message:
                return f"{what}: {error.message}"  # room may be made; what exists is adopted; a webhook that cannot be asked
            raise ConfigError(explain(error, f"{doing} {what}", self._client.namespace)) from None
        self._unforgotten(manifest, stored)
        return f"{what}: accepted (server dry run)"

    def _create(self, path: str, manifest: Manifest, dry_run: bool = False) -> Manifest:
        """Creates an object. Where a current server refuses fields that an old one drops, it is asked to drop them: what that means is
        judged once, from what it stored. It goes on refusing all others, such as a slip in ``cluster.patch``."""
        try:
            return self._client.create(path, manifest, dry_run)
        except ApiError as error:
            if not error.unknown or error.unknown - _LATER:
                raise
        return self._client.create(path, manifest, dry_run, strict=False)

    def _path(self, manifest: Manifest) -> str:
        paths = {"Service": SERVICES, "ConfigMap": CONFIG_MAPS}
        return paths.get(manifest["kind"], self._kind.path)

    def _root(self, job: Job, manifest: Manifest) -> Manifest:
        """The job's Service, newly made or found; whose it is decides whose the job is."""
        deadline = time.monotonic() + self._end_seconds
        while True:
            try:
                return self._client.create(SERVICES, manifest)
            except ApiError as error:
                if not error.exists:
                    raise
            there = self._client.get(SERVICES, object_name(job))
            if there is not None and not there["metadata"].get("deletionTimestamp"):
                return ours(there, job)
            self._wait(deadline, f"Service {object_name(job)} of an earlier run to go away")

    def _tie(self, root: str, child: Manifest) -> None:
        """Makes the root go with the pods' maker, which the cluster removes by its time to live. Plain pods have none."""
        if self._kind.kind != "Pod":
            owner = {
                "apiVersion": child["apiVersion"],
                "kind": child["kind"],
                "name": child["metadata"]["name"],
                "uid": child["metadata"]["uid"],
            }
            self._client.merge(SERVICES, root, {"metadata": {"ownerReferences": [owner]}})

    def _child(self, manifest: Manifest, owner: Manifest) -> Manifest:
        """Creates one object under the root; returns the server's copy. Adopts an existing one of this root, waits for a former root's
        to go."""
        head = {**manifest["metadata"], "ownerReferences": [owner]}
        path, name = self._path(manifest), head["name"]
        deadline = time.monotonic() + self._end_seconds
        while True:
            try:
                stored = self._create(path, {**manifest, "metadata": head})
                return self._unforgotten(manifest, stored)
            except ApiError as error:
                if not error.exists:
                    raise
            there = self._client.get(path, name)
            if there is not None and owner["uid"] in [o["uid"] for o in there["metadata"].get("ownerReferences", [])]:
                return self._unforgotten(manifest, there)
            self._wait(deadline, f"{manifest['kind']} {name} of an earlier run to go away")

    def _unforgotten(self, sent: Manifest, stored: Manifest) -> Manifest:
        """Returns ``stored`` if it has every needed field. Raises ``ConfigError`` otherwise: without completionMode, every pod would be
        rank 0."""
        lost = [path for path in dropped(sent, stored) if not path.startswith("metadata")]
        if _TIME_TO_LIVE in lost:
            lost.remove(_TIME_TO_LIVE)
            self._client.say_once(
                f"the API server at {self._client.server} drops {_TIME_TO_LIVE} of the {sent['kind']}: should no launcher come back "
                "for a trial that has ended, nobody removes it"
            )
        if lost:
            workload = next(word for word, kind in KINDS.items() if kind is self._kind)
            raise ConfigError(
                f"the API server at {self._client.server} is too old for cluster.workload={workload}: of the {sent['kind']} it drops "
                f"{', '.join(lost[:3])} silently; use cluster.workload=pods, which every version runs"
            )
        return {"apiVersion": sent["apiVersion"], "kind": sent["kind"], **stored}

    def _fence(self, job: Job) -> None:
        """Ends older attempts of the trial: two attempts must not write one checkpoint."""
        mine = f"{TRIAL}={job.trial},{STORE}={store_of(job)}"

        def older(item: Manifest) -> bool:
            return int(item["metadata"]["labels"][ATTEMPT]) < job.attempt

        if self._kind.kind != "Pod":  # one that has no pods may get some: a queue may yet admit it
            for workload in filter(older, self._client.list(self._kind.path, labelSelector=mine)["items"]):
                if outcome(self._kind, workload)[0] not in ("complete", "failed"):
                    self._client.delete(SERVICES, workload["metadata"]["name"])
        self._end(mine, older)

    def _end(self, selector: str, doomed: Callable[[Manifest], bool]) -> None:
        deadline = time.monotonic() + self._end_seconds
        while True:
            alive = [pod for pod in self._client.list(PODS_PATH, labelSelector=selector)["items"] if doomed(pod) and not ended(pod)]
            if not alive:
                return
            late = time.monotonic() > deadline
            for pod in alive:
                if late or not pod["metadata"].get("deletionTimestamp"):
                    self._client.delete(PODS_PATH, pod["metadata"]["name"], pod["metadata"]["uid"], grace=0 if late else None)
            time.sleep(_PAUSE)

    @staticmethod
    def _wait(deadline: float, what: str) -> None:
        if time.monotonic() > deadline:
            raise BackendError(f"waited too long for {what}; delete it by hand, or look for a finalizer that keeps it")
        time.sleep(_PAUSE)


def ours(root: Manifest, job: Job) -> Manifest:
    """``root``, if it belongs to the same folder of trials; two launchers must not take each other's jobs for theirs."""
    head = root["metadata"]
    if head.get("labels", {}).get(STORE) != store_of(job):
        whose = head.get("annotations", {}).get(DIRECTORY) or "something other than Trireme"
        raise ConfigError(
            f"namespace {head['namespace']} has a Service {object_name(job)} already, made for {whose}; "
            "wait for its end, delete it, or use another cluster.namespace"
        )
    return root
