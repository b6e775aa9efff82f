"""Slurm: the conformance suite on a real cluster, and what only this backend promises."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from launcher.backends import backend_for
from launcher.config.slurm import SlurmCluster
from tests.backends.conformance import Conformance, Ground, closing
from tests.clusters.slurm.fixture import Slurm

CLUSTER = SlurmCluster(nodes=1, gpus_per_node=2, gpu_request="none", poll_seconds=0.2)


class TestSlurm(Conformance):
    @pytest.fixture(scope="class")
    def ground(self, slurm: Slurm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
        folder = tmp_path_factory.mktemp("runs") / "trials"
        unknown = {"job_id": "4000000_0", "array": "trireme-nobody-00000000", "attempt": 0, "directory": str(folder)}
        yield from closing(Ground(lambda: backend_for(CLUSTER), CLUSTER, folder, unknown=unknown))
