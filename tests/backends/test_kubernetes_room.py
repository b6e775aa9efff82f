"""Gangs on a cluster that is too small for all of them at once: none holds for ever what another one waits for."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from launcher.backends.kubernetes.cluster import KubernetesCluster
from launcher.backends.pool import Backends
from launcher.config.rules import resolve
from launcher.config.schema import Config, SweepConfig
from launcher.sweep import poller
from launcher.sweep.run import run_sweep
from launcher.trials.store import Point, Record, Store
from tests.clusters.kubernetes.fixture import Kubernetes
from tests.clusters.kubernetes.stage import Stage
from tests.clusters.slurm.process import wait_for
from trainer.shared.records.outcome import Status
from trainer.shared.run.schema import DataConfig, LayoutConfig, ModelConfig, RunConfig

MODEL = ModelConfig(layers=1, hidden=16, heads=2, vocab=64, seq=8)
WHOLE_NODE = "1000"
"""CPUs of a played node: pods that want as many have a node each."""


def gang(cluster: KubernetesCluster, pods: int, seed: int = 1) -> Point:
    """A trial of so many pods of one rank each."""
    run = RunConfig(steps=3, warmup_steps=1, seed=seed, global_batch=pods, timeline=False, device="cpu")
    layout = LayoutConfig(tensor=1, data=pods)
    config = Config(MODEL, layout, DataConfig(kind="synthetic"), run=run, cluster=dataclasses.replace(cluster, nodes=pods, gpus_per_node=1))
    return Point((f"run.seed={seed}",), resolve(config))


class Running:
    """A launcher, in a thread."""

    def __init__(self, folder: Path, points: Sequence[Point]):
        self.folder, self._records = folder, list[Record]()
        self._thread = threading.Thread(target=self._run, args=(points,), daemon=True)
        self._thread.start()

    def _run(self, points: Sequence[Point]) -> None:
        with Backends() as backends:
            self._records += run_sweep("crowded", points, SweepConfig(dir=str(self.folder), max_parallel=0), backends)

    def ended(self) -> list[Record]:
        self._thread.join(600)
        assert not self._thread.is_alive(), "the sweep goes on"
        return self._records

    def records(self) -> list[Record]:
        return Store(self.folder).sweep("crowded").records if Store(self.folder).names() else []

    def stop(self) -> list[Record]:
        for record in self.records():
            if not record.status.final:
                Store(self.folder).ask_to_stop(record)
        return self.ended()


@pytest.mark.campaign("kubernetes")
def test_gangs_that_would_each_hold_a_half_run_one_after_the_other(real_node: Kubernetes, namespace: str, tmp_path: Path) -> None:
    """Real ranks, which wait for each other, on a node that holds the pods of one gang."""
    if real_node.own is None:
        pytest.skip("the room on the nodes of KUBECONFIG is not known")
    room = float(real_node.core().read_node("127.0.0.1").status.allocatable["cpu"])
    cluster = real_node.cluster(namespace, cpu=f"{int(room * 450)}m")
    records = Running(tmp_path, [gang(cluster, 2, seed) for seed in range(3)]).ended()
    assert [(record.status, record.attempt) for record in records] == [(Status.DONE, 0)] * 3, [record.detail for record in records]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(poller, "_ROOM_SECONDS", 1.0)


def test_a_gang_that_finds_no_room_says_so(
    quiet: None, stage: Stage, tmp_path: Path, impatient: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a terminal too; and what comes after it takes no room from it."""
    endless = stage.cluster({"run": "-1", "log": ""}, cpu=WHOLE_NODE)
    running = Running(tmp_path / "runs", [gang(endless, 5), gang(endless, 2)])
    wait_for(lambda: "waits for room for all of its parts" in caplog.text, "the trial to be told of")
    large, small = running.records()
    assert f"trial {large.id} waits for room" in caplog.text and "cluster.start_timeout" in caplog.text
    assert small.status is Status.PLANNED
    assert [record.status for record in running.stop()] == [Status.STOPPED] * 2
    wait_for(lambda: not stage.left(), "the namespace to be empty")


def test_of_gangs_that_hold_a_part_each_the_one_that_came_first_keeps_it(
    quiet: None, stage: Stage, tmp_path: Path, impatient: None
) -> None:
    """Also when they belong to two launchers."""
    core = stage.kubernetes.core()
    for node in ("played-0", "played-2"):
        _occupy(stage, node)

    def launch(name: str, rack: str) -> Running:
        forever = stage.cluster({"run": "-1", "log": ""}, cpu=WHOLE_NODE, node_selector={"played": "true", "rack": rack})
        running = Running(tmp_path / name, [gang(forever, 2)])
        wait_for(lambda: _pods(core, stage, running), f"pods of {name}")
        return running

    first = launch("first", "rack-0")
    wait_for(lambda: sorted(_pods(core, stage, first).values()) == [False, True], "the first gang to be placed in part")
    held = _pods(core, stage, first)
    time.sleep(1.0)  # a cluster tells the age of things in whole seconds; of those of one second none came first
    second = launch("second", "rack-1")
    wait_for(lambda: second.records()[0].status is Status.PLANNED, "the second gang to be withdrawn")
    assert _pods(core, stage, first) == held
    core.delete_namespaced_pod("on-played-0", stage.namespace, grace_period_seconds=0)
    core.delete_namespaced_pod("on-played-2", stage.namespace, grace_period_seconds=0)
    for running in (first, second):
        wait_for(lambda running=running: running.records()[0].status is Status.RUNNING, "both gangs to run")  # type: ignore[misc]
        assert running.records()[0].attempt == 0
    assert [record.status for running in (first, second) for record in running.stop()] == [Status.STOPPED] * 2


def _occupy(stage: Stage, node: str) -> None:
    """A pod of somebody else that takes a whole node."""
    settings = stage.cluster()
    container = {"name": "other", "image": "played:1", "resources": {"requests": {"cpu": WHOLE_NODE}}}
    place = {"tolerations": settings.tolerations, "nodeSelector": {"kubernetes.io/hostname": node}}
    spec = {"containers": [container], "automountServiceAccountToken": False, **place}  # the account has its token a moment later
    pod = {"metadata": {"name": f"on-{node}", "annotations": {"played/run": "-1"}}, "spec": spec}
    core = stage.kubernetes.core()
    core.create_namespaced_pod(stage.namespace, pod)
    wait_for(lambda: core.read_namespaced_pod(f"on-{node}", stage.namespace).spec.node_name == node, f"node {node} to be taken")


def _pods(core: Any, stage: Stage, running: Running) -> dict[str, bool]:
    """Pods of a launcher's trial by uid; whether each has a node."""
    names = [record.id for record in running.records()]
    pods = core.list_namespaced_pod(stage.namespace).items
    return {pod.metadata.uid: bool(pod.spec.node_name) for pod in pods if (pod.metadata.labels or {}).get("trireme/trial") in names}
