"""Whole sweeps on a real API server with played pods: many trials, servers and launchers that die, rights, and other workloads."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.backends.contract import BackendError
from launcher.backends.kubernetes import backend, client
from launcher.backends.kubernetes.client import PATIENCE
from launcher.backends.kubernetes.cluster import KubernetesCluster
from launcher.backends.kubernetes.errors import ApiError
from launcher.backends.kubernetes.watch import Mirror
from launcher.backends.kubernetes.workloads import KINDS
from launcher.backends.pool import Backends
from launcher.cli.main import main
from launcher.config.rules import resolve
from launcher.config.schema import Config, SweepConfig
from launcher.sweep.reconcile import FORGOTTEN, catch_up, stop
from launcher.sweep.run import run_sweep
from launcher.trials.store import Point, Record, Store
from tests.clusters.kubernetes.control_plane import ControlPlane
from tests.clusters.kubernetes.fixture import PROJECT, Kubernetes, shipped
from tests.clusters.kubernetes.stage import RESULT, Stage
from tests.clusters.slurm.process import wait_for
from tests.processes import launcher
from trainer.shared.records.outcome import Status
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.files import read_json
from trainer.shared.run.schema import DataConfig, LayoutConfig, ModelConfig, RunConfig

RBAC = PROJECT / "deploy" / "kubernetes" / "rbac.yaml"


def points(cluster: KubernetesCluster, count: int) -> list[Point]:
    """``count`` trials that differ in their seed."""
    model, data, layout = (
        ModelConfig(layers=1, hidden=16, heads=2, vocab=64, seq=8),
        DataConfig(kind="synthetic"),
        LayoutConfig(tensor=2, data=1),
    )
    configs = [Config(model, layout, data, run=RunConfig(steps=3, seed=seed, global_batch=2), cluster=cluster) for seed in range(count)]
    return [Point((f"run.seed={config.run.seed}",), resolve(config)) for config in configs]


def sweep(folder: Path, cluster: KubernetesCluster, count: int, max_parallel: int) -> list[Record]:
    with Backends() as backends:
        return run_sweep("many", points(cluster, count), SweepConfig(dir=str(folder), max_parallel=max_parallel), backends)


def finished(stage: Stage) -> int:
    return len(list(stage.folder.glob("trials/*/result.json")))


class Witness:
    """Watches a namespace from outside: how often each pod was created, and how many there were at once."""

    def __init__(self, kubernetes: Kubernetes, namespace: str):
        self.created: Counter[str] = Counter()
        self.most = 0
        self._core, self._namespace, self._end = kubernetes.core(), namespace, threading.Event()
        self._seen: set[str] = set()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        while not self._end.wait(0.1):
            try:
                pods = self._core.list_namespaced_pod(self._namespace).items
            except (ApiException, HTTPError, OSError):
                continue  # the API server is being killed in this test
            fresh = [pod for pod in pods if pod.metadata.uid not in self._seen]
            self.created.update(pod.metadata.name for pod in fresh)
            self._seen |= {pod.metadata.uid for pod in fresh}
            self.most = max(self.most, len({p.metadata.labels["trireme/job"] for p in pods if p.status.phase in ("Pending", "Running")}))

    def close(self) -> None:
        self._end.set()
        self._thread.join()


@pytest.mark.campaign("kubernetes")
def test_a_hundred_trials_run_once_each_and_no_more_at_once_than_is_set_also_when_the_api_server_dies(
    stage: Stage, control: ControlPlane
) -> None:
    """The server is killed twice: once while trials are being submitted, once while they end."""
    witness = Witness(stage.kubernetes, stage.namespace)
    cluster = stage.cluster(nodes=1, gpus_per_node=2)
    ended: list[Record] = []
    launcher = threading.Thread(target=lambda: ended.extend(sweep(stage.folder, cluster, 100, 40)), daemon=True)
    launcher.start()
    for count in (20, 60):
        wait_for(lambda count=count: finished(stage) >= count, f"{count} trials to end", 600)  # type: ignore[misc]
        control.api_server.kill()
        control.start_again()
    launcher.join(600)
    witness.close()
    assert Counter(record.status for record in ended) == {Status.DONE: 100}
    assert {record.attempt for record in ended} == {0}
    assert len(witness.created) <= 100 and set(witness.created.values()) == {1}
    assert witness.most <= 40
    wait_for(lambda: not stage.left(), "the namespace to be empty")


@pytest.mark.campaign("kubernetes")
def test_a_result_comes_home_though_the_server_dies_while_it_is_fetched(
    stage: Stage, control: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For longer than the ends of logs are waited for at a time."""
    gang, reached, dead = stage.submit(), threading.Event(), threading.Event()
    follow = gang.backend._follow
    wait_for(lambda: not _active(stage.kubernetes.core().list_namespaced_pod(stage.namespace).items), "the pods to end")
    monkeypatch.setattr(gang.backend, "_follow", lambda *what: (reached.set(), dead.wait(), follow(*what)))
    monkeypatch.setattr(backend, "_LOG_SECONDS", 0.5)
    refused: list[BackendError] = []

    def fetched() -> bool:
        try:
            gang.backend.collect(gang.job, gang.handle)
        except BackendError as error:
            refused.append(error)
            return False
        return True

    fetching = threading.Thread(target=fetched)
    fetching.start()
    reached.wait()
    control.api_server.kill()
    dead.set()
    fetching.join()
    control.start_again()
    assert "its log is not whole yet" in str(refused[0])
    wait_for(fetched, "the result to come home")
    assert read_json(gang.job.directory / "result.json") == RESULT


