"""The test cluster as a fixture: one for a test run, made when the first test asks for it, gone when the run ends however it ends."""

from __future__ import annotations

import fcntl
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.clusters.slurm.cluster import Cluster
from tests.clusters.slurm.configuration import Settings
from tests.clusters.slurm.packages import install, why_not


@dataclass(frozen=True)
class Slurm:
    """What tests get: ``SLURM_CONF`` is set. ``cluster`` can be broken at will; it is None for a cluster that somebody else runs."""

    conf: Path
    cluster: Cluster | None

    def breakable(self) -> Cluster:
        if self.cluster is None:
            pytest.skip("this test breaks or presumes things of our own cluster, and SLURM_CONF names somebody else's")
        return self.cluster


@pytest.fixture(scope="session")
def slurm() -> Iterator[Slurm]:
    """A running Slurm: the one that ``SLURM_CONF`` names, else our own."""
    if "SLURM_CONF" in os.environ:
        yield Slurm(Path(os.environ["SLURM_CONF"]), None)
        return
    reason = why_not()
    if reason:
        pytest.skip(reason)
    try:
        install()
    except (subprocess.CalledProcessError, OSError) as error:
        pytest.skip(f"the packages of the Slurm test cluster cannot be installed: {error}")
    with _free_number() as number:
        cluster = Cluster(Settings(Path(f"/tmp/tslurm{number}"), number, pyxis=real_pyxis()), with_parent=True)
        cluster.stop()  # what a run that was killed left
        cluster.start()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SLURM_CONF", str(cluster.settings.conf))
            try:
                yield Slurm(cluster.settings.conf, cluster)
            finally:
                cluster.stop()


def real_pyxis() -> Path | None:
    """The folder in which the script `pyxis` has built pyxis and enroot, from ``TRIREME_TEST_PYXIS``."""
    folder = os.environ.get("TRIREME_TEST_PYXIS")
    return Path(folder) if folder else None


@pytest.fixture
def whole(slurm: Slurm) -> Iterator[Cluster]:
    """Our own cluster, to be broken: it is mended after the test."""
    cluster = slurm.breakable()
    yield cluster
    cluster.mend()


@contextmanager
def _free_number() -> Iterator[int]:
    """A number that no other test run on this machine uses meanwhile."""
    with ExitStack() as stack:
        for number in range(40):
            lock = stack.enter_context(open(f"/tmp/tslurm-lock.{number}", "w"))
            with suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield number
                return
    raise RuntimeError("forty test clusters run on this machine already")
