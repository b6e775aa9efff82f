"""Trials in containers under a real Slurm: pyxis' options (by a plugin of ours), Apptainer's command line (by a stand-in), OCI bundles (runc)."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.backends.slurm import SlurmBackend
from launcher.cli import logs
from launcher.config.schema import ContainerConfig
from tests.backends.slurm_support import CLUSTER, run, trial
from tests.clusters.slurm import Cluster
from tests.clusters.slurm.configuration import oci_conf
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


@pytest.fixture
def bundle(slurm: Slurm, tmp_path: Path, image: Path, mounts: list[str]) -> Iterator[Path]:
    """The image as an OCI bundle, on a cluster that is configured for such. Folders of trials are mounted by the bundle itself."""
    folder, settings = tmp_path / "bundle", slurm.breakable().settings
    binds = [mount.split(":")[:2] for mount in [*mounts, "/dev:/dev", "/sys:/sys", "/etc:/etc", f"{tmp_path}:{tmp_path}"]]
    config = {
        "ociVersion": "1.0.2",
        "root": {"path": "rootfs"},
        "process": {"user": {"uid": 0, "gid": 0}, "args": ["sh"], "cwd": "/"},
        "mounts": [{"destination": "/proc", "type": "proc", "source": "proc"}]
        + [{"destination": target, "type": "none", "source": source, "options": ["rbind"]} for source, target in binds],
        "linux": {"namespaces": [{"type": kind} for kind in ("pid", "ipc", "mount")]},  # the node's network and host name
    }
    folder.mkdir()
    image.rename(folder / "rootfs")
    (folder / "config.json").write_text(json.dumps(config))
    conf = settings.directory / "etc" / "oci.conf"
    conf.write_text(oci_conf(settings))
    yield folder
    conf.unlink()


def test_an_oci_bundle_runs_one_torchrun_per_node(tmp_path: Path, bundle: Path) -> None:
    (record,) = run(tmp_path / "runs", contained(bundle, "oci", [], ranks=2, data=2, gpus_per_node=2))
    assert record.status is Status.DONE, record.detail
    result = record.result() or {}
    assert result["world_size"] == 4 and len(result["hosts"]) == 2


def test_a_container_that_does_not_open_says_why(slurm: Slurm, tmp_path: Path, image: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An image with which nothing is wrong until a node opens it: here it lacks the programs that every image has."""
    slurm.breakable()
    (record,) = run(tmp_path / "runs", contained(image, "pyxis", ["/usr:/usr:ro", "/proc/1/mem:/usr/no/such/place"]))
    assert record.status is Status.FAILED and "cannot mount /proc/1/mem" in record.detail, record.detail
    assert logs.main([record.id, "--dir", str(tmp_path / "runs")]) == 0
    assert "cannot mount /proc/1/mem" in capsys.readouterr().out


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
