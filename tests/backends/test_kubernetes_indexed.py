"""Indexed Jobs from end to end. Where the server has them, the real ones; where it is too old, its Job controller is played."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.backends import backend_for
from launcher.backends.kubernetes.manifests import object_name
from launcher.backends.kubernetes.workloads import KINDS
from launcher.trials.job import Job
from tests.backends.conformance import LONG, Ground, closing
from tests.clusters.kubernetes.fixture import Kubernetes
from tests.clusters.kubernetes.indexed import GROUP, IndexedJobs, kind
from tests.clusters.kubernetes.stage import RESULT, Stage
from tests.clusters.slurm.process import wait_for
from trainer.shared.records.outcome import Reason, Status
from trainer.shared.run.files import read_json

# One process runs them all, also those that want the cluster alone: the played controller is one for the whole cluster.
pytestmark = pytest.mark.xdist_group("test_kubernetes_indexed.py")


@pytest.fixture(scope="module")
def indexed(kubernetes: Kubernetes) -> Iterator[Kubernetes]:
    """A Kubernetes on which ``cluster.workload=job`` works."""
    if kubernetes.indexes:
        yield kubernetes
        return
    jobs = IndexedJobs(kubernetes.kubeconfig)
    jobs.start()
    kubernetes.groups.append(GROUP)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(KINDS, "job", kind())
        yield kubernetes
    kubernetes.groups.remove(GROUP)
    jobs.close()


@pytest.fixture
def stage(indexed: Kubernetes, played_nodes: Kubernetes, namespace: str, tmp_path: Path) -> Iterator[Stage]:
    made = Stage(indexed, namespace, tmp_path)
    yield made
    for backend in made.opened:
        backend.close()


@pytest.fixture(scope="module")
def ground(indexed: Kubernetes, real_node: Kubernetes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    with indexed.namespace() as namespace:
        cluster = indexed.cluster(namespace, workload="job", nodes=2, gpus_per_node=1)
        yield from closing(Ground(lambda: backend_for(cluster), cluster, tmp_path_factory.mktemp("trials")))


def place(stage: Stage) -> tuple[str, str, str, str]:
    """Where Jobs are: group, version, namespace and plural."""
    group, version = KINDS["job"].api.split("/")
    return group, version, stage.namespace, "jobs"


def left(kubernetes: Kubernetes, namespace: str, job: Job) -> list[str]:
    core = kubernetes.core()
    lists = [core.list_namespaced_pod(namespace).items, core.list_namespaced_service(namespace).items]
    return [item.metadata.name for items in lists for item in items if item.metadata.name.startswith(object_name(job))]


# -- pods that really run -------------------------------------------------------------------------------------------------------


def test_ranks_know_themselves_by_their_completion_index_and_find_rank_0_by_its_hostname(ground: Ground, indexed: Kubernetes) -> None:
    job = ground.job()
    (handle,) = ground.submit(job)
    assert ground.backend.submit([ground.backend.render(job)]) == [handle], "adopted, not started twice"
    state = ground.end(job, handle)
    assert (state.status, len(state.nodes)) == (Status.DONE, 2), state
    result = read_json(job.directory / "result.json") or {}
    assert sorted(result["hosts"]) == [f"{handle['name']}-0", f"{handle['name']}-1"]
    assert "step 3" in job.log_path(0).read_text() and job.log_path(1).exists()
    wait_for(lambda: not left(indexed, handle["namespace"], job), "nothing to be left")


@pytest.mark.campaign("kubernetes")
def test_a_gang_of_a_job_that_is_cancelled_ends_whole_and_is_removed_whole(ground: Ground, indexed: Kubernetes) -> None:
    job = ground.job(LONG)
    (handle,) = ground.submit(job)
    ground.running(job, handle)
    assert ground.backend.find([job]) == {job.name: handle}
    ground.backend.cancel([handle])
    assert ground.end(job, handle).status is not Status.DONE
    wait_for(lambda: not left(indexed, handle["namespace"], job), "nothing to be left")
    assert "step 1" in job.log_path(0).read_text(), "its logs are kept"


# -- played pods ------------------------------------------------------------------------------------------------------------------


def test_a_job_completes_comes_home_and_leaves_nothing(stage: Stage) -> None:
    gang = stage.submit(workload="job")
    assert gang.end().status is Status.DONE
    gang.backend.collect(gang.job, gang.handle)
    assert read_json(gang.job.directory / "result.json") == RESULT
    wait_for(lambda: not stage.left(), "the namespace to be empty")


def test_one_failed_pod_ends_the_gang_and_is_named_though_the_controller_deletes_the_others(stage: Stage) -> None:
    gang = stage.submit({"exit": "1=137", "reason": "1=OOMKilled", "run": "0=-1,1=1"}, workload="job")
    state = gang.end()
    assert (state.status, state.reason) == (Status.FAILED, Reason.HOST_MEMORY) and f"{gang.pod(1)}-" in state.detail
    gang.backend.collect(gang.job, gang.handle)
    wait_for(lambda: not stage.left(), "the namespace to be empty")


def test_a_pod_that_is_deleted_is_not_made_again_alone(stage: Stage) -> None:
    gang = stage.submit({"run": "-1"}, workload="job").running()
    core = stage.kubernetes.core()
    before = {pod.metadata.uid for pod in core.list_namespaced_pod(stage.namespace).items}
    (victim,) = [pod.metadata.name for pod in core.list_namespaced_pod(stage.namespace).items if pod.spec.hostname.endswith("-1")]
    core.delete_namespaced_pod(victim, stage.namespace)
    state = gang.end()
    assert (state.status, state.reason) == (Status.FAILED, Reason.NODE) and f"pod {victim} on" in state.detail
    assert {pod.metadata.uid for pod in core.list_namespaced_pod(stage.namespace).items} <= before
    gang.backend.collect(gang.job, gang.handle)
    wait_for(lambda: not stage.left(), "the namespace to be empty")


def test_what_the_cluster_removes_by_its_time_to_live_takes_the_rest_of_the_trial_with_it(stage: Stage) -> None:
    gang = stage.submit(workload="job")
    gang.end()
    customs = stage.kubernetes.api("CustomObjectsApi")
    customs.delete_namespaced_custom_object(*place(stage), gang.handle["name"], propagation_policy="Background")
    wait_for(lambda: not stage.left(), "Service, ConfigMap and pods to go as well")


def test_a_queued_job_waits_suspended_starts_when_admitted_and_survives_another_suspension(stage: Stage) -> None:
    gang = stage.submit({"run": "-1"}, workload="job", queue="trials")
    state = gang.until(lambda state: "suspended" in state.detail.lower())
    assert (state.status, stage.left(("pod",))) == (Status.SUBMITTED, [])
    customs = stage.kubernetes.api("CustomObjectsApi")

    def suspend(value: bool) -> None:
        customs.patch_namespaced_custom_object(*place(stage), gang.handle["name"], {"spec": {"suspend": value}})

    suspend(False)
    gang.running()
    suspend(True)
    gang.until(lambda state: state.status is Status.SUBMITTED)
    wait_for(lambda: not stage.left(("pod",)), "its pods to end")
    suspend(False)
    gang.running()
    gang.backend.cancel([gang.handle])
    gang.end()
    gang.backend.collect(gang.job, gang.handle)
    wait_for(lambda: not stage.left(), "the namespace to be empty")


def test_an_older_attempt_that_a_queue_might_still_admit_is_removed_before_a_later_one_starts(stage: Stage) -> None:
    gang = stage.submit(workload="job", queue="trials")
    gang.until(lambda state: "suspended" in state.detail.lower())
    later = dataclasses.replace(gang.job, attempt=1)
    gang.backend.submit([gang.backend.render(later)])
    wait_for(lambda: gang.backend.find([gang.job, later]).keys() == {later.name}, "the older attempt to be gone")


def test_a_job_whose_pods_find_no_room_waits_and_says_so(quiet: None, stage: Stage) -> None:
    gang = stage.submit({"run": "-1"}, workload="job", nodes=6, gpus_per_node=8)
    assert gang.until(lambda state: "Insufficient nvidia.com/gpu" in state.detail).status is Status.SUBMITTED
