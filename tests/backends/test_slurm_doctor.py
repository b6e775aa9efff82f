"""``trireme doctor`` on two real Slurm nodes: the same probe, and the network between nodes besides."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from launcher.cli import doctor
from launcher.config import Config
from launcher.config.schema import SweepConfig
from launcher.cost.calibration import hardware
from launcher.sweep.oneoff import run_job
from launcher.trials.job import JobState
from tests.backends.slurm_support import CLUSTER, squeue
from tests.clusters.slurm import Cluster
from tests.clusters.slurm.fixture import Slurm
from tests.sweep.support import until

pytestmark = pytest.mark.campaign("slurm")


def test_two_nodes_are_measured_with_the_network_between_them(slurm: Slurm, tmp_path: Path) -> None:
    config = Config(cluster=dataclasses.replace(CLUSTER, nodes=2, gpus_per_node=2), sweep=SweepConfig(dir=str(tmp_path)))
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, device="cpu"))
    figures = run_job(doctor.asked(config), "doctor", lambda *_: None)["probe"]
    assert (figures["nodes"], figures["per_node"]) == (2, 2)
    groups = {(one["size"], one["near"]) for one in figures["exchanges"] if one["operation"] == "all_reduce"}
    assert groups == {(2, 2), (2, 1), (4, 2)}, "inside a node, between nodes, everyone"
    found = hardware("two", figures)
    assert found.network_gbs and found.link_gbs
    assert list(tmp_path.iterdir()) == [], "nothing of it is left behind"


def test_an_interrupted_probe_leaves_the_queue(idle: Cluster, tmp_path: Path) -> None:
    config = Config(cluster=dataclasses.replace(CLUSTER, gpus_per_node=2), sweep=SweepConfig(dir=str(tmp_path)))
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, device="cpu"))

    def interrupt(state: JobState, line: dict[str, Any] | None) -> None:
        if line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_job(doctor.asked(config), "doctor", interrupt)
    until(lambda: not {"PENDING", "RUNNING", "COMPLETING"} & {state for (state,) in squeue("State")})
    assert list(tmp_path.iterdir()) == []
