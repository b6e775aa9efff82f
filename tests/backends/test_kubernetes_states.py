"""From what an API server says to how a job stands: every way to fail, in the words of real servers (1.20 and 1.36). No cluster."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime
from typing import Any

import pytest

from launcher.backends.kubernetes.causes import Object
from launcher.backends.kubernetes.states import SETTLE, Observed, state_of
from launcher.backends.kubernetes.workloads import KINDS
from launcher.trials.job import JobState
from trainer.shared.records.outcome import Reason, Status

NOW = datetime(2026, 11, 20, 12, 0, 0, tzinfo=UTC).timestamp()
FAULT_TIMEOUT = 300.0
QUOTA = 'Error creating: pods "j-0-vb5dd" is forbidden: exceeded quota: rq, requested: requests.cpu=3, used: requests.cpu=3, limited: requests.cpu=4'
SECURITY = 'Error creating: pods "j-0-abcde" is forbidden: violates PodSecurity "restricted:latest": allowPrivilegeEscalation != false'


def at(seconds_ago: float) -> str:
    return datetime.fromtimestamp(NOW - seconds_ago, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def pod(index: int = 0, phase: str = "Pending", state: Object | None = None, **status: Any) -> Object:
    """A pod of the gang; ``conditions``, ``reason`` and so on are parts of its status, ``deleted`` seconds since its ``grace`` ended."""
    deleted, grace = status.pop("deleted", None), status.pop("grace", 0)
    head = {"name": f"j-{index}", "uid": f"uid-{index}", "creationTimestamp": at(400)}
    if deleted is not None:
        head |= {"deletionTimestamp": at(deleted), "deletionGracePeriodSeconds": grace}
    containers = [{"name": "node", "state": state}] if state else []
    placed = {"type": "PodScheduled", "status": "True", "lastTransitionTime": at(status.pop("placed", 100))}
    conditions = [placed, *status.pop("conditions", [])]
    spec = {"hostname": f"j-{index}", "nodeName": f"n{index}"}
    return {"metadata": head, "spec": spec, "status": {"phase": phase, "containerStatuses": containers, "conditions": conditions, **status}}


def works(index: int = 0, **status: Any) -> Object:
    return pod(index, "Running", {"running": {"startedAt": at(50)}}, **status)


def ended(index: int = 0, code: int = 0, reason: str = "", ago: float = 5, message: str = "", **status: Any) -> Object:
    end = {
        "exitCode": code,
        "reason": reason or ("Error" if code else "Completed"),
        "startedAt": at(50),
        "finishedAt": at(ago),
        "message": message,
    }
    return pod(index, "Failed" if code else "Succeeded", {"terminated": end}, **status)


def waits(index: int = 0, reason: str = "ContainerCreating", message: str = "", **status: Any) -> Object:
    return pod(index, "Pending", {"waiting": {"reason": reason, "message": message}}, **status)


def unplaced(index: int, words: str) -> Object:
    told = pod(index)
    told["spec"].pop("nodeName")
    told["status"]["conditions"] = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": words}]
    return told


def event(reason: str, message: str, uid: str = "uid-0") -> Object:
    return {"reason": reason, "message": message, "involvedObject": {"uid": uid}, "metadata": {"creationTimestamp": at(10)}}


def disrupted(reason: str, message: str = "") -> Object:
    return {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": message}


def workload(kind: str = "job", suspend: bool = False, **status: Any) -> Object:
    return {"metadata": {"name": "j", "uid": "uid-w", "creationTimestamp": at(400)}, "spec": {"suspend": suspend}, "status": status}


def condition(kind: str, reason: str = "", message: str = "") -> Object:
    return {"type": kind, "status": "True", "reason": reason, "message": message}


def state(*pods: Object, count: int = 0, kind: str = "pods", **known: Any) -> JobState:
    observed = Observed(count or len(pods), {"metadata": {"name": "j"}}, None if kind == "pods" else workload(), pods)
    return state_of(KINDS[kind], dataclasses.replace(observed, **known), NOW, FAULT_TIMEOUT)


# -- alive --------------------------------------------------------------------------------------------------------------------


def test_a_gang_runs_when_all_of_its_pods_run() -> None:
    told = state(works(0), works(1))
    assert (told.status, told.started, told.nodes) == (Status.RUNNING, NOW - 50, ("n0", "n1"))


def test_a_gang_of_which_some_pods_run_waits_and_says_for_what() -> None:
    words = "0/2 nodes are available: 2 Insufficient nvidia.com/gpu."
    told = state(works(0), works(1), unplaced(2, words))
    assert (told.status, told.started) == (Status.SUBMITTED, None)
    assert told.detail == f"2 of 3 pods run; Unschedulable: {words}"


def test_a_gang_is_done_when_all_are_done_and_runs_until_then() -> None:
    assert state(ended(0), works(1)).status is Status.RUNNING
    assert state(ended(0), ended(1)).status is Status.DONE


def test_success_goes_by_the_exit_code_whatever_the_kernel_killed_beside() -> None:
    assert state(ended(0, 0, "OOMKilled")).status is Status.DONE


def test_containers_that_others_put_into_a_pod_do_not_speak_for_it() -> None:
    """Statuses come in alphabetical order, and a service mesh's container neither starts nor ends with ours."""
    mesh = {"name": "mesh-proxy", "state": {"running": {"startedAt": at(60)}}}
    starting, done, failed = waits(0), ended(0), ended(0, 3)
    for told in (starting, done, failed):
        told["status"]["containerStatuses"].insert(0, mesh)
        told["status"]["phase"] = "Running"
    assert state(starting).status is Status.SUBMITTED
    assert state(done).status is Status.DONE
    assert "exit code 3" in state(failed).detail


