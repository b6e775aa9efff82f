"""What a container of a Slurm job is given of the host's files, and what is refused before anything is submitted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.backends.slurm.cluster import SlurmCluster
from launcher.backends.slurm.mounts import all_mounts, host_paths, runtime
from launcher.config import Config, locate_data
from launcher.config.mounts import Mount, parse_mount, seen
from launcher.config.schema import ContainerConfig, SweepConfig
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.schema import CheckpointConfig, DataConfig, ModelConfig, RunConfig

TRIAL, CODE = Path("/shared/runs/trials/ab"), Path("/shared/runs/code/cd")


def run(checkpoints: str | None = None, corpus: str | None = None) -> dict[str, Any]:
    return {"data": {"kind": "corpus" if corpus else "synthetic", "path": corpus or ""}, "run": {"checkpoint": {"dir": checkpoints}}}


def mounts(given: list[str], **paths: str) -> list[str]:
    there = [parse_mount(text) for text in given]
    return [str(mount) for mount in all_mounts(there, host_paths(run(**paths), TRIAL, CODE, there))]


def test_everything_that_a_run_opens_is_mounted_and_what_it_only_reads_is_protected() -> None:
    assert mounts([], checkpoints="/scratch/ckpt", corpus="/data/corpus") == [
        "/data/corpus:/data/corpus:ro", "/scratch/ckpt:/scratch/ckpt",
        f"{CODE}:{CODE}:ro", f"{TRIAL}:{TRIAL}",
    ]  # fmt: skip


def test_what_a_mount_brings_in_already_is_not_mounted_again() -> None:
    assert mounts(["/shared:/shared", "/lustre/me:/scratch"], checkpoints="/scratch/ckpt", corpus="/scratch/corpus") == [
        "/shared:/shared", "/lustre/me:/scratch",
    ]  # fmt: skip


def test_a_protected_parent_does_not_hide_what_is_written_in_it() -> None:
    assert mounts(["/shared:/shared:ro"]) == ["/shared:/shared:ro", f"{TRIAL}:{TRIAL}"]


def test_the_trial_is_the_launchers_own_folder_whatever_else_has_its_name_inside() -> None:
    assert mounts(["/other:/shared"])[-1] == f"{TRIAL}:{TRIAL}"


names = st.lists(st.sampled_from("abc"), max_size=3).map(lambda parts: "/" + "/".join(["x", *parts]))


@given(st.lists(st.tuples(names, names, st.booleans()), max_size=4), names, names)
def test_every_path_is_seen_as_itself_whatever_the_configured_mounts_are(given: list[tuple[str, str, bool]], one: str, two: str) -> None:
    paths = host_paths(None, Path(one), Path(two) if two != one else None)
    made = all_mounts([Mount(*entry) for entry in given], paths)
    for index, mount in enumerate(made):
        assert not any(before.target.startswith(mount.target + "/") for before in made[:index]), "a mount hides one that was made below it"
    for path in paths:
        there = seen(path.path, made)
        assert there is not None and there[0] == path.source


# ---------------------------------------------------------------- refused


def located(
    tmp_path: Path, checkpoints: str | None = None, corpus: str | None = None, where: str | None = None, **container: Any
) -> Config:
    return locate_data(
        Config(
            model=ModelConfig(vocab=300),
            data=DataConfig(kind="corpus" if corpus else "synthetic", path=corpus or "-"),
            run=RunConfig(checkpoint=CheckpointConfig(dir=checkpoints)),
            cluster=SlurmCluster(container=ContainerConfig(**{"image": "a#b"} | container)),
            sweep=SweepConfig(dir=where or str(tmp_path / "runs")),
        )
    )


@pytest.mark.parametrize(("fields", "words"), [
    ({"checkpoints": "ckpt"}, "run.checkpoint.dir=ckpt is a relative path"),
    ({"checkpoints": "/usr/share/ckpt"}, "run.checkpoint.dir=/usr/share/ckpt cannot be mounted over the image's own"),
    ({"checkpoints": "/opt"}, "run.checkpoint.dir=/opt cannot be mounted over the image's own"),
    ({"checkpoints": "/"}, "run.checkpoint.dir=/ cannot be mounted"),
    ({"checkpoints": "/scratch/a,b"}, "run.checkpoint.dir=/scratch/a,b cannot be mounted, for ','"),
    ({"checkpoints": "FILE/ckpt"}, "ckpt cannot be created: "),
    ({"checkpoints": "TMP/ckpt", "mounts": ["TMP/ckpt:TMP/ckpt:ro"]}, "brings it in read-only"),
    ({"where": "TMP/runs", "mounts": ["TMP:TMP/runs"]}, "sweep.dir=TMP/runs would be hidden by 'TMP:TMP/runs'"),
    ({"corpus": "/no/such/corpus"}, "data.path=/no/such/corpus does not exist"),
    ({"corpus": "no/such/corpus"}, "data.path=no/such/corpus does not exist"),
    ({"where": "/etc/runs"}, "sweep.dir=/etc/runs cannot be mounted"),
    ({"where": "TMP/a:b"}, "sweep.dir=TMP/a:b cannot be mounted"),
    ({"mounts": ["relative:/data"]}, "absolute paths"),
])  # fmt: skip
def test_what_a_container_cannot_be_given_is_refused_in_one_line(tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    (tmp_path / "file").touch()

    def filled(value: Any) -> Any:
        text = json.dumps(value).replace("FILE", str(tmp_path / "file")).replace("TMP", str(tmp_path))
        return json.loads(text)

    with pytest.raises(ConfigError) as error:
        located(tmp_path, **filled(fields))
    assert filled(words) in str(error.value) and "\n" not in str(error.value) and "; " in str(error.value)
    assert not (tmp_path / "runs").exists()


def bundle(tmp_path: Path, *mounted: str) -> dict[str, Any]:
    folder = tmp_path / "bundle"
    folder.mkdir()
    binds = [{"destination": path, "source": path, "type": "none", "options": ["rbind"]} for path in mounted]
    (folder / "config.json").write_text(
        json.dumps({"root": {"path": "rootfs"}, "mounts": [{"destination": "/proc", "type": "proc"}, *binds]})
    )
    return {"image": str(folder)}


def test_a_bundle_has_to_mount_what_the_run_opens(tmp_path: Path) -> None:
    image = bundle(tmp_path, str(tmp_path / "runs"))
    located(tmp_path, **image)
    with pytest.raises(
        ConfigError, match=r"run.checkpoint.dir=/scratch/ckpt is not mounted by the OCI bundle .*; add .*/scratch/ckpt.* to"
    ):
        located(tmp_path, checkpoints="/scratch/ckpt", **image)


def test_a_bundle_that_mounts_no_folder_of_trials_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"sweep.dir=.* is not mounted by the OCI bundle"):
        located(tmp_path, **bundle(tmp_path))


def test_the_runtime_of_an_image_is_told_by_its_name() -> None:
    images = {None: "none", "a#b:c": "pyxis", "/x.sqsh": "pyxis", "/x.sif": "apptainer", "/x": "oci"}
    assert {image: runtime(ContainerConfig(image)) for image in images} == images
