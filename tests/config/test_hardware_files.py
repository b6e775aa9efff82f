"""A broken file of a measured machine stops nobody who does not ask for it, and is one plain error for whoever does."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from launcher.config import compose
from launcher.config.folders import conf_dir
from launcher.config.hardware import hardware_files, shipped_hardware
from launcher.config.yaml_text import read_yaml
from trainer.shared.run.errors import ConfigError

BROKEN = {
    "not_utf8": (b"\xff\xfe\x00", "cannot be read"),
    "not_yaml": (b"# @package cluster.hardware\nname: [\n", "not_yaml.yaml"),
    "not_known": (b"# @package cluster.hardware\nnmae: x\n", "unknown key cluster.hardware.nmae; did you mean 'name'"),
    "renamed": (
        b"# @package cluster.hardware\nreached_tflops: {bf16: 3}\n",
        "cluster.hardware.reached_tflops is called sustained_tflops now",
    ),
    "no_package": (b"nme: x\npeak_tflops: {bf16: 3}\n", "begin it with the line '# @package cluster.hardware'"),
    "zero": (b"# @package cluster.hardware\nnetwork_gbs: 0\n", "cluster.hardware.network_gbs=0 is not above 0"),
    "folder": (None, "hardware=folder does not exist"),
}


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "hardware"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text("# @package cluster.hardware\nname: mine\npeak_tflops: {fp32: 1}\n")
    (folder / "h100.yaml").write_text("# @package cluster.hardware\nname: not what ships\n")
    for name, (content, _) in BROKEN.items():
        path = folder / f"{name}.yaml"
        path.mkdir() if content is None else path.write_bytes(content)
    return folder


def test_files_that_can_be_read_are_known_whatever_lies_beside_them(measured: Path) -> None:
    found = hardware_files()
    assert found["mine"].peak_tflops == {"fp32": 1.0} and set(found) == {*shipped_hardware(), "mine"}
    assert compose(["hardware=mine"]).cluster.hardware == found["mine"]


@pytest.mark.parametrize("name", sorted(BROKEN))
def test_a_broken_file_is_a_plain_error_where_it_is_asked_for(measured: Path, name: str) -> None:
    found = hardware_files()
    assert name in found
    with pytest.raises(ConfigError, match=rf"runs/hardware/{name}\.yaml"):
        found[name]
    with pytest.raises(ConfigError) as caught:
        compose([f"hardware={name}"])
    assert BROKEN[name][1] in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"\xff", b"- slurm\n", b"defaults: [\n"])
def test_a_broken_file_of_a_cluster_is_a_plain_error(measured: Path, content: bytes) -> None:
    path = measured.parent / "cluster" / "site.yaml"
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(ConfigError):
        compose(["cluster=site"])


def test_a_device_that_ships_is_the_same_for_tables_and_for_runs(measured: Path) -> None:
    assert hardware_files()["h100"] == compose(["hardware=h100"]).cluster.hardware == shipped_hardware()["h100"]


@pytest.mark.parametrize("name", sorted(path.stem for path in (conf_dir() / "network").glob("*.yaml")))
def test_a_network_stands_in_place_of_the_devices_usual_one(name: str) -> None:
    usual, other = (compose(["hardware=a100_80", *words]).cluster.hardware for words in ([], [f"network={name}"]))
    stated = read_yaml((conf_dir() / "network" / f"{name}.yaml").read_text())
    assert stated.keys() == {"network_gbs", "network_latency_us"}
    assert other == dataclasses.replace(usual, **{key: float(value) for key, value in stated.items()})
    assert compose([f"network={name}", "hardware=a100_80"]).cluster.hardware == other  # in whatever order they are given
    assert compose([f"network={name}", "cluster.hardware.network_gbs=7"]).cluster.hardware.network_gbs == 7
