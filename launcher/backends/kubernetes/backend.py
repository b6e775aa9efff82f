"""The backend contract on Kubernetes: submit, find, poll, cancel, collect, logs."""

from __future__ import annotations

import dataclasses
import importlib.util
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from launcher.backends.contract import Backend, BackendError, Request
from launcher.backends.kubernetes.causes import Object, begun, container_of, deleted_in, ended, index_of, lost, name_of, unplaced
from launcher.backends.kubernetes.client import PATIENCE, REFUSED_SECONDS, Client, plainly
from launcher.backends.kubernetes.cluster import KubernetesCluster, check_cluster
from launcher.backends.kubernetes.errors import ApiError, explain
from launcher.backends.kubernetes.logs import Follower, disbelieve, follow_pod, together, unpack_message
from launcher.backends.kubernetes.manifests import JOB, OURS, STORE, object_name, pods_of, store_of
from launcher.backends.kubernetes.states import Observed, state_of
from launcher.backends.kubernetes.submission import PODS_PATH, SERVICES, Submission
from launcher.backends.kubernetes.watch import Mirror
from launcher.backends.kubernetes.workloads import KINDS, from_text, render, to_text
from launcher.backends.logs import read_logs
from launcher.backends.waiting import concurrently
from launcher.config.schema import ClusterConfig
from launcher.trials.job import Handle, Job, JobState
from trainer.shared.records.outcome import Reason, Status
from trainer.shared.records.trial_files import RESULT, attempt_of, outcome_of
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.files import read_json
from trainer.shared.run.read import as_text

_EVENTS_PATH = "api/v1/namespaces/{namespace}/events"
_EVENTS = {
    "FailedCreate", "FailedMount", "FailedAttachVolume", "FailedCreatePodSandBox", "Preempted", "TaintManagerEviction", "NodeNotReady",
    "SuccessfulDelete",
}  # fmt: skip
_AT_ONCE = 8
"""Jobs created at the same time."""
_QUOTA_SECONDS = 10.0
"""Seconds between retries of pods that exceeded a quota; a Job's controller retries by itself."""
_YIELD_SECONDS = 120.0
"""Seconds for gangs of other launchers to find room before ours may be submitted."""
_QUICK = 10.0
"""Seconds for a server to answer where there is no reason to wait."""
_LOG_SECONDS = 20.0
"""Seconds per wait for logs that are being read, while all else waits; added to the grace period of pods that we end."""
_OURS = ",".join(f"{name}={value}" for name, value in OURS.items())


