"""One Slurm and one Kubernetes for all processes of a test run, and who may break them.

The first process that needs a cluster starts its *holder*, a process of its own, which starts the cluster, says where it is, and ends it after
the last test of a file that uses it, since an idle one takes a tenth of a processor, and when the run's leading process has ended, in whatever
way. The others attach to what it says. Tests share a cluster, except those that ask for a
fixture of ``ALONE``: they wait until nobody uses it, and everybody else then waits for them.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests import accounting
from tests.clusters.slurm.process import wait_for

ALONE = {"idle": "slurm", "whole": "slurm", "control": "kubernetes", "quiet": "kubernetes"}
"""Fixtures of tests that break a cluster, or need one without other jobs."""
GIVEN = {kind for kind, variable in {"slurm": "SLURM_CONF", "kubernetes": "KUBECONFIG"}.items() if variable in os.environ}
"""Clusters that somebody else runs."""
_HOLDERS: list[subprocess.Popen[bytes]] = []
"""Of clusters that this process started. None is waited for: what they took would count as taken by the test that then runs."""
_BUILD_S = 7200.0
"""So long a cluster may take to start: its programs may have to be built, on a machine that is busy."""


class Run:
    """The processes of one test run; ``leader`` is the one that outlives the others."""

    def __init__(self, leader: int):
        began = Path(f"/proc/{leader}/stat").read_text().rpartition(")")[2].split()[19]
        self.leader = leader
        self.folder = Path(tempfile.gettempdir()) / f"trireme-tests-{leader}-{began}"

    def address(self, kind: str) -> dict[str, Any]:
        """Where the cluster is, or why there is none, as its holder says once that has been decided."""
        self.folder.mkdir(exist_ok=True)
        said = self.folder / f"{kind}.json"
        with _locked(self.folder / f"{kind}.start", fcntl.LOCK_EX):
            if not said.exists():
                self._start_holder(kind, said)
        return dict(json.loads(said.read_text()))

    def _start_holder(self, kind: str, said: Path) -> None:
        leader = os.pidfd_open(self.leader)
        command = [sys.executable, "-m", "tests.clusters.shared", kind, str(self.folder), str(leader)]
        project = Path(__file__).parents[2]
        with (self.folder / f"{kind}.log").open("wb") as log:
            holder = subprocess.Popen(
                command, cwd=project, pass_fds=[leader], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        os.close(leader)
        _HOLDERS.append(holder)
        accounting.SHARED.add(holder.pid)
        wait_for(lambda: said.exists() or holder.poll() is not None, f"{kind} to start", _BUILD_S)
        if not said.exists():
            raise RuntimeError(f"the holder of {kind} ended: {(self.folder / f'{kind}.log').read_text()}")

    @contextmanager
    def entered(self, kind: str, alone: bool) -> Iterator[None]:
        """Use a cluster, with others or alone. Who waits to be alone is overtaken by nobody."""
        self.folder.mkdir(exist_ok=True)
        how = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
        with ExitStack() as turnstile:
            turnstile.enter_context(_locked(self.folder / f"{kind}.turnstile", how))
            with _locked(self.folder / f"{kind}.door", how):
                if not alone:
                    turnstile.close()
                yield

    def over(self, kind: str, tests: int) -> None:
        """Counts a test of a file that uses a cluster, and ends that with the last of so many."""
        self.folder.mkdir(exist_ok=True)
        count = os.open(self.folder / f"{kind}.over", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(count, b".")
        last = os.lseek(count, 0, os.SEEK_CUR) == tests
        os.close(count)
        if last:
            self.end(kind)

    def took(self, kind: str) -> float:
        """Processor seconds of a cluster, until now or its end."""
        with suppress(FileNotFoundError):
            return float((self.folder / f"{kind}.took").read_text())
        with suppress(FileNotFoundError):
            return accounting.processor_seconds(json.loads((self.folder / f"{kind}.json").read_text())["holder"])
        return 0.0

    def end(self, kind: str = "*") -> None:
        """End a cluster, and wait for that; by default all, with all that is known of them."""
        for said in self.folder.glob(f"{kind}.json"):
            took = self.took(said.stem)
            with (self.folder / f"{said.stem}.holder").open("a") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    os.kill(json.loads(said.read_text())["holder"], signal.SIGTERM)
                    fcntl.flock(lock, fcntl.LOCK_EX)
            said.with_suffix(".took").write_text(str(took))
            said.unlink()
        if kind == "*":
            shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def _locked(path: Path, how: int) -> Iterator[None]:
    with path.open("a") as lock:
        fcntl.flock(lock, how)
        try:
            yield
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # a fork may still have it open


# -- the run's side -----------------------------------------------------------------------------------------------------------


def run_of(config: pytest.Config) -> Run:
    return Run(os.getppid() if hasattr(config, "workerinput") else os.getpid())


def address(config: pytest.Config, kind: str) -> dict[str, Any]:
    """For a fixture: where the cluster is; the test is skipped where there can be none."""
    found = run_of(config).address(kind)
    if "failure" in found:
        pytest.fail(f"{kind} did not start: {found['failure']}", pytrace=False)
    if "obstacle" in found:
        pytest.skip(found["obstacle"])
    return found


def kinds(item: pytest.Item) -> dict[str, bool]:
    """The clusters that a test uses, and whether it uses each alone."""
    fixtures = {*getattr(item, "fixturenames", ())}
    return {kind: any(ALONE.get(name) == kind for name in fixtures) for kind in ("kubernetes", "slurm") if kind in fixtures}


def pytest_collection_finish(session: pytest.Session) -> None:
    files = {kind: {item.path for item in session.items if kind in kinds(item)} for kind in {*ALONE.values()} - GIVEN}
    session.config.stash[_USERS] = {kind: {item.nodeid for item in session.items if item.path in files[kind]} for kind in files}


_USERS = pytest.StashKey[dict[str, set[str]]]()
"""Tests of files that use a cluster, by its kind: fixtures of a file may use it after the last test that does."""


@pytest.hookimpl(wrapper=True, tryfirst=True)  # outside of the test's timeout: it may have to wait for a build, and for other tests
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    run = run_of(item.config)
    with ExitStack() as stack:
        for kind, alone in kinds(item).items():
            if kind not in GIVEN:
                run.address(kind)
            stack.enter_context(run.entered(kind, alone))
        told = yield
    for kind, tests in item.config.stash[_USERS].items():
        if item.nodeid in tests:
            run.over(kind, len(tests))
    return told


@pytest.hookimpl(tryfirst=True)  # before the account is printed
def pytest_terminal_summary(config: pytest.Config) -> None:
    for kind in {*ALONE.values()} - GIVEN:
        if took := run_of(config).took(kind):
            accounting.ACCOUNT.cpu[f"({kind})"] = took


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        run_of(config).end()


# -- the holder's side --------------------------------------------------------------------------------------------------------


def _hold(kind: str, folder: Path, leader: int) -> None:
    """Start a cluster, say so, and end it when the process behind ``leader`` has ended, or on SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    for deaf in (signal.SIGINT, signal.SIGHUP):
        signal.signal(deaf, signal.SIG_IGN)

    def say(words: dict[str, Any]) -> None:
        partial = folder / f"{kind}.partial"
        partial.write_text(json.dumps(words | {"holder": os.getpid()}))
        partial.rename(folder / f"{kind}.json")

    held = importlib.import_module(f"tests.clusters.{kind}.fixture").held
    with _locked(folder / f"{kind}.holder", fcntl.LOCK_EX):
        said = False
        try:
            with held() as words:
                say(words)
                said = True
                if "obstacle" in words:
                    return
                select.select([leader], [], [])
        except Exception:
            if said:
                raise
            say({"failure": traceback.format_exc()})
            return
    shutil.rmtree(folder, ignore_errors=True)  # the leader cannot do it any more


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        _hold(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
