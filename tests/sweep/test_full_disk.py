"""A disk that fills while a sweep runs: one plain line, and the same command continues once there is room. What is recorded can be read on
it, and where nothing can be written. On a small file system of its own."""

from __future__ import annotations

import errno
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.cli.main import main
from launcher.trials.store import Store
from tests.results.trial_files import SweepOnDisk, point
from tests.sweep.support import until
from tests.warm import PIPE, STDOUT, Process, run
from trainer.shared.records.outcome import Status

pytestmark = pytest.mark.slow

BLOCK = bytes(4096)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)], capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted here ({mounted.stderr.strip()}); run as root to see a sweep meet a full disk")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        try:
            while file.write(BLOCK):
                pass
        except OSError as error:
            assert error.errno == errno.ENOSPC


WAITS = """
import os, sys, time
while sys.argv[1] != "1" and not os.path.exists(sys.argv[2]):
    time.sleep(0.01)
for step in range(1, 5):
    print(f"it {step} took 10 ms", flush=True)
"""
"""All but the first trial wait until the disk is full."""


def test_a_sweep_whose_disk_fills_says_so_in_one_line_and_goes_on_when_there_is_room(small_disk: Path, tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(WAITS)
    words = [
        *("train", "-m", "run.seed=1,2,3", "model=gpt_tiny", "data=synthetic", "run.steps=4", "cluster.gpus_per_node=1", "sweep.name=full"),
        *("trainer.launch.program=command", f"trainer.launch.script={tmp_path}/waits.py"),
        f"trainer.launch.command=['{{python}}','{{script}}','{{run.seed}}','{tmp_path}/full']",
        r"trainer.launch.log=['it (?P<step>\d+) took (?P<milliseconds>\d+) ms']",
    ]
    command = ["-m", "launcher", *words, f"sweep.dir={small_disk}"]
    sweep = Process(*command, stdout=PIPE, stderr=STDOUT, text=True)
    until(lambda: list(small_disk.glob("trials/*/result.json")), 600)
    fill(small_disk / "filler")
    (tmp_path / "full").touch()
    said = sweep.communicate()[0].splitlines()
    (error,) = [line for line in said if line.startswith("error: ")]
    assert sweep.returncode == 2 and ": No space left on device; free space" in error
    assert not any(line.startswith("Traceback") for line in said), said

    measured = {path: path.read_bytes() for path in small_disk.glob("trials/*/result.json") if path.stat().st_size}
    (small_disk / "filler").unlink()
    run(*command, check=True)
    assert [record.status for record in Store(small_disk).sweep("full").records] == [Status.DONE] * 3
    assert measured and all(path.read_bytes() == content for path, content in measured.items()), "nothing is measured twice"


@pytest.mark.parametrize(("disk", "under_way"), [
    ("full", True), ("read-only", False),
    *(pytest.param(*case, marks=pytest.mark.campaign("launchers")) for case in [("full", False), ("read-only", True)]),
])  # fmt: skip
def test_what_is_recorded_is_shown_where_nothing_can_be_written(
    disk: str, under_way: bool, small_disk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planted = SweepOnDisk(small_disk / "runs")
    done = planted.done(point(1, 1), 0.3)
    left = planted.add(point(2, 1), Status.RUNNING) if under_way else planted.failed(point(2, 1))
    if under_way:  # its ranks have ended with their launcher
        left.handle = {"job": f"{left.id}-0", "pids": [], "host": socket.gethostname(), "since": 0.0}
        planted.store.save(left)
    before = {path: path.read_bytes() for path in small_disk.rglob("*.json")}
    if disk == "full":
        fill(small_disk / "filler")
    else:
        subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for words in (["status"], ["rank"], ["report", "-o", str(tmp_path / "page.html")]):
        assert main([*words, "--dir", str(small_disk / "runs")]) == 0
        said = capsys.readouterr()
        remarks = [line for line in said.err.splitlines() if line.startswith("as last recorded, since ")]
        assert len(remarks) == under_way and "Errno" not in said.err, said.err
        assert words[0] == "report" or (done.id in said.out and left.id in said.out and left.status.value in said.out)
    assert (tmp_path / "page.html").stat().st_size > 10_000
    assert {path: path.read_bytes() for path in small_disk.rglob("*.json")} == before


def test_a_single_run_whose_disk_fills_names_the_key_in_one_line(small_disk: Path) -> None:
    words = [
        "model=gpt_tiny",
        "data=synthetic",
        "run.steps=1000",
        "run.warmup_steps=1",
        "cluster.gpus_per_node=1",
        f"sweep.dir={small_disk}",
    ]
    alone = Process("-m", "launcher", "train", *words, stdout=PIPE, stderr=STDOUT, text=True)
    until(lambda: list(small_disk.glob("trials/*/metrics.jsonl")), 600)
    fill(small_disk / "filler")
    said = alone.communicate()[0]
    errors = [line for line in said.splitlines() if line.startswith(("error", "Error"))]
    assert alone.returncode == 2 and len(errors) == 1 and "Traceback" not in said, said
    assert errors[0].startswith(f"error: sweep.dir={small_disk}: cannot use {small_disk}/")
    assert "No space left on device; free space" in errors[0]
