"""A pipeline on the real Slurm: the whole graph goes to the queue at once, and needs no launcher from then on."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from launcher.cli.main import main
from tests.backends.slurm_support import squeue, submissions, warmth
from tests.backends.test_slurm_containers import INSIDE, image, mounts, packed, root
from tests.clusters.slurm import Cluster
from tests.clusters.slurm.fixture import Slurm
from tests.stages.conftest import GRAPH, attempts, kill_many, write
from tests.sweep.support import until
from trainer.shared.records.artifacts import read_artifact

__all__ = ["image", "mounts", "packed", "root"]
PLACE = ["cluster=slurm", "cluster.gpu_request=none", "cluster.poll_seconds=0.2", "cluster.visibility_s=1", "run.device=cpu"]


def run(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict[str, dict[str, Any]]:
    """What the command says of each stage."""
    capsys.readouterr()
    assert main(["run", "pipeline=small", "--config-dir", "conf", "--json", *PLACE, *words]) == code
    return {stage["name"]: stage for stage in json.loads(capsys.readouterr().out)["stages"]}


def jobs(said: dict[str, dict[str, Any]]) -> dict[str, list[dict[str, str]]]:
    """What ``scontrol`` says of the jobs of each stage, which are known by the stage's id in their names."""
    found: dict[str, list[dict[str, str]]] = {}
    for identifier, name in squeue("JobID", "Name"):
        for stage in said.values():
            if stage["id"] in name:
                text = subprocess.run(["scontrol", "show", "job", "--oneliner", identifier], capture_output=True, text=True).stdout
                found.setdefault(stage["name"], []).append(dict(re.findall(r"(\w+)=(\S*)", text)))
    return found


def wait_for_artifacts(said: dict[str, dict[str, Any]]) -> None:
    deadline = time.monotonic() + 300
    while any(read_artifact(Path(stage["folder"])) is None for stage in said.values()):
        assert time.monotonic() < deadline, squeue("Name", "State", "Reason")
        time.sleep(0.2)


@contextmanager
def busy(cluster: Cluster) -> Iterator[None]:
    """Nothing begins meanwhile: a job that has ended is no dependency any more. All nodes are taken."""
    command = ["sbatch", "--parsable", f"--nodes={cluster.settings.nodes}", "--exclusive", "--output=/dev/null", "--wrap=sleep 1000"]
    job = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    until(lambda: [job, "RUNNING"] in squeue("JobID", "State"))
    try:
        yield
    finally:
        subprocess.run(["scancel", job], check=True)


@pytest.mark.parametrize("stages", [["data", "base", "score"], pytest.param([*GRAPH], marks=pytest.mark.campaign("slurm"))], ids=len)
def test_the_whole_graph_is_submitted_at_once_and_runs_without_a_launcher(
    idle: Cluster, folder: Path, stages: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    write(folder, {name: GRAPH[name] for name in stages})
    warm = [f"cluster.{key}={value}" for key, value in warmth().items()]
    with busy(idle):
        said = run(capsys, "sweep.follow=false", *warm)
        assert {stage["status"] for stage in said.values()} == {"submitted"}
        queued = jobs(said)
    ids = {name: rows[0]["ArrayJobId"] for name, rows in queued.items()}
    waits = {name: sorted(re.findall(r"afterok:(\d+)", rows[0]["Dependency"])) for name, rows in queued.items()}
    wanted = {"data": [], "base": ["data"], "score": ["data", "base"], "hf": ["base"], "text": ["hf"]}
    assert waits == {name: sorted(ids[first] for first in wanted[name]) for name in stages}
    assert all("trireme-small-" in rows[0]["JobName"] for rows in queued.values())
    wait_for_artifacts(said)
    again = run(capsys, *warm)
    assert {stage["status"] for stage in again.values()} == {"reused"}
    assert {name: len(rows) for name, rows in jobs(said).items()} == dict.fromkeys(stages, 1), "a stage was submitted twice"


@pytest.mark.campaign("slurm")
def test_nothing_behind_a_stage_that_failed_is_run(slurm: Slurm, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder, GRAPH | {"base": GRAPH["base"] | {"optimizer.lr": 1e30, "run.steps": 8}})
    said = run(capsys, code=1)
    failed = dict.fromkeys(("score", "hf", "text"), "upstream failed")
    assert {name: stage["status"] for name, stage in said.items()} == {"data": "done", "base": "failed"} | failed
    assert {said[name]["detail"] for name in failed} == {"stage base failed"}
    assert set(jobs(said)) == set(GRAPH)
    begun = {name for name in GRAPH if list(Path("runs/trials", said[name]["id"], "logs").glob("*.slurm.log"))}
    assert begun == {"data", "base"}, "a job behind the failed one has started"
    write(folder, GRAPH)
    again = run(capsys)
    assert {name: stage["status"] for name, stage in again.items()} == {"data": "reused"} | dict.fromkeys(("base", *failed), "done")


@pytest.mark.campaign("slurm")
def test_every_stage_runs_in_its_container(
    slurm: Slurm, folder: Path, image: Path, mounts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The interpreter that is named exists in the image alone; what a stage takes and makes is mounted by itself."""
    container = [
        f"cluster.container.image={image}",
        "cluster.container.runtime=pyxis",
        f"cluster.container.mounts=[{','.join(map(repr, mounts))}]",
    ]
    said = run(capsys, *container, f"cluster.python={INSIDE}", "cluster.code=snapshot")
    assert {name: stage["status"] for name, stage in said.items()} == dict.fromkeys(GRAPH, "done"), said
    assert all(read_artifact(Path(stage["folder"])) is not None for stage in said.values())


@pytest.mark.campaign("slurm")
def test_launchers_killed_at_random_moments_submit_nothing_twice(slurm: Slurm, folder: Path, request: pytest.FixtureRequest) -> None:
    kill_many(request.config.getoption("--kills"), 5.0, folder, *PLACE)
    submitted = submissions(folder / "runs")
    assert attempts(folder) == {0} and len(set(submitted)) == len(submitted)
