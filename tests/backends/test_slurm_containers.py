"""Trials in containers under a real Slurm: pyxis' options (by a plugin of ours) and Apptainer's command line (by a stand-in)."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher.backends.slurm import SlurmBackend
from launcher.config.schema import ContainerConfig
from tests.backends.slurm_support import CLUSTER, run, trial
from tests.clusters.slurm import Cluster
from tests.clusters.slurm.fixture import Slurm
from trainer.config import ConfigError, Status

STAND_IN = Path(__file__).parents[1] / "clusters" / "slurm" / "apptainer"
INSIDE = "/opt/ranks/python"


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """A root file system that borrows the host's /usr and Python, and has an interpreter that exists nowhere else."""
    root = tmp_path / "image"
    for name in ("bin", "lib", "lib64", "sbin"):
        if Path("/", name).is_symlink():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).symlink_to(Path("/", name).readlink())
    for name in ("tmp", "etc", "opt/ranks", "usr"):
        (root / name).mkdir(parents=True)
    (root / INSIDE[1:]).write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (root / INSIDE[1:]).chmod(0o755)
    return root


@pytest.fixture
def mounts() -> list[str]:
    """What the image borrows."""
    folders = {"/usr", sys.prefix, str(Path(sys.executable).resolve().parents[1])}
    return [f"{folder}:{folder}:ro" for folder in sorted(folders)]


def contained(image: Path, runtime: str, mounts: list[str], **fields: Any) -> Any:
    container = ContainerConfig(str(image), runtime, mounts)
    return trial(container=container, python=INSIDE, nodes=2, code="snapshot", **fields)


def test_a_sweep_in_a_container_has_the_losses_of_the_host(slurm: Slurm, tmp_path: Path, image: Path, mounts: list[str]) -> None:
    slurm.breakable()
    inside = run(tmp_path / "runs", *(contained(image, "pyxis", mounts, ranks=ranks) for ranks in (1, 2)))
    assert [record.status for record in inside] == [Status.DONE] * 2, inside
    outside = run(tmp_path / "runs", trial(), name="host")
    assert (inside[0].result() or {})["losses"] == (outside[0].result() or {})["losses"]


def test_apptainer_runs_the_ranks_inside(slurm: Slurm, tmp_path: Path, image: Path, mounts: list[str]) -> None:
    slurm.breakable()
    (record,) = run(tmp_path / "runs", contained(image, "apptainer", mounts, setup=[f"PATH={STAND_IN.parent}:$PATH"]))
    assert record.status is Status.DONE, record.detail


# ---------------------------------------------------------------- said before anything is submitted


def check(**fields: Any) -> None:
    SlurmBackend(type(CLUSTER)(**{**vars(CLUSTER), **fields})).check()


def container(**fields: Any) -> ContainerConfig:
    return ContainerConfig(**fields)


@pytest.mark.parametrize(("fields", "words"), [
    ({"image": "/no/such.sqsh"}, "/no/such.sqsh does not exist"),
    ({"image": "registry#image", "mounts": ["/no/such:/data"]}, "/no/such does not exist"),
    ({"image": "registry#image", "mounts": ["relative:/data"]}, "absolute paths"),
    ({"runtime": "pyxis"}, "without an image"),
    ({"image": "registry#image", "runtime": "none"}, "there is an image"),
    ({"image": "/usr", "runtime": "oci"}, "oci.conf"),
    ({"image": "/usr", "runtime": "oci", "mounts": ["/usr:/usr"]}, "bundle's config.json"),
])  # fmt: skip
def test_a_container_that_cannot_work_is_refused(slurm: Slurm, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check(container=container(**fields))


def test_apptainer_that_is_not_installed_is_named_unless_the_job_sets_it_up(slurm: Slurm) -> None:
    if shutil.which("apptainer"):
        pytest.skip("this machine has Apptainer")
    with pytest.raises(ConfigError, match="no 'apptainer' on PATH"):
        check(container=container(image="/usr", runtime="apptainer"))
    check(container=container(image="/usr", runtime="apptainer"), setup=["module load apptainer"])


def test_pyxis_that_is_not_installed_is_named(slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same cluster, as it looks to a client without the plugin."""
    folder = slurm.breakable().settings.directory / "etc"
    plain = tmp_path / "slurm.conf"
    plain.write_text("".join(line for line in (folder / "slurm.conf").open() if not line.startswith("PlugStackConfig")))
    shutil.copy(folder / "topology.conf", tmp_path)
    monkeypatch.setenv("SLURM_CONF", str(plain))
    with pytest.raises(ConfigError, match="no --container-image"):
        check(container=container(image="registry#image", runtime="pyxis"))


def test_without_oci_conf_slurm_itself_would_run_on_the_host(whole: Cluster) -> None:
    """Why the check above is there: if this fails, Slurm has learnt to refuse, and the check may go."""
    done = subprocess.run(["srun", "--container=/no/such", "hostname"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stdout.strip()) == (0, "n1")