class KubernetesBackend(Backend):
    """Trials as gangs of pods in one namespace."""

    poll_seconds = 1.0
    leaves_objects = True

    def __init__(self, cluster: ClusterConfig):
        if importlib.util.find_spec("kubernetes") is None:
            raise ModuleNotFoundError("no module named 'kubernetes'", name="kubernetes")
        super().__init__(cluster)
        self._settings: KubernetesCluster = check_cluster(cluster)
        self._kind = KINDS[self._settings.workload]
        self._followers: dict[str, Follower] = {}  # by uid of the pod
        self._over_quota: dict[str, _Waiting] = {}  # by name of the job, as below
        self._refused: dict[str, dict[str, str]] = {}
        self._cancelled: set[str] = set()
        self._placed: set[str] = set()  # names of jobs all of whose pods have found a node
        self._hurried = False
        self._yielded = float("-inf")  # monotonic; when a gang of ours was last in the way of another launcher's

    # -- connections, made when first needed ------------------------------------------------------------------------------

    @cached_property
    def _client(self) -> Client:
        return self._connected(PATIENCE)

    @cached_property
    def _brief(self) -> Client:
        """Client for queries that are cheap to repeat later."""
        return self._connected(0.0)

    def _connected(self, patience: float) -> Client:
        client = Client(self._settings, patience)
        client.hurried = self._hurried
        return client

    @cached_property
    def _submission(self) -> Submission:
        return Submission(self._client, self._kind, self._settings.grace_seconds)

    @cached_property
    def _mirrors(self) -> dict[str, Mirror]:
        """Mirrors of roots, pods, their workloads and the events that explain them."""
        mirrors = {
            "roots": Mirror(self._client, SERVICES, labelSelector=_OURS),
            "pods": Mirror(self._client, PODS_PATH, labelSelector=_OURS),
        }
        if self._makes_pods:
            mirrors["workloads"] = Mirror(self._client, self._kind.path, labelSelector=_OURS)
        mirrors["events"] = Mirror(self._client, _EVENTS_PATH, lambda event: event.get("reason") in _EVENTS)
        return {name: mirror.start() for name, mirror in mirrors.items()}

    # -- the contract -------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Checks that the server answers, grants every needed permission, and accepts one job's objects in a dry run."""
        probe = Job("0" * 12, "check", 0, Path("check"), self._settings, self._settings.world_size, config={})
        objects = render(probe, self._settings, "{}")
        try:
            self._client.reach(_QUICK)
            missing = self._client.refused(self._kind.rights)
            if missing:
                raise ConfigError(missing)
            self._submission.rehearse(objects, "use this cluster: the server refuses")
        except ApiError as error:
            raise plainly(error, "use this cluster", self._client.namespace) from None
        except BackendError as error:
            raise ConfigError(f"{error}; check cluster.context and cluster.kubeconfig") from None

    def render(self, job: Job) -> Request:
        """The manifests. ``kubectl apply -f`` takes them; the launcher adds to each that the Service owns it."""
        config = as_text(job.config) if job.config is not None else job.config_path.read_text()
        return Request(job, to_text(render(job, check_cluster(job.cluster), config)))

    def validate(self, request: Request) -> str:
        """A server-side dry run of each object, admission included."""
        answers = self._submission.rehearse(from_text(request.text))
        return "\n".join([f"{self._client.server}:", *answers])

    def submit(self, requests: Sequence[Request]) -> list[Handle]:
        """A job that the server refuses gets a handle that says so, and ``poll`` reports it as failed; the others are submitted."""
        self._submission  # noqa: B018 - made here, or every thread would make one with a client of its own
        return concurrently(self._submit, requests, _AT_ONCE, lambda: self._hurried)

    def find(self, jobs: Sequence[Job]) -> dict[str, Handle]:
        """Jobs whose objects are all there. One that a killed launcher created in part is completed by submitting it again."""
        self._ask_for_rights()
        roots = {root["metadata"]["name"]: root for root in self._client.list(SERVICES, labelSelector=_OURS)["items"]}
        found = {}
        for job in jobs:
            handle = handle_of(job) if object_name(job) in roots else handle_of(job) | {"name": job.name}  # as it was called once
            root = roots.get(handle["name"])
            if root is None or root["metadata"].get("deletionTimestamp") or root["metadata"]["labels"].get(STORE) != store_of(job):
                continue
            observed = self._read(self._client, handle)
            if observed.workload is not None if self._makes_pods else len(observed.pods) == observed.count:
                found[job.name] = handle
        return found

    def poll(self, handles: Sequence[Handle]) -> list[JobState]:
        """From the mirrors; a final state only after the job's objects have been read again."""
        self._ask_for_rights()
        self._try_over_quota()
        known = self._watched(handles)
        partly = self._partly_placed()
        for handle in handles:
            self._follow(handle, known[handle["name"]].pods)
            if placed_whole(known[handle["name"]]):
                self._placed.add(handle["name"])
        return [self._in_line(self._state(handle, known[handle["name"]]), handle, known[handle["name"]], partly) for handle in handles]

    def admits(self, job: Job, others: Iterable[Job]) -> str:
        """One gang at a time looks for room, unless a queue admits gangs whole."""
        if self._gangs_are_admitted or pods_of(job) == 1:
            return ""
        gangs = (other for other in others if pods_of(other) > 1)
        looking = next((other.trial for other in gangs if self._placed.isdisjoint({object_name(other), other.name})), None)
        if looking is not None:
            return f"trial {looking} has not found room for all of its pods yet"
        if time.monotonic() - self._yielded < _YIELD_SECONDS and self._partly_placed():
            return "another launcher's trial in the namespace has not found room for all of its pods yet"
        return ""

    def cancel(self, handles: Sequence[Handle]) -> None:
        for handle in handles:
            if "refused" not in handle and self._over_quota.pop(handle["name"], None) is None:
                self._cancelled.add(handle["name"])
                self._client.delete(SERVICES, handle["name"])

    def collect(self, job: Job, handle: Handle, remove: bool = True) -> None:
        """Ends running pods, reads every log to its end, and removes the job's objects (but see ``cluster.keep``). Raises ``BackendError``,
        and removes nothing, while more of a log may come."""
        if "refused" in handle:
            return
        name = handle["name"]
        known = self._watched([handle])[name]
        observed = self._read(self._client, handle, known)
        running = [pod for pod in observed.pods if "running" in container_of(pod) and pod["metadata"]["uid"] not in observed.gone]
        if running and not remove:
            raise BackendError(f"it has ended, but for pod {name_of(running[0])}, which the command that runs or cancels the trial ends")
        for pod in running:
            self._client.delete(PODS_PATH, name_of(pod), pod["metadata"]["uid"])
        self._follow(handle, observed.pods)
        logs = self._finish_logs(observed.pods, _LOG_SECONDS + bool(running) * self._settings.grace_seconds)
        if any(map(begun, observed.pods)):
            for rank in range(job.world_size):  # also of those that had nothing to say
                job.log_path(rank).parent.mkdir(parents=True, exist_ok=True)
                job.log_path(rank).touch()
        last = self._read(self._client, handle, known) if running else observed
        for pod in sorted(last.pods, key=index_of):
            unpack_message(pod, job.directory, job.attempt)
        done = state_of(self._kind, observed, self._client.now(), 0.0).status is Status.DONE
        missing = "; ".join(log.missing for log in logs if log.missing)
        unmeasured = done and missing and not any(log.has_result for log in logs)
        stays = unmeasured and any(log.missing and not log.gone for log in logs)
        if unmeasured:
            words = f"{missing}; it is kept: 'kubectl delete service {name}' removes all of the trial" if stays else missing
            disbelieve(job.directory, job.attempt, job.world_size, words)
        if remove and not stays and (self._settings.keep == "nothing" or (self._settings.keep == "failed" and done and not missing)):
            self._client.delete(SERVICES, name)
        if running:
            self._submission.await_end(name)
        for mirror in self._mirrors.values():
            mirror.forget(lambda item: job_of(item) == name)

    def logs(self, job: Job, handle: Handle | None, follow: bool = False) -> Iterator[str]:
        """From its pods while they are there, else from the trial's directory."""
        if handle is None or "refused" in handle:
            return read_logs(job)
        try:
            if self._brief.get(SERVICES, handle["name"]) is None:
                return read_logs(job)
            if follow:
                return self._pod_lines(job, handle, follow)
            lines = list(self._pod_lines(job, handle, follow))
            return read_logs(job) if self._brief.get(SERVICES, handle["name"]) is None else iter(lines)  # its log was copied meanwhile
        except (BackendError, ConfigError):  # out of reach, perhaps only from here: show the copied part
            return read_logs(job)

    def hurry(self) -> None:
        self._hurried = True
        for name in ("_client", "_brief"):
            if name in self.__dict__:
                self.__dict__[name].hurried = True

    def close(self) -> None:
        if "_mirrors" in self.__dict__:
            for mirror in self._mirrors.values():
                mirror.close()
        for follower in self._followers.values():
            follower.stop()
        for name in ("_client", "_brief"):
            if name in self.__dict__:
                self.__dict__[name].close()

    def _ask_for_rights(self) -> None:
        """Raises ``ConfigError`` if requests have been refused for long and the server says that they are no longer permitted."""
        if self._client.refused_s() <= REFUSED_SECONDS:
            return
        self._brief.forget_grants()  # it may have asked before, and a withdrawn right would count as silence for good
        try:
            missing = self._brief.refused(self._kind.rights)
        except ApiError as error:
            if not error.unauthorized:
                return
            missing = explain(error, "ask for its rights", self._client.namespace)
        except BackendError:
            return
        if missing:
            raise ConfigError(
                f"the Kubernetes API server at {self._client.server} refuses what it granted until {self._client.refused_s():.0f} s ago: "
                f"{missing}; if the namespace was deleted, 'trireme cancel --forget SWEEP' gives up the trials submitted there"
            )
        self._client.forget_refusals()

    # -- submitting -----------------------------------------------------------------------------------------------------------

    def _submit(self, request: Request) -> Handle:
        job = request.job
        name = object_name(job)
        self._cancelled.discard(name)
        self._placed.discard(name)
        try:
            self._submission.start(job, from_text(request.text))
        except ConfigError as error:
            return handle_of(job) | {"refused": {"reason": Reason.CONFIGURATION.value, "detail": str(error)}}
        except ApiError as error:
            plain = str(plainly(error, f"submit trial {job.trial}", self._client.namespace))
            if not error.over_quota:
                return handle_of(job) | {"refused": {"reason": Reason.CANNOT_START.value, "detail": plain}}
            self._over_quota[name] = _Waiting(request, time.monotonic(), plain)
        return handle_of(job)

    def _try_over_quota(self) -> None:
        for name, waiting in list(self._over_quota.items()):
            if time.monotonic() - waiting.since > _QUOTA_SECONDS:
                del self._over_quota[name]
                handle = self._submit(waiting.request)
                if "refused" in handle:
                    self._refused[name] = handle["refused"]

    # -- room ---------------------------------------------------------------------------------------------------------------

    @property
    def _gangs_are_admitted(self) -> bool:
        """Returns whether pods of a job are placed all at once or not at all."""
        return self._settings.queue is not None or self._settings.workload == "volcano"

    def _partly_placed(self) -> list[str]:
        """Jobs in the namespace, of whichever launcher, that hold room and wait for more; in the order of their creation."""
        pods = _by_job([pod for pod in self._mirrors["pods"].objects() if pod["metadata"]["uid"] not in self._mirrors["pods"].gone()])
        born = {job_of(root): root["metadata"]["creationTimestamp"] for root in self._mirrors["roots"].objects()}
        partly = [name for name, own in pods.items() if any(map(unplaced, own)) and not all(map(unplaced, own))]
        return sorted(partly, key=lambda name: (name not in born, born.get(name, ""), name))  # seen after its pods: the newest

    def _in_line(self, state: JobState, handle: Handle, known: Observed, partly: Sequence[str]) -> JobState:
        """Adds to ``state`` the effect on others of a gang that is placed in part."""
        alone = handle["pods"] == 1 or self._gangs_are_admitted
        if alone or state.status.final or not any(unplaced(pod) for pod in known.pods if pod["metadata"]["uid"] not in known.gone):
            return state
        yields = handle["name"] in partly[1:]
        if yields:
            self._yielded = time.monotonic()
        return dataclasses.replace(state, waits_for_room=True, yields=yields)

    # -- observing --------------------------------------------------------------------------------------------------------------

    @property
    def _makes_pods(self) -> bool:
        """True if a controller of the cluster makes the pods; otherwise the launcher does."""
        return self._kind.kind != "Pod"

    def _watched(self, handles: Sequence[Handle]) -> dict[str, Observed]:
        """Returns the mirrored objects of each job, by name."""
        things = {name: _by_job(mirror.objects()) for name, mirror in self._mirrors.items() if name != "events"}
        gone = frozenset().union(*(mirror.gone() for mirror in self._mirrors.values()))
        events: dict[str, list[Object]] = {}
        for event in self._mirrors["events"].objects():  # of a pod, by its uid; but its controller tells of its deletion by name
            events.setdefault(deleted_in(event) or event["involvedObject"].get("uid", ""), []).append(event)

        def living(kind: str, name: str) -> Object | None:
            return next((item for item in things.get(kind, {}).get(name, []) if item["metadata"]["uid"] not in gone), None)

        known = {}
        for name, count in {handle["name"]: handle["pods"] for handle in handles}.items():
            pods, workload = things["pods"].get(name, []), living("workloads", name)
            about = [
                event
                for item in [*pods, *([workload] if workload else [])]
                for key in (item["metadata"]["uid"], name_of(item))
                for event in events.get(key, [])
            ]
            known[name] = Observed(count, living("roots", name), workload, pods, gone, about)
        return known

    def _read(self, client: Client, handle: Handle, known: Observed | None = None) -> Observed:
        """Reads the objects from the server; deleted ones, and events, are ``known``."""
        name = handle["name"]
        pods = {pod["metadata"]["uid"]: pod for pod in known.pods} if known else {}
        there = {pod["metadata"]["uid"]: pod for pod in client.list(PODS_PATH, labelSelector=f"{JOB}={name}")["items"]}
        workload = client.get(self._kind.path, name) if self._makes_pods else None
        gone = frozenset(pods) - frozenset(there)
        return Observed(
            handle["pods"], client.get(SERVICES, name), workload, list((pods | there).values()), gone, known.events if known else ()
        )

    def _state(self, handle: Handle, known: Observed) -> JobState:
        name = handle["name"]
        refused = handle.get("refused") or self._refused.get(name)
        if refused is not None:
            return JobState(Status.FAILED, Reason(refused["reason"]), refused["detail"])
        if name in self._over_quota:
            return JobState(Status.SUBMITTED, None, self._over_quota[name].why)
        state = state_of(self._kind, known, self._client.now(), self._settings.fault_timeout)
        if not state.status.final:
            return state
        try:
            fresh = self._read(self._brief, handle, known)
        except BackendError as error:
            self._client.complain(str(error))
            return JobState(Status.SUBMITTED if state.started is None else Status.RUNNING, None, str(error), state.started, state.nodes)
        if fresh.root is None and (result := result_of(Path(handle["directory"]), handle["attempt"])) is not None:
            return JobState(*outcome_of(result), "its objects are gone; its result had been collected")
        if fresh.root is None and name in self._cancelled:
            return dataclasses.replace(state, detail="its pods have been ended")
        return state_of(self._kind, fresh, self._client.now(), self._settings.fault_timeout)

    # -- logs -------------------------------------------------------------------------------------------------------------------

    def _follow(self, handle: Handle, pods: Sequence[Object]) -> None:
        """Reads the logs of pods that have begun, each in a thread of its own, while there is something to be read."""
        for pod in pods:
            uid = pod["metadata"]["uid"]
            if uid not in self._followers and begun(pod):
                follower = Follower(self._client, pod, Path(handle["directory"]), handle["attempt"], lambda uid=uid: self._over(uid))  # type: ignore[misc]
                self._followers[uid] = follower
                follower.start()

    def _over(self, uid: str) -> bool:
        pod = self._mirrors["pods"].get(uid)
        return pod is None or ended(pod)

    def _finish_logs(self, pods: Sequence[Object], patience_s: float) -> list[Follower]:
        """The followers of the pods' logs, which have ended, or wait for a lost node. ``BackendError`` when there may be more to be had."""
        deadline = time.monotonic() + patience_s
        followers = []
        for pod in [pod for pod in pods if pod["metadata"]["uid"] in self._followers]:
            followers.append(follower := self._followers[pod["metadata"]["uid"]])
            if not lost(pod, self._client.now()):
                while follower.is_alive() and not follower.trouble and time.monotonic() < deadline:
                    follower.join(0.05)
                if follower.is_alive():
                    raise BackendError(f"it has ended, and its log is not whole yet: {follower.trouble or 'it is being read'}")
        for follower in followers:
            follower.stop()
            del self._followers[follower.uid]
        return followers

    def _pod_lines(self, job: Job, handle: Handle, follow: bool) -> Iterator[str]:
        """Lines of all pods as the pods write them; of a job that has no pods yet, when it has."""
        while True:
            pods = self._read(self._client, handle).pods
            if pods or not follow or self.poll([handle])[0].status.final:
                break
            time.sleep(_QUICK / 10)
        streams = [
            follow_pod(self._client, name_of(pod), self._ends(pod) if follow else lambda: True) for pod in sorted(pods, key=index_of)
        ]
        for _, line in together(streams) if follow else chain.from_iterable(streams):
            text = line.decode("utf-8", "replace")
            if not text.startswith("#trireme "):
                yield text if job.world_size > 1 else text.removeprefix("[0] ")

    def _ends(self, pod: Object) -> Callable[[], bool]:
        def asked() -> bool:
            now = self._client.get(PODS_PATH, name_of(pod))
            return now is None or ended(now)

        return asked