def _launcher(folder: Path, cluster: KubernetesCluster, count: int, max_parallel: int) -> None:
    sweep(folder, cluster, count, max_parallel)


@pytest.mark.parametrize(("count", "kills"), [(8, [2]), pytest.param(24, [2, 8], marks=pytest.mark.campaign("kubernetes"))], ids=str)
def test_a_sweep_whose_launcher_was_killed_is_taken_up_and_every_trial_runs_once(stage: Stage, count: int, kills: list[int]) -> None:
    witness = Witness(stage.kubernetes, stage.namespace)
    cluster = stage.cluster({"run": "1"})
    for ends in kills:
        process = launcher(_launcher, stage.folder, cluster, count, 4)
        wait_for(lambda ends=ends: finished(stage) >= ends, "some trials to end", 300)  # type: ignore[misc]
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
    records = sweep(stage.folder, cluster, count, 4)
    witness.close()
    assert Counter(record.status for record in records) == {Status.DONE: count}
    assert {record.attempt for record in records} == {0} and set(witness.created.values()) == {1}
    wait_for(lambda: not stage.left(), "the namespace to be empty")


def _hasty_launcher(folder: Path, cluster: KubernetesCluster, count: int) -> None:
    """One that gives a server that does not answer a tenth of a second once it has been told to end."""
    client._HURRIED_TIMEOUT = (0.1, 0.1)
    _launcher(folder, cluster, count, 0)


