"""A time in a file is never read as a number in base 60."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.config.compose import check_overrides
from launcher.config.misread import refuse_misread
from trainer.shared.run.errors import ConfigError


@pytest.fixture
def site(tmp_path: Path) -> Path:
    (tmp_path / "cluster").mkdir()
    return tmp_path


def test_a_time_that_yaml_reads_in_base_60_is_refused_with_its_line(site: Path) -> None:
    (site / "cluster" / "ours.yaml").write_text("defaults: [_slurm, _self_]\nbackend: slurm\ntime: 4:00:00\n")
    with pytest.raises(ConfigError, match=r"ours\.yaml, line 3: YAML reads time: 4:00:00 as the number 14400; write it in quotes"):
        check_overrides(["cluster=ours"], folder=site)


@pytest.mark.parametrize("time", ["'4:00:00'", '"4:00:00"', "240", "1-0", "a:b"])
def test_quoted_times_and_numbers_are_read(site: Path, time: str) -> None:
    (site / "cluster" / "ours.yaml").write_text(f"defaults: [_slurm, _self_]\nbackend: slurm\ntime: {time}\n")
    assert check_overrides(["cluster=ours"], folder=site) == ["cluster=ours"]


@pytest.mark.parametrize(
    ("chosen", "files"),
    [
        ("cluster=ours", {"cluster/ours": "defaults: [_slurm, long, _self_]\nbackend: slurm\n"}),
        ("cluster=ours", {"cluster/ours": "defaults: [middle, _self_]\n", "cluster/middle": "defaults: [_slurm, long]\nbackend: slurm\n"}),
        ("cluster=ours", {"cluster/ours": "defaults: [/cluster: [_slurm, long], _self_]\nbackend: slurm\n"}),
        (
            "cluster=ours",
            {"cluster/ours": "defaults: [_slurm, optional sites: long]\nbackend: slurm\n", "cluster/sites/long": "time: 4:00:00\n"},
        ),
        ("recipe=mine", {"recipe/mine": "# @package _global_\ndefaults: [override /cluster@cluster: long]\n"}),
    ],
)
def test_a_time_that_a_file_inherits_is_refused_with_its_own_line(site: Path, chosen: str, files: dict[str, str]) -> None:
    for name, text in {"cluster/long": "time: 4:00:00\n", **files}.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / f"{name}.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"long\.yaml, line 1: YAML reads time: 4:00:00 as the number 14400; write it in quotes"):
        check_overrides([chosen], folder=site)


def test_files_that_include_each_other_are_left_to_who_composes_them(site: Path) -> None:
    (site / "cluster" / "ours.yaml").write_text("defaults: [theirs, _slurm]\n")
    (site / "cluster" / "theirs.yaml").write_text("defaults: [ours, null, {}, 3]\n")
    assert check_overrides(["model=gpt_tiny", "model=gpt_mini"], folder=site)
    refuse_misread([site], "cluster", "ours")
