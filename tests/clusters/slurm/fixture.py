"""The test cluster as a fixture: one for a test run (``tests.clusters.shared``), gone when the run ends however it ends."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.clusters import shared
from tests.clusters.slurm.cluster import Cluster
from tests.clusters.slurm.configuration import Settings, real_pyxis
from tests.clusters.slurm.packages import install, why_not
from tests.clusters.slurm.process import free_number


@dataclass(frozen=True)
class Slurm:
    """What tests get: ``SLURM_CONF`` is set. ``cluster`` is None for a cluster that somebody else runs."""

    conf: Path
    cluster: Cluster | None

    def breakable(self) -> Cluster:
        if self.cluster is None:
            pytest.skip("this test breaks or presumes things of our own cluster, and SLURM_CONF names somebody else's")
        return self.cluster


@contextmanager
def held() -> Iterator[dict[str, Any]]:
    """For the holder: start our own cluster, and end it."""
    reason = why_not()
    try:
        if reason is None:
            install()
    except (subprocess.CalledProcessError, OSError) as error:
        reason = f"the packages of the Slurm test cluster cannot be installed: {error}"
    if reason:
        yield {"obstacle": reason}
        return
    number, lock = free_number("tslurm-lock.{}")
    with lock:
        cluster = Cluster(Settings(Path(f"/tmp/tslurm{number}"), number, pyxis=real_pyxis()), with_parent=True)
        cluster.stop()  # what a run that was killed left
        try:
            cluster.start()
            yield {"directory": str(cluster.settings.directory), "number": number}
        finally:
            cluster.stop()


@pytest.fixture(scope="module")
def slurm(request: pytest.FixtureRequest) -> Iterator[Slurm]:
    """A running Slurm: the one that ``SLURM_CONF`` names, else our own."""
    if "slurm" in shared.GIVEN:
        yield Slurm(Path(os.environ["SLURM_CONF"]), None)
        return
    address = shared.address(request.config, "slurm")
    cluster = Cluster(Settings(Path(address["directory"]), address["number"], pyxis=real_pyxis()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(cluster.settings.conf))
        yield Slurm(cluster.settings.conf, cluster)


@pytest.fixture
def idle(slurm: Slurm) -> Cluster:
    """Our own cluster, which nobody else uses meanwhile."""
    return slurm.breakable()


@pytest.fixture
def whole(idle: Cluster) -> Iterator[Cluster]:
    """Our own cluster, to be broken: it is mended after the test."""
    yield idle
    idle.mend()