def test_pods_of_an_indexed_job_are_told_apart_by_their_index_whatever_they_are_called() -> None:
    pods = [works(0), works(1)]
    for number, told in enumerate(pods):
        told["spec"].pop("hostname")
        told["metadata"] |= {"name": f"j-{number}-12345", "annotations": {"batch.kubernetes.io/job-completion-index": str(number)}}
    assert state(*pods, kind="job").status is Status.RUNNING


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (unplaced(0, 'persistentvolumeclaim "nope" not found'), 'Unschedulable: persistentvolumeclaim "nope" not found'),
        (unplaced(0, "0/1 nodes are available: 1 node(s) didn't match Pod's node affinity."), "didn't match Pod's node affinity"),
        (waits(0), "ContainerCreating"),
        (waits(0, "ErrImagePull", "failed to resolve reference"), "ErrImagePull: failed to resolve reference"),
        (waits(0, "CreateContainerConfigError", 'configmap "nope" not found'), 'CreateContainerConfigError: configmap "nope" not found'),
        (pod(0), "waiting for its pods"),
    ],
)
def test_a_pod_that_waits_says_for_what_in_kubernetes_words(told: Object, words: str) -> None:
    answer = state(told)
    assert answer.status is Status.SUBMITTED and words in answer.detail


def test_a_mount_that_fails_is_told_by_its_event() -> None:
    words = 'MountVolume.SetUp failed for volume "s" : secret "nope" not found'
    assert state(waits(0), events=(event("FailedMount", words),)).detail == f"FailedMount: {words}"


def test_a_used_up_quota_is_waited_for() -> None:
    told = state(works(0), count=2, kind="job", events=(event("FailedCreate", QUOTA, "uid-w"),))
    assert told.status is Status.SUBMITTED and told.detail == f"1 of 2 pods run; {QUOTA}"


@pytest.mark.parametrize("suspended", [workload(suspend=True), workload(suspend=True, conditions=[condition("Suspended", "JobSuspended")])])
def test_a_suspended_workload_waits_for_its_queue(suspended: Object) -> None:
    told = state(count=2, kind="job", workload=suspended)
    assert told.status is Status.SUBMITTED and "queue" in told.detail


