"""A real API server, scheduler and controllers, with nodes that are played: every way to fail, many trials, and broken servers."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.backends.contract import BackendError
from launcher.backends.kubernetes import backend, causes, manifests, states, submission, workloads
from launcher.backends.kubernetes.manifests import object_name
from launcher.backends.kubernetes.volumes import VolumeConfig
from tests.clusters.kubernetes.control_plane import CURRENT
from tests.clusters.kubernetes.stage import RESULT, Gang, Stage
from tests.clusters.slurm.process import wait_for
from trainer.shared.records.outcome import Reason, Status
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.files import read_json

# -- the life of a gang ----------------------------------------------------------------------------------------------------------


def test_a_result_comes_home_and_nothing_stays_in_the_namespace(stage: Stage) -> None:
    gang = stage.submit()
    assert gang.end().status is Status.DONE
    gang.backend.collect(gang.job, gang.handle)
    assert read_json(gang.job.directory / "result.json") == RESULT
    assert list(gang.backend.logs(gang.job, gang.handle)) == ["[0] step 1", "[1] step 1"]
    wait_for(lambda: not stage.left(), "the namespace to be empty")
    assert gang.backend.poll([gang.handle])[0].status is Status.DONE, "also when only the result tells"


@pytest.mark.parametrize(
    ("keep", "code", "stays"), [("all", "0", True), ("failed", "3", True), ("failed", "0", False), ("nothing", "3", False)]
)
def test_what_is_configured_to_stay_stays(stage: Stage, keep: str, code: str, stays: bool) -> None:
    gang = stage.submit({"exit": code}, keep=keep)
    gang.end()
    gang.backend.collect(gang.job, gang.handle)
    if stays:
        assert len(stage.left()) == 4
    else:
        wait_for(lambda: not stage.left(), "the namespace to be empty")


def test_cancelling_removes_everything(stage: Stage) -> None:
    gang = stage.submit({"run": "-1", "log": "[{index}] step 1"}).running()
    reading = gang.backend._followers.values()  # a played pod that is deleted takes along what nobody has read
    wait_for(lambda: len(reading) == 2 and all(one._unpacker and one._unpacker.told.lines for one in reading), "both logs to be read")
    gang.backend.cancel([gang.handle])
    state = gang.end()
    assert state.status is Status.FAILED and "somebody else" not in state.detail
    gang.backend.collect(gang.job, gang.handle)
    wait_for(lambda: not stage.left(), "the namespace to be empty")
    assert "[0] step 1" in list(gang.backend.logs(gang.job, gang.handle)), "and its log is kept"
    elsewhere = stage.backend(dataclasses.replace(gang.job.cluster, kubeconfig="/no/such/file"))  # type: ignore[type-var]
    assert "[0] step 1" in list(elsewhere.logs(gang.job, gang.handle)), "also where the cluster cannot be reached"


def test_what_a_killed_launcher_created_in_part_is_not_found_and_is_completed(stage: Stage) -> None:
    gang = stage.submit({"run": "-1"}).running()
    stage.kubernetes.core().delete_namespaced_pod(gang.pod(1), stage.namespace, grace_period_seconds=0)
    other = stage.backend(gang.job.cluster)  # type: ignore[arg-type]
    wait_for(lambda: not other.find([gang.job]), "the loss to be seen")
    assert other.submit([other.render(gang.job)]) == [gang.handle]
    assert other.find([gang.job]) == {gang.job.name: gang.handle}
    assert len(stage.left(("pod",))) == 2 and len(stage.left(("service",))) == 1


def test_two_people_in_one_namespace_each_measure_the_same_trial(stage: Stage, tmp_path: Path) -> None:
    gang = stage.submit({"run": "-1"}).running()
    elsewhere = dataclasses.replace(gang.job, directory=tmp_path / "elsewhere" / gang.job.trial)
    other = stage.backend(gang.job.cluster)  # type: ignore[arg-type]
    assert other.find([elsewhere]) == {}
    (handle,) = other.submit([other.render(elsewhere)])
    Gang(stage, other, elsewhere, handle).running()
    other.cancel([handle])
    wait_for(lambda: len(stage.left(("pod",))) == 2, "only the pods of one to be left")
    assert gang.running()


def test_what_is_not_ours_and_has_our_name_is_left_alone(stage: Stage) -> None:
    job, backend = stage.job(), stage.backend()
    theirs = {"metadata": {"name": object_name(job)}, "spec": {"clusterIP": "None", "ports": [{"port": 1}]}}
    stage.kubernetes.core().create_namespaced_service(stage.namespace, theirs)
    (handle,) = backend.submit([backend.render(job)])
    state = backend.poll([handle])[0]
    assert (state.status, state.reason) == (Status.FAILED, Reason.CONFIGURATION)
    assert "made for something other than Trireme" in state.detail and "use another cluster.namespace" in state.detail
    assert backend.find([job]) == {} and len(stage.left()) == 1


def test_a_job_that_was_submitted_under_its_former_name_is_found_and_brought_home(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (manifests, workloads, submission, backend):
        monkeypatch.setattr(module, "object_name", lambda job: job.name)
    gang = stage.submit({"run": "1"}).running()
    monkeypatch.undo()
    now = stage.backend(gang.job.cluster)  # type: ignore[arg-type]
    assert now.find([gang.job]) == {gang.job.name: gang.handle} and gang.handle["name"] == gang.job.name
    assert Gang(stage, now, gang.job, gang.handle).end().status is Status.DONE
    now.collect(gang.job, gang.handle)
    assert read_json(gang.job.directory / "result.json") == RESULT
    wait_for(lambda: not stage.left(), "the namespace to be empty")


def test_a_later_attempt_starts_only_when_nothing_of_an_earlier_one_runs(stage: Stage) -> None:
    gang = stage.submit({"run": "-1"}, keep="all").running()
    later = dataclasses.replace(gang.job, attempt=1)
    gang.backend.submit([gang.backend.render(later)])
    pods = stage.kubernetes.core().list_namespaced_pod(stage.namespace).items
    assert {pod.metadata.labels["trireme/attempt"] for pod in pods} == {"1"}


def test_what_an_earlier_run_left_of_the_same_name_is_waited_for(stage: Stage) -> None:
    gang = stage.submit({"run": "-1"}).running()
    gang.backend.cancel([gang.handle])
    (handle,) = gang.backend.submit([gang.backend.render(gang.job)])  # its pods may still be ending
    assert handle == gang.handle and gang.running()


def test_the_queue_is_told_apart_from_the_run(stage: Stage) -> None:
    before = int(time.time())  # the cluster tells whole seconds
    gang = stage.submit({"run": "-1"})
    began = gang.until(lambda state: state.status is Status.RUNNING).started
    assert began is not None and before <= began <= time.time() and gang.backend.poll([gang.handle])[0].nodes[0].startswith("played-")


# -- ways to fail ------------------------------------------------------------------------------------------------------------------

PLAYED = {
    "exit code": ({"exit": "0=3,1=0"}, {}, None, "exit code 3"),
    "wrong configuration": ({"exit": "2"}, {}, Reason.CONFIGURATION, "exit code 2"),
    "memory": ({"exit": "0=0,1=137", "reason": "1=OOMKilled"}, {}, Reason.HOST_MEMORY, "OOMKilled (exit code 137)"),
    "evicted": ({"evict": "The node was low on resource: ephemeral-storage."}, {}, Reason.NODE, "Evicted: The node was low on"),
    "image": (
        {"waiting": "1=ImagePullBackOff"},
        {"fault_timeout": 1.0},
        Reason.CANNOT_START,
        "ImagePullBackOff: ImagePullBackOff, as played",
    ),
    "image name": ({"waiting": "InvalidImageName"}, {}, Reason.CANNOT_START, "correct cluster.container.image"),
}


@pytest.mark.parametrize("name", PLAYED)
def test_each_way_a_pod_fails_is_told_and_cleaned_up(stage: Stage, name: str) -> None:
    annotations, settings, reason, words = PLAYED[name]
    gang = stage.submit(annotations, **settings)
    state = gang.end()
    assert (state.status, state.reason) == (Status.FAILED, reason) and words in state.detail
    gang.backend.collect(gang.job, gang.handle)
    wait_for(lambda: not stage.left(), "the namespace to be empty")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"gpus_per_node": 9}, "Insufficient nvidia.com/gpu"),
        ({"node_selector": {"gpu": "none-such"}}, "didn't match Pod's node affinity"),
        ({"volumes": [{"mount": "/x", "claim": "nope"}]}, 'persistentvolumeclaim "nope" not found'),
    ],
)
def test_a_gang_that_cannot_be_placed_waits_and_says_why(stage: Stage, settings: dict[str, Any], words: str) -> None:
    volumes = [VolumeConfig(**volume) for volume in settings.pop("volumes", [])]
    gang = stage.submit({"run": "-1"}, volumes=volumes, **settings)
    assert gang.until(lambda state: words in state.detail).status is Status.SUBMITTED


def test_a_gang_that_is_placed_in_part_says_how_many_of_its_pods_run(quiet: None, stage: Stage) -> None:
    gang = stage.submit({"run": "-1"}, nodes=6, gpus_per_node=8)
    assert gang.until(lambda state: "4 of 6 pods run; Unschedulable: " in state.detail).status is Status.SUBMITTED


def test_a_pod_that_is_preempted_is_worth_another_attempt(quiet: None, stage: Stage) -> None:
    scheduling = stage.kubernetes.api("SchedulingV1Api")
    for name, value in ((f"{stage.namespace}-low", 1), (f"{stage.namespace}-high", 1000)):
        scheduling.create_priority_class({"metadata": {"name": name}, "value": value})
        wait_for(lambda name=name: _admitted(stage, priorityClassName=name), f"priority class {name} to be known")  # type: ignore[misc]
    rack = {"node_selector": {"kubernetes.io/hostname": "played-0"}, "nodes": 1, "gpus_per_node": 8}
    gang = stage.submit({"run": "-1"}, priority_class=f"{stage.namespace}-low", **rack).running()
    stage.submit({"run": "-1"}, priority_class=f"{stage.namespace}-high", **rack).running()
    state = gang.end()
    assert (state.status, state.reason) == (Status.FAILED, Reason.PREEMPTED)
    assert ("PreemptionByScheduler" if CURRENT else "Preempted by") in state.detail


def _admitted(stage: Stage, **spec: Any) -> bool:
    """Whether the server would take a pod of that ``spec``: admission sees what was created a moment later."""
    from kubernetes.client.exceptions import ApiException

    pod = {
        "metadata": {"name": "probe"},
        "spec": {"containers": [{"name": "node", "image": "played:1"}], "automountServiceAccountToken": False, **spec},
    }
    try:
        stage.kubernetes.core().create_namespaced_pod(stage.namespace, pod, dry_run="All")
    except ApiException:
        return False
    return True


def test_a_pod_that_is_drained_or_deleted_is_worth_another_attempt(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "SETTLE", 1.0)  # the played peer does not notice
    gang = stage.submit({"run": "-1"}).running()
    body = {"apiVersion": "policy/v1" if CURRENT else "policy/v1beta1", "kind": "Eviction", "metadata": {"name": gang.pod(1)}}
    api = stage.kubernetes.core().api_client
    path = f"/api/v1/namespaces/{stage.namespace}/pods/{gang.pod(1)}/eviction"
    _, url, headers, content, _ = api.param_serialize("POST", path, body=body, auth_settings=["BearerToken"])
    assert api.call_api("POST", url, {**headers, "Content-Type": "application/json"}, content).status == 201
    state = gang.end()
    reason = Reason.PREEMPTED if CURRENT else Reason.NODE  # current releases say of a drained pod that it was
    assert (state.status, state.reason, state.bad_nodes) == (Status.FAILED, reason, ()) and (CURRENT or "was deleted" in state.detail)


def test_the_loss_of_a_node_fails_the_gang_and_names_the_node(quiet: None, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(causes, "_CONFIRMATION", 1.0)  # of the half minute that a real node gets
    core, node = stage.kubernetes.core(), {"node_selector": {"kubernetes.io/hostname": "played-3"}, "spread": False}
    gang = stage.submit({"run": "-1"}, unreachable_seconds=1, **node).running()
    core.patch_node("played-3", {"metadata": {"annotations": {"played/silent": "true"}}})
    gang.until(lambda state: "does not answer" in state.detail)
    state = gang.end()
    assert (state.status, state.reason, state.bad_nodes) == (Status.FAILED, Reason.NODE, ("played-3",))
    gang.backend._submission._end_seconds = 1.0
    gang.backend.collect(gang.job, gang.handle)
    wait_for(lambda: not stage.left(), "the pods of a node that never confirms to be struck off the books")
    core.patch_node("played-3", {"metadata": {"annotations": {"played/silent": None}}})


# -- what the server refuses -----------------------------------------------------------------------------------------------------


def test_pods_over_quota_wait_as_a_whole_and_start_when_there_is_room(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.backends.kubernetes.backend._QUOTA_SECONDS", 0.5)
    core = stage.kubernetes.core()
    core.create_namespaced_resource_quota(stage.namespace, {"metadata": {"name": "rq"}, "spec": {"hard": {"pods": "1"}}})
    wait_for(lambda: core.read_namespaced_resource_quota("rq", stage.namespace).status.hard, "the quota to count")
    gang = stage.submit({"run": "-1"})
    state = gang.backend.poll([gang.handle])[0]
    assert state.status is Status.SUBMITTED and "the namespace's quota is used up" in state.detail and "requested: pods=1" in state.detail
    wait_for(lambda: not stage.left(("pod",)), "the pod that was within the quota to be taken back")
    core.patch_namespaced_resource_quota("rq", stage.namespace, {"spec": {"hard": {"pods": "9"}}})
    gang.running()


@pytest.mark.parametrize(
    ("container", "words"),
    [
        ({"resources": {"limits": {"memory": "2Gi"}}}, "limit range forbids the pods"),
        ({"resources": {"limits": {"cpu": "1x"}}}, "quantities must match the regular expression"),
        ({"resources": {"limits": {"nvidia.com/gpu": "0.5"}}}, "must be an integer"),
        ({"name": "node", "image": ""}, "spec.containers[0].image: Required value"),
    ],
)
def test_what_the_server_refuses_is_a_failed_trial_with_a_plain_reason_and_nothing_stays(
    stage: Stage, container: dict[str, Any], words: str
) -> None:
    limits = {"limits": [{"type": "Container", "max": {"memory": "1Gi"}}]}
    stage.kubernetes.core().create_namespaced_limit_range(stage.namespace, {"metadata": {"name": "lr"}, "spec": limits})
    patch = {"Pod": {"spec": {"containers": [{"name": "node", **container}]}}}
    gang = stage.submit(patch=patch)
    state = gang.backend.poll([gang.handle])[0]
    assert (state.status, state.reason) == (Status.FAILED, Reason.CANNOT_START) and words in state.detail
    wait_for(lambda: not stage.left(), "what was created to be taken back")
    with pytest.raises(ConfigError, match="cannot submit Pod trireme-"):
        gang.backend.validate(gang.backend.render(gang.job))
    gang.backend.cancel([gang.handle])
    gang.backend.collect(gang.job, gang.handle)


def test_the_server_answers_for_every_object_of_a_request_and_stores_none(stage: Stage) -> None:
    backend = stage.backend()
    request = backend.render(stage.job())
    server, *answers = backend.validate(request).splitlines()
    kinds = [manifest["kind"] for manifest in yaml.safe_load_all(request.text)]
    assert server.startswith("https://") and [line.split()[0] for line in answers] == kinds
    assert all(line.endswith(": accepted (server dry run)") for line in answers)
    assert not stage.left()


def test_a_namespace_that_is_not_there_or_going_is_said_beforehand(stage: Stage) -> None:
    """To whom may know: a role inside a namespace says nothing of it when the namespace is gone."""
    anywhere = dataclasses.replace(stage.cluster(), kubeconfig=str(stage.kubernetes.kubeconfig))
    missing = dataclasses.replace(anywhere, namespace="no-such")
    with pytest.raises(ConfigError, match=r"namespace no-such does not exist; create it with 'kubectl create namespace no-such'"):
        stage.backend(missing).check()
    core = stage.kubernetes.core()
    with stage.kubernetes.namespace(remove=True) as going:
        held = {"metadata": {"name": "held", "finalizers": ["test/held"]}}
        core.create_namespaced_config_map(going, held)
    with pytest.raises(ConfigError, match=f"namespace {going} is being deleted; wait until it is gone"):
        stage.backend(dataclasses.replace(anywhere, namespace=going)).check()
    core.patch_namespaced_config_map("held", going, {"metadata": {"finalizers": None}})


def test_an_indexed_job_is_refused_by_a_server_that_would_forget_its_index(forgetful: None, stage: Stage) -> None:
    cluster = stage.cluster(workload="job")
    words = "is too old for cluster.workload=job: of the Job it drops spec.completionMode silently; use cluster.workload=pods"
    with pytest.raises(ConfigError, match=words):
        stage.backend(cluster).check()
    gang = stage.submit(workload="job")
    state = gang.backend.poll([gang.handle])[0]
    assert (state.status, state.reason) == (Status.FAILED, Reason.CONFIGURATION) and words in state.detail
    batch = stage.kubernetes.api("BatchV1Api")
    wait_for(lambda: not stage.left() and not batch.list_namespaced_job(stage.namespace).items, "the namespace to be empty")


def test_a_cluster_that_cannot_be_reached_is_said_in_one_sentence(stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.backends.kubernetes.backend._QUICK", 0.5)
    kubeconfig = stage.kubernetes.kubeconfig.read_text()
    for old, new, words in (
        ("https://127.0.0.1:", "https://127.0.0.1:1", "does not answer"),
        ("token: ", "token: x", "does not accept the credentials; log in again"),
        ("current-context: test", "current-context: other", "no Kubernetes cluster can be reached with kubeconfig"),
    ):
        path = tmp_path / "kubeconfig"
        path.write_text(kubeconfig.replace(old, new) if "127" not in old else _other_port(kubeconfig))
        with pytest.raises(ConfigError, match=words) as refused:
            stage.backend(dataclasses.replace(stage.cluster(), kubeconfig=str(path))).check()
        assert "\n" not in str(refused.value)
    with pytest.raises(ConfigError, match=r"kubeconfig .*nowhere.*; set cluster\.kubeconfig and cluster\.context"):
        stage.backend(dataclasses.replace(stage.cluster(), kubeconfig=str(tmp_path / "nowhere"))).check()


def test_a_server_that_has_never_answered_is_no_reason_to_wait_for_ever(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.backends.kubernetes.watch._FIRST", 0.5)
    path = tmp_path / "kubeconfig"
    path.write_text(_other_port(stage.kubernetes.kubeconfig.read_text()))
    backend = stage.backend(dataclasses.replace(stage.cluster(), kubeconfig=str(path)))
    handle = {"namespace": stage.namespace, "name": "trireme-000000000000-0", "pods": 1, "attempt": 0, "directory": str(tmp_path)}
    with pytest.raises(BackendError, match="does not answer; submitted jobs continue"):
        backend.poll([handle])


def test_what_the_server_warns_of_is_said_once(forgetful: None, stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    backend = stage.backend(dataclasses.replace(stage.cluster(), kubeconfig=str(stage.kubernetes.kubeconfig)))
    for _ in range(2):
        backend._client.request("GET", "apis/apiextensions.k8s.io/v1beta1/customresourcedefinitions")
    said = capsys.readouterr().err
    assert said.count("the Kubernetes API server warns: apiextensions.k8s.io/v1beta1 CustomResourceDefinition is deprecated") == 1


def _other_port(kubeconfig: str) -> str:
    head, _, rest = kubeconfig.partition("https://127.0.0.1:")
    return head + "https://127.0.0.1:1\n" + rest.partition("\n")[2]
