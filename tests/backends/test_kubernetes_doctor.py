"""``trireme doctor`` in real pods: the same probe, its figures brought home over the pods' logs, nothing left in the namespace."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from launcher.cli import doctor
from launcher.config import Config
from launcher.config.schema import SweepConfig
from launcher.sweep.oneoff import run_job
from tests.clusters.kubernetes.fixture import Kubernetes
from tests.clusters.slurm.process import wait_for


@pytest.mark.campaign("kubernetes")
def test_two_pods_are_measured_with_the_network_between_them(real_node: Kubernetes, tmp_path: Path) -> None:
    with real_node.namespace() as namespace:
        cluster = real_node.cluster(namespace, nodes=2, gpus_per_node=1)
        config = Config(cluster=cluster, sweep=SweepConfig(dir=str(tmp_path)))
        config = dataclasses.replace(config, run=dataclasses.replace(config.run, device="cpu"))
        lines: list[object] = []
        figures = run_job(doctor.asked(config), "doctor", lambda _, line: lines.append(line))["probe"]
        core = real_node.core()
        wait_for(lambda: not core.list_namespaced_pod(namespace).items, "the pods to be gone")
    assert (figures["nodes"], figures["per_node"]) == (2, 1)
    assert {(one["size"], one["near"]) for one in figures["exchanges"]} == {(2, 1)}
    assert any(lines), "progress is seen while the pods run"
    assert list(tmp_path.iterdir()) == []