def test_pods_of_before_a_suspension_are_passed_over() -> None:
    old, new = ended(0, 143, deleted=60), works(0)
    old["metadata"] |= {"uid": "old", "creationTimestamp": at(1000)}
    assert state(old, new, count=1, gone=frozenset({"old"})).status is Status.RUNNING


def test_a_silent_node_is_named_while_its_pods_may_still_be_alive() -> None:
    unready = works(0, conditions=[{"type": "Ready", "status": "False"}])
    told = state(unready, events=(event("NodeNotReady", "Node is not ready"),))
    assert told.status is Status.RUNNING and told.detail == "node n0 of pod j-0 does not answer"


# -- causes -------------------------------------------------------------------------------------------------------------------

LOST = works(0, deleted=31)
EVICTED = "The node was low on resource: memory. "
FAILURES = {
    "exit code": (ended(0, 3), None, "pod j-0 on n0: exit code 3"),
    "wrong configuration": (ended(0, 2), Reason.CONFIGURATION, "exit code 2"),
    "memory limit": (ended(0, 137, "OOMKilled"), Reason.HOST_MEMORY, "OOMKilled (exit code 137); raise cluster.memory"),
    "killed, nobody knows why": (ended(0, 137), None, "exit code 137"),
    "no such program": (ended(0, 128, "StartError", message='exec: "/no": no such file'), Reason.CANNOT_START, "StartError: exec"),
    "evicted for memory": (pod(0, "Failed", reason="Evicted", message=EVICTED), Reason.HOST_MEMORY, "Evicted: The node was low on resource"),
    "evicted for its own disk limit": (pod(0, "Failed", reason="Evicted", message="Pod ephemeral local storage usage exceeds the total limit of containers 5Gi. "), Reason.CONFIGURATION, "cluster.run_dir on a volume"),
    "evicted for its container's disk limit": (pod(0, "Failed", reason="Evicted", message='Container node exceeded its local ephemeral storage limit "5Gi". '), Reason.CONFIGURATION, "exceeded its local"),
    "evicted for its own empty folder": (pod(0, "Failed", reason="Evicted", message='Usage of EmptyDir volume "tmp" exceeds the limit "1Gi". '), Reason.CONFIGURATION, "exceeds the limit"),
    "evicted for disk": (pod(0, "Failed", reason="Evicted", message="The node had condition: [DiskPressure]."), Reason.NODE, "DiskPressure"),
    "preempted, 1.36": (ended(0, 137, conditions=[disrupted("PreemptionByScheduler", "by a higher priority pod")]), Reason.PREEMPTED, "by a higher"),
    "drained, 1.36": (ended(0, 143, conditions=[disrupted("EvictionByEvictionAPI", "Eviction API: evicting")]), Reason.PREEMPTED, "evicting"),
    "taint manager, 1.36": (ended(0, 137, conditions=[disrupted("DeletionByTaintManager")]), Reason.NODE, "DeletionByTaintManager"),
    "graceful node shutdown": (pod(0, "Failed", reason="Terminated", message="imminent node shutdown."), Reason.NODE, "imminent node shutdown"),
    "node lost": (LOST, Reason.NODE, "its node does not answer"),
    "pod deadline, 1.20": (
        pod(0, "Failed", {"running": {"startedAt": at(50)}}, reason="DeadlineExceeded", message="Pod was active on the node longer"),
        Reason.TIME_LIMIT,
        "DeadlineExceeded: Pod was active",
    ),
    "kubelet admission": (pod(0, "Failed", reason="OutOfcpu", message="Node didn't have enough resource: cpu"), Reason.NODE, "OutOfcpu"),
    "no reason": (pod(0, "Failed"), Reason.NODE, "its node gave no reason"),
    "bad image name": (waits(0, "InvalidImageName", "couldn't parse image"), Reason.CANNOT_START, "correct cluster.container.image"),
    "image never pulled": (waits(0, "ErrImageNeverPull", "not present with pull policy of Never"), Reason.CANNOT_START, "pull_policy=IfNotPresent"),
    "image absent for long": (waits(0, "ImagePullBackOff", "Back-off pulling", placed=301), Reason.CANNOT_START, "(for 301 s); check cluster.container.image"),
    "secret absent for long": (waits(0, "CreateContainerConfigError", 'secret "x" not found', placed=400), Reason.CANNOT_START, 'secret "x" not found'),
}  # fmt: skip


