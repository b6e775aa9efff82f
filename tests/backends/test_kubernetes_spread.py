"""Where the pods of a trial run: each on a node of its own, placed by the real scheduler."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.backends import backend_for
from tests.backends.conformance import LONG, Ground, closing
from tests.clusters.kubernetes.fixture import Kubernetes
from tests.clusters.kubernetes.stage import Gang, Stage
from trainer.shared.records.outcome import Reason, Status


@pytest.fixture
def stage(played_nodes: Kubernetes, namespace: str, tmp_path: Path) -> Iterator[Stage]:
    made = Stage(played_nodes, namespace, tmp_path)
    yield made
    for backend in made.opened:
        backend.close()


def node_of(stage: Stage) -> str:
    """One of the played nodes."""
    return str(stage.kubernetes.core().list_node(label_selector="played=true").items[0].metadata.labels["kubernetes.io/hostname"])


def test_pods_of_a_trial_run_on_as_many_nodes_though_one_has_room_for_all(stage: Stage) -> None:
    gang = stage.submit({"run": "-1"}, nodes=3, gpus_per_node=1, gpu_resource=None)
    state = gang.until(lambda state: state.status is Status.RUNNING)
    assert len(set(state.nodes)) == 3 and state.detail == ""


def test_a_trial_that_finds_fewer_nodes_than_it_asked_for_waits_and_says_why(stage: Stage) -> None:
    gang = stage.submit({"run": "-1"}, nodes=2, gpu_resource=None, node_selector={"kubernetes.io/hostname": node_of(stage)})
    state = gang.until(lambda state: "anti-affinity" in state.detail)
    assert state.status is Status.SUBMITTED


def test_a_trial_that_may_share_nodes_says_so_in_its_record(stage: Stage) -> None:
    one = {"kubernetes.io/hostname": node_of(stage)}
    gang = stage.submit(nodes=2, gpu_resource=None, spread=False, node_selector=one)
    state = gang.end()
    assert (state.status, state.detail) == (Status.DONE, "its 2 pods share 1 node")


@pytest.mark.parametrize("only", [True, False], ids=["the only node", "others are free"])
def test_a_node_at_fault_is_shunned_where_others_are_free_and_used_where_it_is_the_only_one(stage: Stage, only: bool) -> None:
    bad = node_of(stage)
    cluster = stage.cluster(
        {"run": "-1"}, nodes=1, gpu_resource=None, **({"node_selector": {"kubernetes.io/hostname": bad}} if only else {})
    )
    job, backend = dataclasses.replace(stage.job(cluster), avoid=(bad,)), stage.backend(cluster)
    (handle,) = backend.submit([backend.render(job)])
    state = Gang(stage, backend, job, handle).until(lambda state: state.status is Status.RUNNING)
    assert (bad in state.nodes) is only


def test_a_trial_past_its_deadline_is_ended_by_the_cluster_and_says_so(real_node: Kubernetes, tmp_path: Path) -> None:
    with real_node.namespace() as namespace:
        cluster = real_node.cluster(namespace, nodes=2, gpus_per_node=1, deadline_seconds=5)
        for ground in closing(Ground(lambda: backend_for(cluster), cluster, tmp_path)):
            job = ground.job(LONG)
            (handle,) = ground.submit(job)
            state = ground.end(job, handle)
            assert state.status.final and state.reason is Reason.TIME_LIMIT, state
