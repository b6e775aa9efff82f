"""A time in a file is never read as a number in base 60."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.config.compose import check_overrides
from trainer.spec import ConfigError


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
