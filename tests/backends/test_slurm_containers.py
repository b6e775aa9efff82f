"""Trials in containers under a real Slurm: pyxis' options (by a plugin of ours), Apptainer's command line (by a stand-in), OCI bundles (runc)."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.backends.slurm.backend import SlurmBackend
from launcher.backends.slurm.client import Client
from launcher.backends.slurm.container import check as check_container
from launcher.cli import logs
from launcher.config import Config, locate_data, resolve
from launcher.config.schema import ContainerConfig
from launcher.trials.store import Record
from tests.backends.slurm_support import CLUSTER, run, squeue, trial
from tests.clusters.slurm import Cluster
from tests.clusters.slurm.configuration import oci_conf
from tests.clusters.slurm.fixture import Slurm
from trainer.data.prepare import prepare
from trainer.shared.records.outcome import Reason, Status
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.schema import CheckpointConfig, DataConfig

STAND_IN = Path(__file__).parents[1] / "clusters" / "slurm" / "apptainer"
INSIDE = "/opt/ranks/python"
OF_THE_IMAGE = {
    "PYTHONPATH": "/opt/image",
    "OMP_NUM_THREADS": "64",
    "GREETING": "image",
    "MASTER_PORT": "1",
    "WORLD_SIZE": "1",
    "ONLY": "image",
}
"""What images of this field set, and what would break a job if it held."""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root file system that borrows the host's /usr and Python, has an interpreter that exists nowhere else, and sets variables."""
    root = tmp_path / "image"
    for name in ("tmp", "etc", "opt/ranks", "usr", "proc", "sys", "dev", ".singularity.d/env"):
        (root / name).mkdir(parents=True)
    for name in ("bin", "lib", "lib64", "sbin"):
        if Path("/", name).is_symlink():
            (root / name).symlink_to(Path("/", name).readlink())
    executable(root / INSIDE[1:], f'env >&2; exec {sys.executable} "$@"')
    (root / "etc" / "environment").write_text("".join(f"{name}={value}\n" for name, value in OF_THE_IMAGE.items()))
    (root / ".singularity.d" / "env" / "90-environment.sh").write_text("".join(f"export {n}={v}\n" for n, v in OF_THE_IMAGE.items()))
    return root


def executable(path: Path, line: str) -> None:
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)


@pytest.fixture
def packed(slurm: Slurm) -> Callable[[Path], Path]:
    """What makes an image for pyxis of a root file system: the real one takes a squashfs file, the stand-in the folder itself."""

    def pack(root: Path) -> Path:
        if slurm.breakable().settings.pyxis is None:
            return root
        target = root.with_suffix(".sqsh")
        subprocess.run(["mksquashfs", root, target, "-noappend", "-quiet", "-no-progress"], check=True, stdout=subprocess.DEVNULL)
        return target

    return pack


@pytest.fixture
def image(root: Path, packed: Callable[[Path], Path]) -> Path:
    return packed(root)


@pytest.fixture
def mounts() -> list[str]:
    """What the image borrows."""
    folders = {"/usr", sys.prefix, str(Path(sys.executable).resolve().parents[1])}
    return [f"{folder}:{folder}:ro" for folder in sorted(folders)]


def contained(image: Path, runtime: str, mounts: list[str], **fields: Any) -> Config:
    container = ContainerConfig(str(image), runtime, mounts)
    return trial(container=container, **{"python": INSIDE, "nodes": 2, "code": "snapshot", **fields})


def saving(config: Config, folder: Path) -> Config:
    """``config``, with checkpoints in ``folder``."""
    return replace(config, run=replace(config.run, checkpoint=CheckpointConfig(str(folder), every=2)))


def checkpoints(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("step-*")}


def environment(record: Record) -> dict[str, str]:
    """The variables that rank 0 found, which its interpreter has printed."""
    log = (record.directory / "logs" / "attempt0.rank0.log").read_text()
    return dict(line.split("=", 1) for line in log.splitlines() if "=" in line)


def check_variables(record: Record) -> None:
    """The job's own values hold, those that only the image sets stay, and the image's modules come after the job's."""
    assert record.status is Status.DONE, record.detail
    found = environment(record)
    assert (found["OMP_NUM_THREADS"], found["GREETING"], found["WORLD_SIZE"], found["ONLY"]) == ("1", "job, really", "1", "image")
    assert found["MASTER_PORT"] != "1"
    code, *behind = found["PYTHONPATH"].split(":")
    assert Path(code).parent.name == "code" and "/opt/image" in behind


@pytest.mark.campaign("slurm")
def test_a_sweep_in_a_container_has_the_losses_of_the_host(tmp_path: Path, image: Path, mounts: list[str]) -> None:
    inside = run(tmp_path / "runs", *(contained(image, "pyxis", mounts, ranks=ranks) for ranks in (1, 2)))
    assert [record.status for record in inside] == [Status.DONE] * 2, inside
    outside = run(tmp_path / "runs", trial(), name="host")
    assert (inside[0].read_result() or {})["losses"] == (outside[0].read_result() or {})["losses"]


@pytest.mark.campaign("slurm")
def test_a_job_is_left_alone_while_its_container_is_removed(slurm: Slurm, tmp_path: Path, image: Path, mounts: list[str]) -> None:
    """A large container takes longer to remove than the trial to run; whoever ends the job meanwhile leaves it on the node for good."""
    (record,) = run(tmp_path / "runs", contained(image, "pyxis", mounts, env={"TEST_CONTAINER_REMOVAL_SECONDS": "20"}))
    assert record.status is Status.DONE, record.detail
    assert [state for name, state in squeue("Name", "State") if name == (record.handle or {})["array"]] == ["COMPLETED"]
    assert not list(slurm.breakable().settings.containers.glob("*/*"))


