"""The launcher that runs in the cluster (``--in-cluster``): its Job, and what that is called. No cluster."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from launcher.backends.kubernetes.inside import launcher_name
from launcher.cli.main import main

LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
"""RFC 1123, as an API server demands it of a Job whose pods carry its name in a label."""


@given(st.text(max_size=80), st.text(max_size=80))
def test_every_pipeline_has_a_valid_and_stable_name(pipeline: str, folder: str) -> None:
    name = launcher_name(pipeline, f"/runs/{folder}")
    assert LABEL.fullmatch(name) and name == launcher_name(pipeline, f"/runs/{folder}/.")


def test_no_two_pipelines_or_folders_share_a_name() -> None:
    long = "a" * 51
    pipelines = ["a_b", "a-b", "A-b", f"{long}b", f"{long}c", "a", "", "ä"]
    folders = ["/runs", "/runs/a", "/Runs"]
    assert len({launcher_name(pipeline, folder) for pipeline in pipelines for folder in folders}) == len(pipelines) * len(folders)


def test_the_printed_job_has_that_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "pipeline").mkdir()
    (tmp_path / "pipeline" / "My_Pipe.yaml").write_text("stages:\n  data: {stage: prepare, data: stdlib}\n")
    place = [
        "cluster=kubernetes",
        "cluster.container.image=i",
        "sweep.dir=/runs/a",
        f"++cluster.volumes=[{{mount: /runs, claim: runs}}, {{mount: '{tmp_path}', claim: c}}]",
    ]
    assert main(["run", "pipeline=My_Pipe", *place, "--config-dir", str(tmp_path), "--in-cluster", "l", "--dry-run"]) == 0
    name = yaml.safe_load(capsys.readouterr().out)["metadata"]["name"]
    assert name == launcher_name("My_Pipe", "/runs/a") and name.startswith("trireme-run-my-pipe-")
