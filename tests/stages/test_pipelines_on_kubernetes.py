"""A pipeline in real pods, whose artifacts lie on a volume that they share with the launcher."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.cli.main import main
from tests.clusters.kubernetes.fixture import Kubernetes, run_inside, shipped
from tests.stages.conftest import GRAPH, write
from trainer.spec import to_dict
from trainer.spec.artifacts import read_artifact


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


def test_every_stage_runs_in_pods_once_its_inputs_are_there(pods: str, real_node: Kubernetes, capsys: pytest.CaptureFixture[str]) -> None:
    said = run(capsys)
    assert {stage["status"] for stage in said.values()} == {"done"}, said
    assert all(read_artifact(Path(stage["folder"])) is not None for stage in said.values())
    again = run(capsys)
    assert {stage["status"] for stage in again.values()} == {"reused"}
    assert not real_node.core().list_namespaced_service(pods).items, "objects are left in the namespace"


def test_a_launcher_inside_the_cluster_runs_the_graph(pods: str, real_node: Kubernetes, folder: Path) -> None:
    """The shipped Job; the pods of the stages share its volume."""
    if real_node.own is None:
        pytest.skip("pods of the cluster of KUBECONFIG are not told where its API server is")
    cluster = folder / "conf" / "cluster" / "pods.yaml"
    cluster.write_text(yaml.safe_dump(yaml.safe_load(cluster.read_text()) | {"kubeconfig": None}))
    write(folder, {name: GRAPH[name] for name in ("data", "base")} | {"data": GRAPH["data"] | {"data.source": str(folder / "text.txt")}})
    words = ["run", "pipeline=small", "--config-dir", str(folder / "conf"), "cluster=pods", f"sweep.dir={folder / 'runs'}", "--json"]
    log = run_inside(real_node, pods, shipped("pipeline.yaml", pods)["Job/pipeline"], words, folder, str(folder))
    said = json.loads(log[log.index("{\n") :])["stages"]
    assert [stage["status"] for stage in said] == ["done", "done"]
    assert all(read_artifact(Path(stage["folder"])) is not None for stage in said)