@pytest.mark.parametrize("runtime", ["pyxis", "apptainer"])
def test_the_jobs_variables_win_over_the_images_and_what_a_run_reads_and_writes_outlives_its_container(
    tmp_path: Path, root: Path, packed: Callable[[Path], Path], mounts: list[str], runtime: str
) -> None:
    """Checkpoints go where the configuration says, into a folder that nobody has made or mounted; the corpus comes from the host."""
    corpus, folder = tmp_path / "corpus", tmp_path / "else where" / "checkpoints"
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question\n" * 100)
    data = DataConfig(source=str(tmp_path / "text.txt"), path=str(corpus), vocab=300)
    prepare(data)
    image = packed(root) if runtime == "pyxis" else root
    config = contained(image, runtime, mounts, env={"GREETING": "job, really"}, setup=[f"PATH={STAND_IN.parent}:$PATH"])
    config = saving(config, folder)
    config = locate_data(resolve(replace(config, data=data, model=replace(config.model, vocab=300))))
    (record,) = run(tmp_path / "runs", config)
    check_variables(record)
    assert checkpoints(folder)


@pytest.fixture
def bundle(slurm: Slurm, tmp_path: Path, root: Path, mounts: list[str]) -> Iterator[Path]:
    """The image as an OCI bundle, on a cluster that is configured for such. Folders of trials are mounted by the bundle itself."""
    folder, settings = tmp_path / "bundle", slurm.breakable().settings
    binds = [mount.split(":")[:2] for mount in [*mounts, "/dev:/dev", "/sys:/sys", "/etc:/etc", f"{tmp_path}:{tmp_path}"]]
    config = {
        "ociVersion": "1.0.2",
        "root": {"path": "rootfs"},
        "process": {"user": {"uid": 0, "gid": 0}, "args": ["sh"], "cwd": "/", "env": [f"{n}={v}" for n, v in OF_THE_IMAGE.items()]},
        "mounts": [{"destination": "/proc", "type": "proc", "source": "proc"}]
        + [{"destination": target, "type": "none", "source": source, "options": ["rbind"]} for source, target in binds],
        "linux": {"namespaces": [{"type": kind} for kind in ("pid", "ipc", "mount")]},  # the node's network and host name
    }
    folder.mkdir()
    root.rename(folder / "rootfs")
    (folder / "config.json").write_text(json.dumps(config))
    conf = settings.directory / "etc" / "oci.conf"
    conf.write_text(oci_conf(settings))
    yield folder
    conf.unlink()


def test_an_oci_bundle_runs_one_torchrun_per_node(tmp_path: Path, bundle: Path) -> None:
    (record,) = run(tmp_path / "runs", contained(bundle, "oci", [], ranks=2, data=2, gpus_per_node=2, env={"GREETING": "job, really"}))
    assert record.status is Status.DONE, record.detail
    assert environment(record)["GREETING"] == "job, really"
    result = record.read_result() or {}
    assert result["world_size"] == 4 and len(result["hosts"]) == 2


def test_a_container_that_does_not_open_says_why(tmp_path: Path, image: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An image with which nothing is wrong until a node opens it: here it lacks the programs that every image has."""
    (record,) = run(tmp_path / "runs", contained(image, "pyxis", ["/usr:/usr:ro", "/proc/1/mem:/usr/no/such/place"]))
    assert record.status is Status.FAILED and "/usr/no/such/place" in record.detail, record.detail
    assert logs.main([record.id, "--dir", str(tmp_path / "runs")]) == 0
    assert "/usr/no/such/place" in capsys.readouterr().out


@pytest.mark.parametrize(("line", "fields", "words"), [
    (f'exec {sys.executable} "$@"', {"code": "image"}, "has no trainer"),
    pytest.param(f'exec {sys.executable} -S "$@"', {}, "has no package yaml", marks=pytest.mark.campaign("slurm")),
    pytest.param("echo Unknown option: -P >&2; exit 2", {}, "is older than 3.11", marks=pytest.mark.campaign("slurm")),
    (f'exec {sys.executable} "$@"', {"python": "/opt/ranks/no/python"}, "does not exist there"),
])  # fmt: skip
def test_an_image_whose_python_cannot_run_the_ranks_is_named(
    tmp_path: Path, root: Path, packed: Callable[[Path], Path], mounts: list[str], line: str, fields: dict[str, Any], words: str
) -> None:
    executable(root / INSIDE[1:], line)
    image = packed(root)
    (record,) = run(tmp_path / "runs", contained(image, "pyxis", mounts, **fields))
    assert (record.status, record.reason) == (Status.FAILED, Reason.CANNOT_START), record.detail
    assert words in record.detail and str(image) in record.detail and "; " in record.detail


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


def test_a_pyxis_under_which_the_image_would_win_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As srun's help looks with pyxis before 0.15."""
    executable(tmp_path / "srun", "echo '      --container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH'")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    cluster = replace(CLUSTER, container=container(image="registry#image", runtime="pyxis"))
    with pytest.raises(ConfigError, match=r"no --container-env .*0\.15.*; ask the site"):
        check_container(cluster, Client(cluster))


def test_without_oci_conf_slurm_itself_would_run_on_the_host(whole: Cluster) -> None:
    """Why the check above is there: if this fails, Slurm has learnt to refuse, and the check may go."""
    done = subprocess.run(["srun", "--container=/no/such", "hostname"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stdout.strip()) == (0, "n1")
