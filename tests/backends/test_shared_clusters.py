"""Who starts and ends the clusters of a test run, and who has one alone. The cluster is a file."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clusters.shared import Run
from tests.clusters.slurm.process import wait_for

pytestmark = pytest.mark.slow
PROJECT = Path(__file__).parents[2]
LEADER = """\
import os
import sys
from tests.clusters.shared import Run
run = Run(os.getpid())
print(run.folder, run.address("played")["cluster"], flush=True)
if sys.stdin.readline() == "end":
    run.end()
"""


@pytest.fixture
def leader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[str]]:
    """The leading process of a run that has started its cluster; it ends the run when it is told to."""
    monkeypatch.setenv("TRIREME_TEST_PLAYED", str(tmp_path / "cluster"))
    with subprocess.Popen([sys.executable, "-c", LEADER], cwd=PROJECT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def read(leader: subprocess.Popen[str]) -> tuple[Path, Path]:
    """The run's folder, and the file that there is while the cluster runs."""
    assert leader.stdout is not None
    folder, cluster = leader.stdout.readline().split()
    return Path(folder), Path(cluster)


def test_all_processes_of_a_run_have_one_cluster_which_ends_before_the_run_does(leader: subprocess.Popen[str]) -> None:
    folder, cluster = read(leader)
    assert cluster.read_text() == "1", "started once"
    assert Run(leader.pid).folder == folder and Run(leader.pid).address("played")["cluster"] == str(cluster)
    assert cluster.read_text() == "1"
    leader.communicate("end")
    assert not cluster.exists() and not folder.exists()


def test_a_cluster_ends_after_the_last_test_that_may_use_it(leader: subprocess.Popen[str]) -> None:
    (_, cluster), run = read(leader), Run(leader.pid)
    run.over("played", 2)
    assert cluster.exists() and (before := run.took("played")) > 0
    run.over("played", 2)
    assert not cluster.exists() and run.took("played") >= before


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_cluster_ends_however_the_run_ends(leader: subprocess.Popen[str], how: signal.Signals) -> None:
    folder, cluster = read(leader)
    leader.send_signal(how)
    wait_for(lambda: not cluster.exists() and not folder.exists(), "the cluster to end")


def test_who_waits_to_be_alone_is_overtaken_by_nobody(tmp_path: Path) -> None:
    run, order, entered = Run(os.getpid()), list[str](), threading.Event()

    def enter(name: str, alone: bool) -> None:
        with run.entered("played", alone):
            order.append(name)
            entered.set()

    threads = {name: threading.Thread(target=enter, args=(name, name == "alone")) for name in ("second", "alone", "late")}
    with run.entered("played", alone=False):
        threads["second"].start()
        entered.wait()
        threads["second"].join()
        threads["alone"].start()
        wait_for(lambda: _waits(run.folder / "played.turnstile"), "the one that would be alone to wait")
        threads["late"].start()
        threads["late"].join(0.2)
        order.append("first goes")
    for thread in threads.values():
        thread.join()
    assert order == ["second", "first goes", "alone", "late"]


def _waits(turnstile: Path) -> bool:
    """Whether somebody who would be alone holds it."""
    with turnstile.open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@pytest.mark.parametrize("kind", ["slurm", "kubernetes"])
def test_a_cluster_is_started_by_hand_where_there_is_no_pytest(kind: str) -> None:
    code = f"import runpy, sys; sys.modules['pytest'] = None; runpy.run_module('tests.clusters.{kind}', run_name='__main__')"
    command = [sys.executable, "-c", code, "--help"]
    assert "usage" in subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True).stdout