@pytest.mark.parametrize("name", FAILURES)
def test_each_way_to_fail_has_its_reason_and_its_words(name: str) -> None:
    told, reason, words = FAILURES[name]
    answer = state(told)
    assert (answer.status, answer.reason) == (Status.FAILED, reason)
    assert words in answer.detail and answer.detail.startswith("pod j-0 on n0: ") and "\n" not in answer.detail


@pytest.mark.parametrize(
    ("name", "bad"), [("evicted for disk", True), ("node lost", True), ("kubelet admission", True), ("exit code", False), ("memory limit", False), ("preempted, 1.36", False)]
)  # fmt: skip
def test_nodes_at_fault_are_named_and_others_are_not(name: str, bad: bool) -> None:
    assert state(FAILURES[name][0]).bad_nodes == (("n0",) if bad else ())


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        (event("Preempted", "Preempted by p2/high1 on node n0"), Reason.PREEMPTED),
        (event("TaintManagerEviction", "Marking for deletion Pod train/j-0"), Reason.NODE),
    ],
)
def test_old_servers_tell_only_by_events_what_befell_a_pod(told: Object, reason: Reason) -> None:
    answer = state(ended(0, 137, deleted=5), events=(told,))
    assert (answer.status, answer.reason) == (Status.FAILED, reason)


def test_a_cancelled_eviction_is_none() -> None:
    cancelled = event("TaintManagerEviction", "Cancelling deletion of Pod train/j-0")
    assert state(ended(0, 3), events=(cancelled,)).reason is None


def test_a_mount_that_fails_for_long_cannot_start() -> None:
    told = state(waits(0, placed=301), events=(event("FailedMount", 'secret "nope" not found'),))
    assert (told.status, told.reason) == (Status.FAILED, Reason.CANNOT_START) and "correct cluster.volumes" in told.detail


@pytest.mark.parametrize("kind", ["configmap", "secret"])
def test_a_node_that_has_not_heard_of_a_secret_yet_says_nothing_of_whether_there_is_one(kind: str) -> None:
    words = f'MountVolume.SetUp failed for volume "v" : failed to sync {kind} cache: timed out waiting for the condition'
    slow, absent = event("FailedMount", words), event("FailedMount", f'{kind} "nope" not found')
    assert state(waits(0, placed=301), events=(slow,)).status is Status.SUBMITTED
    unsynced = waits(0, "CreateContainerConfigError", words.partition(" : ")[2], placed=301)
    assert state(unsynced).status is Status.SUBMITTED
    for events in ((absent, slow), (slow, absent)):
        assert f'{kind} "nope" not found' in state(waits(0, placed=301), events=events).detail


def test_faults_are_waited_for_in_vain_only_as_long_as_is_set() -> None:
    absent = waits(0, "ImagePullBackOff", "Back-off", placed=10_000)
    observed = Observed(1, {}, None, (absent,))
    assert state_of(KINDS["pods"], observed, NOW, 0.0).status is Status.SUBMITTED
    assert state_of(KINDS["pods"], observed, NOW, 20_000.0).status is Status.SUBMITTED
    assert state_of(KINDS["pods"], observed, NOW, 9_999.0).status is Status.FAILED


@pytest.mark.parametrize("code", [75])
def test_a_gang_that_stopped_after_a_checkpoint_may_be_resumed(code: int) -> None:
    told = state(ended(0, code), ended(1, code))
    assert (told.status, told.reason) == (Status.STOPPED, Reason.PREEMPTED)


# -- gangs ----------------------------------------------------------------------------------------------------------------------