@pytest.mark.parametrize(
    ("how", "count"),
    [
        pytest.param(signal.SIGSTOP, 12, id="mute"),
        pytest.param(signal.SIGKILL, 40, id="dead", marks=pytest.mark.campaign("kubernetes")),
        pytest.param(signal.SIGSTOP, 40, id="mute while many are submitted", marks=pytest.mark.campaign("kubernetes")),
    ],
)
def test_ctrl_c_ends_a_launcher_that_submits_to_a_server_that_does_not_answer(
    stage: Stage, control: ControlPlane, how: signal.Signals, count: int
) -> None:
    """All trials go out together. It ends at once, not when its patience is at an end. The next launcher submits what was not, and nothing twice."""
    witness = Witness(stage.kubernetes, stage.namespace)
    cluster = stage.cluster({"run": "1"}, nodes=1, gpus_per_node=2)
    process = launcher(_hasty_launcher, stage.folder, cluster, count)
    wait_for(lambda: len(witness.created) > 2, "some trials to be submitted", 300)
    control.api_server.send(how)
    os.kill(process.pid or 0, signal.SIGINT)
    process.join(PATIENCE / 4)
    assert not process.is_alive(), "it waits for the server"
    if how == signal.SIGSTOP:
        control.api_server.send(signal.SIGCONT)
    control.start_again()
    assert finished(stage) < count
    records = sweep(stage.folder, cluster, count, 0)
    witness.close()
    assert Counter((record.status, record.attempt) for record in records) == {(Status.DONE, 0): count}
    assert set(witness.created.values()) == {1}
    wait_for(lambda: not stage.left(), "the namespace to be empty")


class Running:
    """A sweep that runs while the test breaks things."""

    def __init__(self, stage: Stage, count: int, max_parallel: int):
        self._ended: list[Record] = []
        cluster = stage.cluster({"run": "0.5"})
        self._thread = threading.Thread(target=lambda: self._ended.extend(sweep(stage.folder, cluster, count, max_parallel)), daemon=True)
        self._thread.start()

    def ended(self) -> list[Record]:
        """What it returned; nothing, if it broke off."""
        self._thread.join(600)
        assert not self._thread.is_alive(), "the sweep goes on"
        return self._ended


def test_a_sweep_waits_for_rights_that_it_had_and_that_are_gone_for_a_moment(stage: Stage, capfd: pytest.CaptureFixture[str]) -> None:
    """As after the restart of an API server, which serves before it knows the roles. Trials end while nothing may be read."""
    rights, core = stage.kubernetes.api("RbacAuthorizationV1Api"), stage.kubernetes.core()
    running = Running(stage, 8, 4)
    wait_for(lambda: finished(stage) >= 2, "some trials to end", 300)
    rights.delete_namespaced_role_binding("launcher", stage.namespace)
    wait_for(lambda: not _active(core.list_namespaced_pod(stage.namespace).items), "the pods under way to end")
    wait_for(lambda: re.search(r"cannot (get|list|watch|create|delete) resource", capfd.readouterr().err), "the launcher to be refused")
    rights.create_namespaced_role_binding(stage.namespace, shipped("rbac.yaml", stage.namespace)["RoleBinding/launcher"])
    records = running.ended()
    assert Counter((record.status, record.attempt) for record in records) == {(Status.DONE, 0): 8}
    wait_for(lambda: not stage.left(), "the namespace to be empty")


