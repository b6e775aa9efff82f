"""Kubernetes with real pods: the conformance suite, the main job from end to end, and what only a kubelet can show."""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml

from launcher.backends import backend_for
from launcher.backends.kubernetes.cluster import KubernetesCluster
from launcher.backends.kubernetes.manifests import ENTRY
from launcher.backends.kubernetes.volumes import CONFIG_DIR, VolumeConfig
from launcher.cli.main import main
from launcher.tracking import unmirrored
from launcher.tracking.mirror import MlflowSweep
from launcher.trials.job import Handle, Job, JobState
from launcher.trials.outcome import Verdict, decide
from launcher.trials.store import Store
from tests import warm
from tests.backends.conformance import LONG, Conformance, Ground, SearchConformance, closing
from tests.clusters.kubernetes.control_plane import ControlPlane
from tests.clusters.kubernetes.fixture import PYTHON, Kubernetes, run_inside, shipped
from tests.clusters.slurm.process import wait_for
from tests.processes import launcher
from trainer.shared.records.outcome import Reason, Status
from trainer.shared.records.trial_files import failures_in
from trainer.shared.run.files import read_json
from trainer.shared.run.schema import RunConfig


@pytest.fixture(scope="module")
def ground(real_node: Kubernetes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    """Trials whose two ranks share a pod, on a cluster that would hold two pods of two ranks."""
    with real_node.namespace() as namespace:
        cluster = real_node.cluster(namespace, nodes=2, gpus_per_node=2)
        folder = tmp_path_factory.mktemp("trials")
        unknown = {"namespace": namespace, "name": "trireme-000000000000-0", "pods": 1, "attempt": 0, "directory": str(folder / "none")}
        yield from closing(Ground(lambda: backend_for(cluster), cluster, folder, unknown=unknown))


def run(ground: Ground, **cluster: Any) -> tuple[Job, JobState, Verdict]:
    """One trial on a cluster that differs from the ground's, to its end."""
    job = ground.job(**cluster)
    ground = dataclasses.replace(ground, make=lambda: backend_for(job.cluster))
    (handle,) = ground.submit(job)
    state = ground.end(job, handle)
    ground.backend.close()
    return job, state, decide(0, state, read_json(job.directory / "result.json"), failures_in(job.directory))


@pytest.mark.campaign("kubernetes")
class TestSearchOnKubernetes(SearchConformance):
    """Inference."""


class TestKubernetes(Conformance):
    def test_the_command_that_is_printed_can_be_applied_by_hand(self, ground: Ground, real_node: Kubernetes) -> None:
        """Without the launcher's owner references, that is: what is made by hand is removed by hand."""
        job = ground.job(ranks=1)
        core = real_node.core()
        for manifest in yaml.safe_load_all(ground.backend.render(job).text):
            create = {
                "Service": core.create_namespaced_service,
                "ConfigMap": core.create_namespaced_config_map,
                "Pod": core.create_namespaced_pod,
            }
            create[manifest["kind"]](manifest["metadata"]["namespace"], manifest)
        handle = ground.backend.find([job])[job.name]
        assert ground.end(job, handle).status is Status.DONE
        core.delete_namespaced_pod(f"{handle['name']}-0", handle["namespace"])
        core.delete_namespaced_config_map(handle["name"], handle["namespace"])


# -- what a kubelet says ------------------------------------------------------------------------------------------------------------


def patched(**container: Any) -> dict[str, Any]:
    return {"patch": {"Pod": {"spec": {"containers": [{"name": "node", **container}]}}}}


def instead_of_ranks(ground: Ground, script: str) -> dict[str, Any]:
    """Python that runs in place of the launcher's program, which is now an argument that it does not look at."""
    return patched(command=[ground.cluster.python, "-u", "-c", script, str(PurePosixPath(CONFIG_DIR) / ENTRY.name)])  # type: ignore[attr-defined]


NO_MAP = {"name": "LEVEL", "valueFrom": {"configMapKeyRef": {"name": "nope", "key": "level"}}}


SYNCED = 10.0
"""Seconds in which a busy node learns of the objects that a pod was made with, so that only those that do not exist are missing."""
ASLEEP = [PYTHON, "-u", "-c", "import time; time.sleep(600)", str(PurePosixPath(CONFIG_DIR) / ENTRY.name)]
"""A process that a signal kills: ranks that have begun by then stop after a checkpoint, and have not failed."""

FATES: dict[str, tuple[dict[str, Any], Reason, str]] = {
    "memory": ({"memory": "120Mi", "shared_memory": None, "python": PYTHON}, Reason.HOST_MEMORY, ""),
    "python": ({"python": "/no/such/python"}, Reason.CANNOT_START, "no such file or directory"),
    "secret": ({"secrets": {"TOKEN": "nope/token"}, "fault_timeout": SYNCED}, Reason.CANNOT_START, 'secret "nope" not found'),
    "volume": ({"volumes": [VolumeConfig(mount="/x", secret="nope")], "fault_timeout": SYNCED}, Reason.CANNOT_START, 'secret "nope" not found'),
    "map": (patched(env=[NO_MAP]) | {"fault_timeout": SYNCED}, Reason.CANNOT_START, 'configmap "nope" not found'),
    "pull": (
        {"pull_policy": "Always", "fault_timeout": SYNCED}, Reason.CANNOT_START, "check cluster.container.image and cluster.pull_secrets",
    ),
    "never": (patched(image="no.such/image:1") | {"pull_policy": "Never"}, Reason.CANNOT_START, "load the image onto the nodes"),
    "name": (patched(image="No Such Image"), Reason.CANNOT_START, "InvalidImageName"),
    "deadline": (
        {"python": PYTHON, "patch": {"Pod": {"spec": {"activeDeadlineSeconds": 1, "containers": [{"name": "node", "command": ASLEEP}]}}}},
        Reason.TIME_LIMIT,
        "DeadlineExceeded: Pod was active",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def fates(ground: Ground) -> dict[str, tuple[Job, JobState, Verdict]]:
    """What became of the pods of ``FATES``, which run side by side."""
    with ThreadPoolExecutor(len(FATES)) as pool:
        ended = pool.map(lambda fate: run(ground, ranks=1, gpus_per_node=1, **fate[0]), FATES.values())
        return dict(zip(FATES, ended))


@pytest.mark.parametrize("fate", FATES)
def test_a_pod_that_fails_or_cannot_start_says_why(fates: dict[str, tuple[Job, JobState, Verdict]], fate: str) -> None:
    (_, state, verdict), (_, reason, words) = fates[fate], FATES[fate]
    assert (verdict.status, verdict.reason) == (Status.FAILED, reason), state
    assert words in verdict.detail and "\n" not in verdict.detail


def test_every_line_of_a_log_arrives_once_though_the_api_server_dies_meanwhile(ground: Ground, control: ControlPlane) -> None:
    count = 400
    script = f"import time\nfor n in range({count}): print(f'[0] line {{n}}', flush=True); time.sleep(0.03)"
    job = ground.job(ranks=1, **instead_of_ranks(ground, script))
    (handle,) = ground.submit(job)
    ground.until(job, handle, lambda _: job.log_path(0).exists())
    control.api_server.kill()
    control.start_again()
    assert ground.end(job, handle).status is Status.DONE
    assert job.log_path(0).read_text().splitlines() == [f"line {n}" for n in range(count)]


def _collect(cluster: KubernetesCluster, handle: Handle) -> None:
    """A launcher that follows one job, for ever."""
    backend = backend_for(cluster)
    while True:
        backend.poll([handle])
        time.sleep(0.1)


@pytest.mark.parametrize("moments", [(20, 120), pytest.param((20, 60, 120, 180), marks=pytest.mark.campaign("kubernetes"))], ids=len)
def test_every_line_of_a_log_and_of_the_metrics_arrives_once_though_launchers_are_killed(ground: Ground, moments: tuple[int, ...]) -> None:
    count = 200
    line = "print(f'[0] line {n}\\n#trireme metrics.jsonl + {n}', flush=True)"
    script = f"import time\nfor n in range({count}): {line}; time.sleep(0.05)"
    job = ground.job(ranks=1, **instead_of_ranks(ground, script))
    metrics = job.directory / "metrics.jsonl"
    metrics.write_text("of an earlier attempt\n")
    (handle,) = ground.submit(job)
    for reached in moments:
        process = launcher(_collect, job.cluster, handle)
        wait_for(lambda reached=reached: len(metrics.read_bytes().splitlines()) > reached, "some lines to arrive")  # type: ignore[misc]
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
    assert ground.end(job, handle).status is Status.DONE
    assert metrics.read_text().splitlines() == ["of an earlier attempt", *map(str, range(count))]
    assert job.log_path(0).read_text().splitlines() == [f"line {n}" for n in range(count)]


@pytest.mark.campaign("kubernetes")
def test_no_step_is_lost_when_a_kubelet_is_restarted_while_its_pod_ends(quiet: None, ground: Ground, real_node: Kubernetes) -> None:
    """It reports the end of the pod before it knows the pod's log again."""
    if real_node.own is None or real_node.own.node is None:
        pytest.skip("the node of KUBECONFIG is not ours to break")
    count = 200
    line = "print(f'#trireme metrics.jsonl + {n}', flush=True)"
    ends = f"print('#trireme end {count}')"
    script = f"import time\nprint('#trireme begin')\nfor n in range({count}): {line}; time.sleep(0.03)\n{ends}"
    job = ground.job(ranks=1, **instead_of_ranks(ground, script))
    metrics = job.directory / "metrics.jsonl"
    (handle,) = ground.submit(job)
    ground.until(job, handle, lambda _: metrics.exists())
    real_node.own.node.kill()
    time.sleep(0.03 * count + 5)  # the pod has ended
    real_node.own.node.revive()
    ground.end(job, handle)
    assert metrics.read_text().splitlines() == [str(n) for n in range(count)]


def test_a_pod_that_is_told_to_end_saves_and_the_next_attempt_goes_on_from_there(
    ground: Ground, real_node: Kubernetes, tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o777)
    shared.chmod(0o777)
    volume = {"volumes": [VolumeConfig(mount="/runs", host_path=str(shared))], "run_dir": "/runs", "grace_seconds": 60}
    long = dataclasses.replace(LONG, checkpoint=dataclasses.replace(RunConfig().checkpoint, every=1_000_000))
    job = ground.job(long, nodes=2, gpus_per_node=1, **volume)
    (handle,) = ground.submit(job)
    ground.running(job, handle)
    real_node.core().delete_namespaced_pod(f"{handle['name']}-1", handle["namespace"])
    state = ground.end(job, handle)
    stopped = read_json(job.directory / "result.json") or {}
    assert (state.status, stopped["status"]) == (Status.STOPPED, "stopped"), state
    assert state.detail.startswith(f"pod {handle['name']}-1 on ") and "was deleted" in state.detail
    reached = _last_step(job)
    later = dataclasses.replace(job, attempt=1)
    (handle,) = ground.submit(later)
    ground.until(later, handle, lambda _: _last_step(later) > reached)
    ground.backend.cancel([handle])
    ground.end(later, handle)
    steps = [json.loads(line) for line in (job.directory / "metrics.jsonl").read_text().splitlines()]
    first = next(line["step"] for line in steps if line["attempt"] == 1)
    assert first == reached + 1, "nothing is trained twice, and nothing is left out"


def _last_step(job: Job) -> int:
    path = job.directory / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []  # whole ones
    return max((json.loads(line)["step"] for line in lines if json.loads(line)["attempt"] == job.attempt), default=0)


# -- from end to end ------------------------------------------------------------------------------------------------------------------


def overrides(cluster: KubernetesCluster) -> list[str]:
    """The cluster as a person would give it on the command line."""
    container, quoted = cluster.container, "'{}'".format
    selector = [f"cluster.node_selector.{name}={quoted(value)}" for name, value in cluster.node_selector.items()]
    return [
        "cluster=kubernetes_cpu", "cluster.workload=pods", f"cluster.kubeconfig={cluster.kubeconfig}", f"cluster.namespace={cluster.namespace}",
        f"cluster.container.image={quoted(container.image)}", f"cluster.container.workdir={container.workdir}", f"cluster.python={cluster.python}",
        f"cluster.container.mounts=[{','.join(map(quoted, container.mounts))}]", "cluster.grace_seconds=5", "cluster.cpu=null", "cluster.memory=null",
        "cluster.spread=false",  # there is one real node
        f"cluster.user={cluster.user}", f"cluster.restricted={str(cluster.restricted).lower()}", *selector,
    ]  # fmt: skip


SHORT = [
    "model=gpt_tiny",
    "model.layers=2",
    "data=synthetic",
    "run.steps=4",
    "run.warmup_steps=1",
    "run.global_batch=4",
    "run.timeline=true",
]


def test_the_main_job_sweeps_layouts_over_pods_and_ranks_them_with_the_losses_of_a_local_run(
    real_node: Kubernetes, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    secret = secrets.token_hex(16)
    real_node.core().create_namespaced_secret(namespace, {"metadata": {"name": "planted"}, "stringData": {"token": secret}})
    pods = [*overrides(real_node.cluster(namespace)), "cluster.nodes=2", "cluster.gpus_per_node=1", "cluster.secrets.PLANTED=planted/token"]
    with warm.replaced():
        assert main(["train", "-m", "layout.tensor=1,2", "sweep.name=pods", *SHORT, *pods]) == 0
        assert main(["train", "-m", "layout.tensor=1,2", "sweep.name=local", *SHORT, "cluster=local", "cluster.gpus_per_node=2"]) == 0
    losses = {}
    for sweep in ("pods", "local"):
        records = Store("runs").sweep(sweep).records
        assert [record.status for record in records] == [Status.DONE, Status.DONE], [record.detail for record in records]
        results = [record.read_result() or {} for record in records]
        losses[sweep] = [result["losses"] for result in results]
        assert sweep == "local" or len(results[1]["hosts"]) == len(records[1].nodes) == 2, "ranks of two pods found each other by name"
    assert losses["pods"] == [pytest.approx(series, rel=1e-5) for series in losses["local"]]
    capsys.readouterr()
    assert main(["rank", "pods", "--json"]) == 0
    ranking = json.loads(capsys.readouterr().out)
    assert [trial["status"] for trial in ranking] == ["done", "done"] and ranking[0]["step_time_s"] <= ranking[1]["step_time_s"]
    _assert_complete_and_clean(real_node, namespace)
    MlflowSweep(Path("runs"), "pods").update()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"mlflow.db", "attempt0.submitted.txt", "attempt0.rank0.log", "trial.json"} <= {path.name for path in files}
    assert not [path for path in files if secret.encode() in path.read_bytes()], "the secret is in no file that was written"


def _assert_complete_and_clean(kubernetes: Kubernetes, namespace: str) -> None:
    """Every file of a trial came home from the pods, and nothing of ours is left in the namespace."""
    for record in Store("runs").sweep("pods").records:
        names = {path.name for path in record.directory.iterdir()}
        assert names >= {"config.yaml", "trial.json", "metrics.jsonl", "result.json", "timeline.json", "logs"}
        assert len((record.directory / "metrics.jsonl").read_text().splitlines()) == 4
        assert "step 4" in (record.directory / "logs/attempt0.rank0.log").read_text()
        assert "kind: Pod" in (record.directory / "logs/attempt0.submitted.txt").read_text()
        assert (record.directory / "logs/attempt0.rank1.log").exists(), "also of a rank that said nothing"
    core = kubernetes.core()
    wait_for(lambda: not core.list_namespaced_pod(namespace).items, "the pods to be gone")
    wait_for(
        lambda: not [c for c in core.list_namespaced_config_map(namespace).items if c.metadata.name.startswith("trireme-")],
        "the rest to be gone",
    )
    assert not core.list_namespaced_service(namespace).items


def test_a_launcher_inside_the_cluster_needs_no_kubeconfig(real_node: Kubernetes, namespace: str, tmp_path: Path) -> None:
    """The shipped Job, service account and role, in a pod of this machine's files; the trial it launches is a pod as well."""
    if real_node.own is None:
        pytest.skip("pods of the cluster of KUBECONFIG are not told where its API server is")
    runs = tmp_path / "runs"
    runs.mkdir()
    tmp_path.chmod(0o755)
    runs.chmod(0o777)
    settings = real_node.cluster(namespace)
    command = [value for value in overrides(settings) if not value.startswith("cluster.kubeconfig=")]
    own = ["train", *SHORT, *command, "cluster.nodes=1", "cluster.gpus_per_node=1", "sweep.dir=/runs", "sweep.name=first"]
    run_inside(real_node, namespace, shipped("launcher.yaml", namespace)["Job/launcher"], own, runs, "/runs")
    (record,) = Store(runs).sweep("first").records
    assert record.status is Status.DONE, record.detail
    assert not unmirrored.names(runs), "MLflow has all of it, for nothing goes on in the pod when the launcher has ended"