def test_the_pod_that_something_befell_explains_those_that_failed_for_want_of_it() -> None:
    told = state(ended(0, 1, ago=20), ended(1, 137, "OOMKilled", ago=19), ended(2, 1, ago=30))
    assert told.reason is Reason.HOST_MEMORY and "j-1" in told.detail


def test_a_pod_that_failed_explains_those_that_were_deleted_after_it() -> None:
    """When a Job fails, its controller deletes the pods that still run."""
    told = state(ended(0, 143, deleted=1), ended(1, 3, ago=30), kind="job")
    assert told.reason is None and "j-1 on n1: exit code 3" in told.detail


def test_a_deleted_pod_whose_kubelet_forgot_how_it_ended_explains_nothing_and_blames_no_node() -> None:
    """Seen on 1.20: phase Failed, deleted, and no word of its container."""
    forgotten = pod(1, "Failed", deleted=-50)
    told = state(ended(0, 75), forgotten)
    assert (told.status, told.reason, told.bad_nodes) == (Status.STOPPED, Reason.PREEMPTED, ())
    assert state(works(0), pod(1, "Failed", deleted=5)).status is Status.RUNNING, "its peer is about to stop as well"
    alone = state(forgotten, count=1)
    assert (alone.reason, alone.bad_nodes) == (Reason.NODE, ()) and "was deleted" in alone.detail


@pytest.mark.parametrize("code", [1, 75, 143])
def test_a_pod_that_somebody_deleted_is_named_before_the_peers_that_ended_for_want_of_it(code: int) -> None:
    told = state(ended(0, code, ago=5), ended(1, 143, ago=4, deleted=-50, grace=60))
    assert told.detail.startswith("pod j-1 on n1: was deleted") and "; pod j-0 on n0: " in told.detail
    assert told.reason in (Reason.NODE, Reason.PREEMPTED)
    stopped = state(ended(0, 75, ago=5), ended(1, 75, ago=4, deleted=-50, grace=60))
    assert (stopped.status, stopped.reason) == (Status.STOPPED, Reason.PREEMPTED)
    assert stopped.detail.startswith("pod j-1 on n1: was deleted, and stopped after a checkpoint; pod j-0")


def test_a_pod_that_somebody_deleted_is_told_apart_from_those_that_its_controller_deleted() -> None:
    forced = ended(0, 143, deleted=-50, grace=60), ended(1, 143, deleted=-50, grace=60)
    controller = event("SuccessfulDelete", "Deleted pod: j-0", "uid-w")
    assert state(*forced, kind="job", events=(controller,)).detail.startswith("pod j-1 on n1: was deleted")


def test_of_equals_the_first_to_end_is_named() -> None:
    assert "j-1" in state(ended(0, 1, ago=5), ended(1, 1, ago=9)).detail


def test_a_failure_outweighs_an_orderly_stop() -> None:
    told = state(ended(0, 75, ago=9), ended(1, 1, ago=5))
    assert (told.status, told.reason) == (Status.FAILED, None)


def test_running_peers_get_a_moment_to_say_what_they_know() -> None:
    told = state(ended(0, 1, ago=SETTLE - 1), works(1))
    assert told.status is Status.RUNNING and "failing, waiting for the other pods: pod j-0" in told.detail
    assert state(ended(0, 1, ago=SETTLE + 1), works(1)).status is Status.FAILED


def test_a_pod_that_cannot_start_fails_the_gang_at_once() -> None:
    assert state(works(0), waits(1, "InvalidImageName", "bad")).reason is Reason.CANNOT_START


def test_peers_that_are_gone_are_not_waited_for() -> None:
    assert state(ended(0, 1), works(1), gone=frozenset({"uid-1"})).status is Status.FAILED


@pytest.mark.parametrize(
    ("known", "words"),
    [
        ({"root": None}, "its objects were deleted from the namespace by somebody else"),
        ({"count": 2}, "1 of its 2 pods were deleted by somebody else"),
        ({"kind": "job", "workload": None}, "its Job was deleted by somebody else"),
        ({"gone": frozenset({"uid-0"})}, "pod j-0 on n0: was deleted"),
    ],
)
def test_what_somebody_else_deleted_is_a_fault_of_the_place(known: dict[str, Any], words: str) -> None:
    told = state(works(0), **known)
    assert (told.status, told.reason) == (Status.FAILED, Reason.NODE) and words in told.detail


