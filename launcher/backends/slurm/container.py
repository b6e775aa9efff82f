"""Runs the ranks of a Slurm job in pyxis, Apptainer, Slurm's own OCI bundles, or on the host. Rendering is pure; ``check`` reads files."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.backends.slurm.client import Client
from launcher.backends.slurm.cluster import SlurmCluster
from launcher.backends.slurm.errors import SchedulerUnavailable
from launcher.config.mounts import Mount, parse_mount
from launcher.config.schema import ContainerConfig
from trainer.shared.run.errors import ConfigError


@dataclass(frozen=True)
class Wrapping:
    """A container in the command line: further options of srun, and a prefix of the ranks' command."""

    srun: tuple[str, ...] = ()
    command: tuple[str, ...] = ()


def wrapping(cluster: SlurmCluster, mounts: Sequence[Mount], names: Sequence[str]) -> Wrapping:
    """Returns a container with ``mounts``, in which the job's values of ``names`` win over the image's (for Apptainer, the script exports
    them)."""
    container = cluster.container
    image = container.image or ""
    match cluster.container_runtime:
        case "pyxis":
            mounted = f"--container-mounts={','.join(map(str, mounts))}"
            place = [] if container.workdir is None else [f"--container-workdir={container.workdir}"]
            flags = [*(["--container-writable"] if container.writable else []), "--no-container-mount-home", *place]
            return Wrapping((f"--container-image={image}", mounted, f"--container-env={','.join(names)}", *flags))
        case "apptainer":
            binds = [f"--bind={mount}" for mount in mounts]
            devices = [] if cluster.gpu_request == "none" else ["--nv"]
            place = [] if container.workdir is None else [f"--pwd={container.workdir}"]
            return Wrapping(
                command=("apptainer", "exec", *devices, *binds, *place, *(["--writable-tmpfs"] if container.writable else []), image)
            )
        case "oci":
            return Wrapping(srun=(f"--container={image}",))
    return Wrapping()


# ---------------------------------------------------------------- before submission


def check_container(container: ContainerConfig) -> None:
    """``ConfigError`` for an image that would not be read as one, or a folder inside that has no place."""
    if container.image is not None and (not container.image.strip() or container.image.startswith("-")):
        raise ConfigError(
            f"cluster.container.image={container.image!r} names no image; give a reference or an absolute path, or null for no container"
        )
    if container.workdir is not None and not container.workdir.startswith("/"):
        raise ConfigError(f"cluster.container.workdir={container.workdir!r} is not an absolute path; give a folder of the image")


def check(cluster: SlurmCluster, client: Client) -> None:
    """``ConfigError`` if the container cannot work: no runtime, no image, no mount. What only compute nodes hold is not looked for."""
    container = cluster.container
    if container.image is None:
        if container.runtime not in ("auto", "none"):
            raise ConfigError(
                f"cluster.container.runtime={container.runtime} without an image; give cluster.container.image, or choose cluster=slurm"
            )
        return
    if not cluster.in_container:
        raise ConfigError("cluster.container.runtime=none, but there is an image; set cluster.container.image=null, or another runtime")
    if container.image.startswith(("/", "./", "../")) and not Path(container.image).exists():
        raise ConfigError(
            f"cluster.container.image={container.image} does not exist on this machine; give a file that the nodes share with it"
        )
    for mount in map(parse_mount, container.mounts):
        if not Path(mount.source).exists():
            raise ConfigError(f"cluster.container.mounts: {mount.source} does not exist on this machine; create it, or remove the mount")
    {"pyxis": _check_pyxis, "apptainer": _check_apptainer, "oci": _check_oci}[cluster.container_runtime](cluster, client)


def _check_pyxis(cluster: SlurmCluster, client: Client) -> None:
    try:
        known = client.answer("srun", "--help")
    except SchedulerUnavailable as error:
        raise ConfigError(f"cluster.container.runtime=pyxis, but srun fails here: {error}") from None
    if "--container-image" not in known:
        raise ConfigError(
            "cluster.container.runtime=pyxis, but this Slurm's srun has no --container-image (the pyxis plugin is not installed, or not in "
            "plugstack.conf); use cluster.container.runtime=apptainer or oci, or cluster.container.image=null"
        )
    if "--container-env" not in known:
        raise ConfigError(
            "cluster.container.runtime=pyxis, but this site's pyxis has no --container-env (it came with pyxis 0.15), "
            "without which variables of "
            "the image would win over the job's; ask the site for a newer pyxis, or use cluster.container.runtime=apptainer or oci"
        )


def _check_apptainer(cluster: SlurmCluster, client: Client) -> None:
    if not (cluster.setup or cluster.setup_may_fail) and shutil.which("apptainer") is None:
        raise ConfigError(
            "cluster.container.runtime=apptainer, but there is no 'apptainer' on PATH; install it, load it with "
            "\"cluster.setup=['module load apptainer']\", or use another cluster.container.runtime"
        )


def _check_oci(cluster: SlurmCluster, client: Client) -> None:
    """Without oci.conf Slurm would run the ranks on the host, silently."""
    if cluster.launch == "srun":
        raise ConfigError(
            "cluster.launch=srun cannot be used with an OCI bundle, in which Slurm runs one task per node; set cluster.launch=torchrun"
        )
    if cluster.container.mounts:
        raise ConfigError("cluster.container.mounts cannot be used with an OCI bundle; write them into the bundle's config.json")
    if not (client.configuration_folder() / "oci.conf").exists():
        raise ConfigError(
            f"cluster.container.runtime=oci, but there is no oci.conf in {client.configuration_folder()}, without which Slurm would run "
            "the ranks on the host; ask the site for it, or use another cluster.container.runtime"
        )
    bundle = Path(cluster.container.image or "")
    if not (bundle / "config.json").exists():
        raise ConfigError(f"cluster.container.image={bundle} is not an OCI bundle (it holds no config.json)")