@dataclass(frozen=True)
class _Waiting:
    """Plain pods that met a used-up quota."""

    request: Request
    since: float  # monotonic
    why: str


def handle_of(job: Job) -> Handle:
    """Names are deterministic, so a handle needs nothing that only the server knows."""
    cluster = check_cluster(job.cluster)
    place = {"namespace": cluster.namespace, "name": object_name(job)}
    return place | {"pods": pods_of(job), "attempt": job.attempt, "directory": str(job.directory)}


def placed_whole(job: Observed) -> bool:
    """Returns whether every pod of a gang has a node."""
    there = [pod for pod in job.pods if pod["metadata"]["uid"] not in job.gone and pod["spec"].get("nodeName")]
    return len(there) >= job.count


def job_of(item: Object) -> str:
    return str(item["metadata"].get("labels", {}).get(JOB, ""))


def result_of(directory: Path, attempt: int) -> dict[str, Any] | None:
    """The result of that attempt, or of a newer one, if it has been copied here."""
    result = read_json(directory / RESULT)
    return result if result is not None and attempt_of(result) >= attempt else None


def _by_job(items: Sequence[Object]) -> dict[str, list[Object]]:
    groups: dict[str, list[Object]] = {}
    for item in items:
        groups.setdefault(job_of(item), []).append(item)
    return groups