def test_a_launcher_whose_namespace_is_gone_ends_with_a_plain_line_and_its_trials_can_be_given_up(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its rights went with the namespace: every answer is a refusal, as after a restart of the server, and no better one will come. The
    server had been asked for rights before, and had granted them: a refusal of that question is an answer too."""
    submit, refusals = backend.KubernetesBackend.submit, list[str]()

    def asked_before(self: backend.KubernetesBackend, requests: Any) -> Any:
        refusals.append(self._brief.refused(self._kind.rights))
        return submit(self, requests)

    monkeypatch.setattr(backend.KubernetesBackend, "submit", asked_before)
    for module in (client, backend):
        monkeypatch.setattr(module, "REFUSED_SECONDS", 1.0)
    monkeypatch.setattr(client, "WATCH_SECONDS", 2)
    core = stage.kubernetes.core()

    def remove() -> None:
        wait_for(lambda: len(_active(core.list_namespaced_pod(stage.namespace).items)) == 4, "the pods to be there")
        core.delete_namespace(stage.namespace, grace_period_seconds=0)

    threading.Thread(target=remove, daemon=True).start()
    refused = (
        rf"in namespace {stage.namespace} you may not: get, list, |the API server does not accept the credentials"  # as its account goes
    )
    words = rf"refuses what it granted until .*: .*({refused}).* 'trireme cancel --forget SWEEP' gives up"
    with pytest.raises(ConfigError, match=words):
        sweep(stage.folder, stage.cluster({"run": "-1", "log": ""}), 2, 2)
    assert refusals[0] == "", "later: current servers take away pods first, and the launcher may start them again"
    assert {record.status for record in Store(stage.folder).sweep("many").records} <= {Status.SUBMITTED, Status.RUNNING}
    capsys.readouterr()
    assert main(["cancel", "--forget", "many", "--dir", str(stage.folder)]) == 0
    assert capsys.readouterr().out == "2 stopped, 0 had ended, 0 not answered yet\n"
    assert {record.detail for record in Store(stage.folder).sweep("many").records} == {FORGOTTEN}


def test_a_launcher_that_lost_its_rights_while_its_trials_wait_to_be_submitted_again_ends_with_a_plain_line(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a namespace goes and takes the pods first. No trial is under way: none is asked about, and only to submit and to look for what
    was submitted is refused."""
    submit, rights = backend.KubernetesBackend.submit, stage.kubernetes.api("RbacAuthorizationV1Api")

    def withdrawn_before(self: backend.KubernetesBackend, requests: Any) -> Any:
        if any(request.job.attempt for request in requests):
            rights.delete_namespaced_role_binding("launcher", stage.namespace)
        return submit(self, requests)

    monkeypatch.setattr(backend.KubernetesBackend, "submit", withdrawn_before)
    for module in (client, backend):
        monkeypatch.setattr(module, "REFUSED_SECONDS", 1.0)
    words = rf"refuses what it granted until .*: in namespace {stage.namespace} you may not: .* 'trireme cancel --forget SWEEP' gives up"
    with pytest.raises(ConfigError, match=words):
        sweep(stage.folder, stage.cluster({"evict": "The node was low on resource: ephemeral-storage.", "log": ""}), 1, 1)
    (record,) = Store(stage.folder).sweep("many").records
    assert (record.status, record.attempt) == (Status.SUBMITTED, 1)


@pytest.mark.campaign("kubernetes")
def test_a_sweep_waits_for_a_server_that_has_lost_its_database(
    stage: Stage, control: ControlPlane, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers 500, or nothing in time, whatever is asked: also at the last reading of a trial."""
    monkeypatch.setattr("launcher.backends.kubernetes.client._TIMEOUT", (5.0, 5.0))  # each question waits so long in vain
    running = Running(stage, 8, 4)
    wait_for(lambda: finished(stage) >= 2, "some trials to end", 300)
    control.database.kill()
    try:
        wait_for(lambda: "does not answer" in capfd.readouterr().err, "the launcher to meet an error")
    finally:
        control.start_again()
    records = running.ended()
    assert Counter((record.status, record.attempt) for record in records) == {(Status.DONE, 0): 8}
    wait_for(lambda: not stage.left(), "the namespace to be empty")


def _active(pods: list[Any]) -> list[Any]:
    return [pod for pod in pods if pod.status.phase in ("Pending", "Running")]


# -- rights -----------------------------------------------------------------------------------------------------------------------


def test_the_role_that_is_shipped_grants_what_the_launcher_needs_and_no_more() -> None:
    role = next(document for document in yaml.safe_load_all(RBAC.read_text()) if document["kind"] == "Role")
    granted = {
        (verb, group, name) for rule in role["rules"] for verb in rule["verbs"] for group in rule["apiGroups"] for name in rule["resources"]
    }
    assert granted == {permission for kind in KINDS.values() for permission in kind.rights}


def test_what_a_launcher_may_not_do_is_said_beforehand_and_the_shipped_role_is_enough(stage: Stage) -> None:
    stranger = str(stage.kubernetes.own.control.launcher)  # type: ignore[union-attr]
    cluster = dataclasses.replace(stage.cluster(), kubeconfig=stranger)
    with pytest.raises(ConfigError) as refused:
        stage.backend(cluster).check()
    assert "you may not: get, list, watch, create, delete services; get, create configmaps; " in str(refused.value)
    assert "get pods/log; list, watch events; have it granted: deploy/kubernetes/rbac.yaml" in str(refused.value)
    stage.backend().check()


def test_a_cluster_that_tells_nobody_its_version_runs_a_job_to_its_end(quiet: None, stage: Stage) -> None:
    """As hardened clusters do. The server is asked whether it is there at the start."""
    rights, names = stage.kubernetes.api("RbacAuthorizationV1Api"), ("system:discovery", "system:public-info-viewer")
    before = {name: rights.read_cluster_role_binding(name).subjects for name in names}
    told: Any = stage.backend()
    try:
        for name in names:
            rights.patch_cluster_role_binding(name, {"subjects": []})
        wait_for(lambda: _refused(told), "the version to be refused")
        told.check()
        gang = stage.submit()
        gang.end()
        gang.backend.collect(gang.job, gang.handle)
        assert read_json(gang.job.directory / "result.json") == RESULT
    finally:
        for name, subjects in before.items():
            rights.patch_cluster_role_binding(name, {"subjects": rights.api_client.sanitize_for_serialization(subjects)})


def _refused(told: Any) -> bool:
    try:
        told._client.request("GET", "version")
    except ApiError as error:
        return error.status == 403
    return False


# -- workloads of other groups --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workload", ["jobset", "trainjob", "volcano"])
def test_a_workload_that_is_not_installed_is_said_beforehand(stage: Stage, workload: str) -> None:
    with pytest.raises(ConfigError, match=r"does not know this kind of object; install it, or choose another cluster\.workload"):
        stage.backend(stage.cluster(workload=workload)).check()


@pytest.fixture(scope="module")
def job_sets(played_nodes: Kubernetes) -> Iterator[None]:
    """The kind JobSet, of which the server keeps everything but spec.suspend and spec.ttlSecondsAfterFinished; nobody makes pods of it but the test."""
    kept = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    spec = {
        "type": "object",
        "properties": dict.fromkeys(("network", "failurePolicy"), kept) | {"replicatedJobs": {"type": "array", "items": kept}},
    }
    schema = {"type": "object", "properties": {"spec": spec, "status": kept}}
    version = {"name": "v1alpha2", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}, "subresources": {"status": {}}}
    names = {"plural": "jobsets", "singular": "jobset", "kind": "JobSet", "listKind": "JobSetList"}
    api = played_nodes.api("ApiextensionsV1Api")
    head = {"name": "jobsets.jobset.x-k8s.io", "annotations": {"api-approved.kubernetes.io": "https://github.com/kubernetes-sigs/jobset"}}
    api.create_custom_resource_definition(
        {"metadata": head, "spec": {"group": "jobset.x-k8s.io", "scope": "Namespaced", "names": names, "versions": [version]}}
    )
    customs = played_nodes.api("CustomObjectsApi")
    wait_for(lambda: _served(customs), "the new kind to be served")
    yield
    api.delete_custom_resource_definition(head["name"])


def _served(customs: Any) -> bool:
    from kubernetes.client.exceptions import ApiException

    try:
        return bool(customs.list_namespaced_custom_object("jobset.x-k8s.io", "v1alpha2", "default", "jobsets"))
    except ApiException:
        return False


def test_a_watch_that_is_too_old_to_go_on_starts_anew(stage: Stage, job_sets: None) -> None:
    """A server does not remember versions from before it knew of a kind: it answers 410 Gone, and everything is listed again."""
    watched = stage.backend(dataclasses.replace(stage.cluster(), kubeconfig=str(stage.kubernetes.kubeconfig)))._client
    path = "apis/jobset.x-k8s.io/v1alpha2/namespaces/{namespace}/jobsets"
    with pytest.raises(ApiError) as gone:
        next(iter(watched.watch(path, resourceVersion="1")))
    assert gone.value.expired
    mirror = Mirror(watched, path)
    listed: list[str] = []
    original = mirror._list

    def forgetful() -> str:
        listed.append(original())
        return "1" if len(listed) == 1 else listed[-1]

    mirror._list = forgetful  # type: ignore[method-assign]
    mirror.start()
    wait_for(lambda: len(listed) > 1, "everything to be listed anew")
    later = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": {"name": "later"}, "spec": {}}
    customs = stage.kubernetes.api("CustomObjectsApi")
    customs.create_namespaced_custom_object("jobset.x-k8s.io", "v1alpha2", stage.namespace, "jobsets", later)
    wait_for(lambda: "later" in [item["metadata"]["name"] for item in mirror.objects()], "a change after that")
    assert len(listed) == 2, "the new watch goes on: nothing is listed a third time"
    mirror.close()


@pytest.mark.parametrize(
    ("condition", "status"),
    [({"type": "Completed", "reason": "AllJobsCompleted"}, Status.DONE), ({"type": "Failed", "reason": "FailedJobs"}, Status.FAILED)],
)
def test_a_job_set_is_created_watched_judged_and_removed(stage: Stage, job_sets: None, condition: dict[str, str], status: Status) -> None:
    gang = stage.submit(workload="jobset")
    state = gang.backend.poll([gang.handle])[0]
    assert (state.status, state.detail) == (Status.SUBMITTED, "waiting for its pods")
    assert gang.backend.find([gang.job]) == {gang.job.name: gang.handle}
    customs = stage.kubernetes.api("CustomObjectsApi")
    place = ("jobset.x-k8s.io", "v1alpha2", stage.namespace, "jobsets", gang.handle["name"])
    customs.patch_namespaced_custom_object_status(*place, {"status": {"conditions": [{**condition, "status": "True"}]}})
    assert gang.end().status is status
    gang.backend.collect(gang.job, gang.handle)
    wait_for(lambda: not customs.list_namespaced_custom_object(*place[:-1])["items"] and not stage.left(), "the namespace to be empty")


def test_a_time_to_live_that_the_server_forgets_is_said_once_and_no_refusal(
    stage: Stage, job_sets: None, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nothing of the run depends on it: the objects are removed when the trial is collected."""
    backend = stage.backend(stage.cluster(workload="jobset"))
    backend.check()
    backend.check()
    assert capfd.readouterr().err.count("drops spec.ttlSecondsAfterFinished of the JobSet: should no launcher come back") == 1


def test_a_field_that_the_server_forgets_is_a_refusal_and_nothing_is_left(stage: Stage, job_sets: None) -> None:
    """Kueue would find a JobSet that was not suspended, and that runs already."""
    words = "is too old for cluster.workload=jobset: of the JobSet it drops spec.suspend silently"
    with pytest.raises(ConfigError, match=words):
        stage.backend(stage.cluster(workload="jobset", queue="trials")).check()
    gang = stage.submit(workload="jobset", queue="trials")
    assert words in gang.backend.poll([gang.handle])[0].detail
    customs = stage.kubernetes.api("CustomObjectsApi")
    wait_for(
        lambda: (
            not stage.left()
            and not customs.list_namespaced_custom_object("jobset.x-k8s.io", "v1alpha2", stage.namespace, "jobsets")["items"]
        ),
        "nothing to be left",
    )


# -- command line ---------------------------------------------------------------------------------------------------------------------


def test_a_server_side_dry_run_says_what_the_server_would_refuse_and_stores_nothing(
    forgetful: None, stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    from launcher.cli.main import main

    common = ["train", "--dry-run=server", "cluster=kubernetes_cpu", "data=synthetic", "model=gpt_tiny", "cluster.container.image=trireme:1",
              f"cluster.kubeconfig={stage.kubernetes.launchers[stage.namespace]}", f"cluster.namespace={stage.namespace}", f"sweep.dir={stage.folder}"]  # fmt: skip
    assert main([*common, "cluster.workload=pods"]) == 0
    assert "kind: Pod" in capsys.readouterr().out
    assert main([*common, "cluster.workload=job"]) == 2
    assert "it drops spec.completionMode silently" in capsys.readouterr().err
    lots = "{Pod: {spec: {containers: [{name: node, resources: {limits: {memory: lots}}}]}}}"
    assert main([*common, "cluster.workload=pods", f"++cluster.patch={lots}"]) == 2
    assert "quantities must match" in capsys.readouterr().err
    assert not stage.left() and not list(stage.folder.iterdir())


def test_a_cluster_that_cannot_be_used_leaves_no_planned_trial_behind(
    forgetful: None, stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    from launcher.cli.main import main

    words = ["train", "-m", "run.seed=1,2", "cluster=kubernetes_cpu", "data=synthetic", "model=gpt_tiny", "cluster.container.image=trireme:1",
             f"cluster.kubeconfig={stage.kubernetes.launchers[stage.namespace]}", f"cluster.namespace={stage.namespace}",
             f"sweep.dir={stage.folder}"]  # fmt: skip
    assert main([*words, "cluster.workload=job"]) == 2
    assert "it drops spec.completionMode silently" in capsys.readouterr().err
    assert main([*words, "cluster.workload=pods", "cluster.namespace=elsewhere"]) == 2
    assert "in namespace elsewhere you may not" in capsys.readouterr().err
    assert not stage.left() and not list(stage.folder.iterdir())


def test_asking_how_trials_stand_brings_results_home_and_removes_nothing(stage: Stage) -> None:
    """Nor is a trial dead because it is in another namespace than the first one."""
    settings = SweepConfig(dir=str(stage.folder), follow=False, max_parallel=0)
    with stage.kubernetes.namespace() as other, Backends() as backends:
        far = dataclasses.replace(
            stage.cluster({"run": "-1", "log": "[{index}] step 1"}), namespace=other, kubeconfig=str(stage.kubernetes.launchers[other])
        )
        wanted = [points(stage.cluster(), 1)[0], points(far, 2)[1]]
        here, there = run_sweep("two", wanted, settings, backends)
        core, store = stage.kubernetes.core(), Store(stage.folder)
        wait_for(lambda: not _active(core.list_namespaced_pod(stage.namespace).items), "the first trial to end")
        wait_for(lambda: len(_active(core.list_namespaced_pod(other).items)) == 2, "the second trial to be there")
        before = stage.left()
        catch_up(store, [here, there], backends)
        assert (here.status, there.status.final) == (Status.DONE, False), (here.detail, there.detail)
        assert (here.read_result() or {})["losses"] and sorted(stage.left()) == sorted(before)
        assert len(_active(core.list_namespaced_pod(other).items)) == 2
        assert stop(store, [store.load(here.id), store.load(there.id)], backends, 600.0) == []
        assert [store.load(record.id).status for record in (here, there)] == [Status.DONE, Status.STOPPED]
        wait_for(lambda: not stage.left() and not core.list_namespaced_pod(other).items, "both namespaces to be empty")


def test_status_knows_the_place_of_a_trial_that_no_launcher_follows(stage: Stage) -> None:
    settings = SweepConfig(dir=str(stage.folder), follow=False, max_parallel=0)
    cluster = stage.cluster({"run": "0.5"})
    with Backends() as backends:
        (record,) = run_sweep("left", points(cluster, 1), settings, backends)
    assert record.status is Status.SUBMITTED
    assert json.loads((record.directory / "trial.json").read_text())["handle"]["name"].startswith(f"trireme-{record.id}-0")
    with Backends() as backends:
        (again,) = run_sweep("left", points(cluster, 1), dataclasses.replace(settings, follow=True), backends)
    assert again.status is Status.DONE and Store(stage.folder).trial(record.id).attempt == 0
