"""A pipeline in real pods, whose artifacts lie on a volume that they share with the launcher."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.backends.kubernetes.inside import launcher_name
from launcher.cli.main import main
from tests.clusters.kubernetes.fixture import Kubernetes
from tests.clusters.slurm.process import wait_for
from tests.stages.conftest import GRAPH, attempts, kill_many, killed_at, write
from trainer.shared.records.artifacts import read_artifact
from trainer.shared.run.read import to_dict


@pytest.fixture
def pods(real_node: Kubernetes, namespace: str, folder: Path) -> str:
    """``cluster=pods``: the real node, with the working directory as a volume of every pod."""
    volume = {"mount": str(folder), "host_path": str(folder)}
    keys = to_dict(real_node.cluster(namespace)) | {"volumes": [volume]}
    (folder / "conf" / "cluster").mkdir()
    (folder / "conf" / "cluster" / "pods.yaml").write_text(yaml.safe_dump({"defaults": ["_kubernetes", "_self_"], **keys}))
    folder.chmod(0o755)
    for path in (folder / "runs", folder / "runs" / "stages"):
        path.mkdir()
        path.chmod(0o777)  # pods are another user
    return namespace


def run(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict[str, dict[str, Any]]:
    capsys.readouterr()
    assert main(["run", "pipeline=small", "--config-dir", "conf", "--json", "cluster=pods", *words]) == code
    return {stage["name"]: stage for stage in json.loads(capsys.readouterr().out)["stages"]}


def test_stages_run_in_pods_and_are_not_made_again(
    pods: str, real_node: Kubernetes, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The smallest graph: a corpus, and a model that learns from it."""
    write(folder, {name: GRAPH[name] for name in ("data", "base")})
    said = run(capsys)
    assert {name: stage["status"] for name, stage in said.items()} == {"data": "done", "base": "done"}, said
    assert all(read_artifact(Path(stage["folder"])) is not None for stage in said.values())
    assert {stage["status"] for stage in run(capsys).values()} == {"reused"}
    assert not real_node.core().list_namespaced_service(pods).items, "objects are left in the namespace"


@pytest.mark.campaign("kubernetes")
def test_every_stage_runs_in_pods_once_its_inputs_are_there(pods: str, real_node: Kubernetes, capsys: pytest.CaptureFixture[str]) -> None:
    said = run(capsys)
    assert {stage["status"] for stage in said.values()} == {"done"}, said
    assert all(read_artifact(Path(stage["folder"])) is not None for stage in said.values())
    again = run(capsys)
    assert {stage["status"] for stage in again.values()} == {"reused"}
    base, place = said["base"]["folder"], ["cluster=pods", "--config-dir", "conf"]
    assert main(["generate", base, "--prompt", "some", "--tokens", "5", *place]) == 0
    made = json.loads((Path(said["text"]["folder"]) / "completions.json").read_text())["completions"]
    assert capsys.readouterr().out == f"some{made[0]['text']}\n"
    assert main(["evaluate", base, f"data.path={said['data']['folder']}", "data.held_out=0.2", "--json", *place]) == 0
    figures = json.loads((Path(said["score"]["folder"]) / "metrics.json").read_text())
    assert json.loads(capsys.readouterr().out)["loss"] == pytest.approx(figures["loss"], rel=1e-6)
    assert main(["generate", "/tmp", "--prompt", "some", *place]) == 2
    assert not real_node.core().list_namespaced_service(pods).items, "objects are left in the namespace"


@pytest.mark.campaign("kubernetes")
def test_a_launcher_that_is_killed_late_loses_nothing(pods: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done: dict[Path, int] = {}
    for wanted in ("hf", "text"):
        manifests = killed_at(wanted, folder, "cluster=pods")
        assert {path: manifests.get(path) for path in done} == done, "a stage that was whole has been made again"
        done = {path: time_ns for path, time_ns in manifests.items() if read_artifact(path.parent) is not None}
        assert len(done) >= 2
    said = run(capsys)
    assert {stage["status"] for stage in said.values()} <= {"done", "reused"}, said
    assert all(read_artifact(Path(stage["folder"])) is not None for stage in said.values())
    assert {path: path.stat().st_mtime_ns for path in done} == done
    assert len(list((folder / "runs/stages").glob("*"))) == len(GRAPH)


@pytest.mark.campaign("kubernetes")
def test_launchers_killed_at_random_moments_run_nothing_twice(pods: str, folder: Path, request: pytest.FixtureRequest) -> None:
    kill_many(request.config.getoption("--kills"), 8.0, folder, "cluster=pods")
    assert attempts(folder) == {0}


@pytest.mark.campaign("kubernetes")
def test_a_launcher_inside_the_cluster_runs_the_graph(
    pods: str, real_node: Kubernetes, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``--in-cluster``: the command becomes a Job, which shares the volume of its stages' pods."""
    if real_node.own is None:
        pytest.skip("pods of the cluster of KUBECONFIG are not told where its API server is")
    cluster = folder / "conf" / "cluster" / "pods.yaml"
    server = {"KUBERNETES_SERVICE_HOST": real_node.own.settings.gateway, "KUBERNETES_SERVICE_PORT": "443"}
    cluster.write_text(yaml.safe_dump(yaml.safe_load(cluster.read_text()) | {"env": server}))
    write(folder, {name: GRAPH[name] for name in ("data", "base")} | {"data": GRAPH["data"] | {"data.source": str(folder / "text.txt")}})
    place = ["--config-dir", str(folder / "conf"), f"sweep.dir={folder / 'runs'}", "--in-cluster", real_node.image]
    assert main(["run", "pipeline=small", *place]) == 2
    assert "stage data: cluster.backend=local cannot be reached with --in-cluster" in capsys.readouterr().err
    place.append("cluster=pods")
    assert main(["run", "pipeline=small", *place]) == 0
    assert main(["run", "pipeline=small", *place]) == 2  # while it is at work
    assert "is at work in namespace" in capsys.readouterr().err
    batch, name = real_node.api("BatchV1Api"), launcher_name("small", str(folder / "runs"))

    def ended() -> bool:
        status = batch.read_namespaced_job(name, pods).status
        return bool(status.succeeded or status.failed)

    wait_for(ended, "the launcher to end", 300)
    (pod,) = real_node.core().list_namespaced_pod(pods, label_selector=f"job-name={name}").items
    log = str(real_node.core().read_namespaced_pod_log(pod.metadata.name, pods))
    assert batch.read_namespaced_job(name, pods).status.succeeded == 1, log
    made = list((folder / "runs" / "stages").glob("*/artifact"))
    assert len(made) == 2 and all(read_artifact(path) is not None for path in made)