def test_a_lost_pod_counts_only_after_its_node_had_time_to_confirm() -> None:
    assert state(works(0, deleted=-10)).status is Status.RUNNING
    assert state(works(0, deleted=29)).status is Status.RUNNING


# -- workloads --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("job", {"conditions": [condition("SuccessCriteriaMet"), condition("Complete", "CompletionsReached")]}),
        ("job", {"conditions": [condition("Complete")]}),
        ("jobset", {"conditions": [condition("Completed", "AllJobsCompleted")]}),
        ("trainjob", {"conditions": [condition("Complete", "JobsCompleted")]}),
        ("volcano", {"state": {"phase": "Completed"}}),
    ],
)
def test_a_complete_workload_is_done_also_when_its_pods_are_gone(kind: str, status: dict[str, Any]) -> None:
    assert state(count=2, kind=kind, workload=workload(**status)).status is Status.DONE


@pytest.mark.parametrize(
    ("kind", "status", "reason", "words"),
    [
        ("job", {"conditions": [condition("FailureTarget"), condition("Failed", "BackoffLimitExceeded", "Job has reached the limit")]}, None, "BackoffLimitExceeded: Job"),
        ("job", {"conditions": [condition("Failed", "DeadlineExceeded", "longer than specified deadline")]}, Reason.TIME_LIMIT, "DeadlineExceeded"),
        ("jobset", {"conditions": [condition("Failed", "FailedJobs", "jobset failed")]}, None, "JobSet failed: FailedJobs: jobset failed"),
        ("trainjob", {"conditions": [condition("Failed", "JobsFailed")]}, None, "TrainJob failed: JobsFailed"),
        ("volcano", {"state": {"phase": "Terminated", "reason": "PodFailed"}}, None, "Job failed: PodFailed"),
        ("volcano", {"state": {"phase": "Aborted"}}, None, "Job failed"),
    ],
)  # fmt: skip
def test_a_failed_workload_has_failed_and_its_pods_say_more_if_they_are_there(
    kind: str, status: dict[str, Any], reason: Reason | None, words: str
) -> None:
    failed = workload(**status)
    told = state(count=2, kind=kind, workload=failed)
    assert (told.status, told.reason) == (Status.FAILED, reason) and words in told.detail
    with_pods = state(ended(0, 137, "OOMKilled"), ended(1, 1), kind=kind, workload=failed)
    assert with_pods.reason is (reason or Reason.HOST_MEMORY)


def test_a_condition_that_is_not_true_says_nothing() -> None:
    assert state(works(0), kind="job", workload=workload(conditions=[{"type": "Failed", "status": "False"}])).status is Status.RUNNING


def test_pods_that_are_forbidden_stay_forbidden() -> None:
    told = state(count=2, kind="job", events=(event("FailedCreate", SECURITY, "uid-w"),))
    assert (told.status, told.reason) == (Status.FAILED, Reason.CANNOT_START) and "violates PodSecurity" in told.detail
    assert told.detail.endswith("; set cluster.restricted=true and a non-zero cluster.user, or relax the standard")


def test_another_trouble_of_the_controller_is_waited_for_as_long_as_a_fault() -> None:
    trouble = event("FailedCreate", "Error creating: Timeout: request did not complete", "uid-w")
    young = workload() | {"metadata": {"name": "j", "uid": "uid-w", "creationTimestamp": at(10)}}
    assert state(count=1, kind="job", workload=young, events=(trouble,)).status is Status.SUBMITTED
    assert state(count=1, kind="job", events=(trouble,)).reason is Reason.CANNOT_START


def test_refusals_of_before_the_pods_were_created_are_history() -> None:
    assert state(works(0), kind="job", events=(event("FailedCreate", SECURITY, "uid-w"),)).status is Status.RUNNING
