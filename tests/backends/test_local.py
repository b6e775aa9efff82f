"""Processes of this machine: the conformance suite, and what only this backend promises."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from launcher.backends import backend_for
from launcher.backends.contract import BackendError
from launcher.backends.local import backend as local
from launcher.backends.local.backend import LocalBackend
from launcher.backends.local.fork_server import ForkServerClient, ForkServerError, start_server
from launcher.config.schema import ContainerConfig, LocalCluster
from tests import warm
from tests.backends.conformance import LONG, Conformance, Ground, SearchConformance, closing
from tests.warm import replaced
from trainer.shared.records.outcome import Reason, Status
from trainer.shared.run import steady
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.files import read_json

pytestmark = pytest.mark.slow
CLUSTER = LocalCluster(gpus_per_node=2)


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    unknown = {"job": "trireme-000000000000-0", "host": socket.gethostname(), "pids": [], "since": 0.0}
    yield from closing(Ground(lambda: backend_for(CLUSTER), CLUSTER, tmp_path_factory.mktemp("trials"), unknown=unknown))


@pytest.fixture
def warm_servers() -> Iterator[None]:
    """Further fork servers than the one of ``ground``, which imports torch by itself, are forked."""
    with replaced():
        yield


class TestLocal(Conformance):
    def test_the_printed_commands_run_the_same_trial_by_hand(self, ground: Ground) -> None:
        job = ground.job()
        text = ground.backend.render(job).text
        assert f"{sys.executable} -P -m trainer" in text
        text = text.replace(sys.executable, warm.python())  # which has imported torch
        assert subprocess.run(["sh", "-c", text], cwd=job.directory).returncode == 0
        assert (read_json(job.directory / "result.json") or {})["world_size"] == 2
        assert job.log_path(1).exists()

    def test_ranks_do_not_import_torch_again(self, ground: Ground) -> None:
        job = ground.job(LONG)
        (handle,) = ground.submit(job)
        parents = {psutil.Process(pid).ppid() for pid in handle["pids"]}
        assert len(parents) == 1 and "trainer.fork_server" in psutil.Process(parents.pop()).cmdline()
        ground.backend.cancel([handle])
        ground.end(job, handle)

    def test_trials_that_run_at_once_meet_at_different_ports(self, ground: Ground) -> None:
        jobs = [ground.job(), ground.job()]
        handles = ground.submit(*jobs)
        assert [ground.end(job, handle).status for job, handle in zip(jobs, handles)] == [Status.DONE] * 2

    def test_a_port_in_use_is_passed_over(self, ground: Ground) -> None:
        job = ground.job()
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", local._first_port(job)))
            taken.listen()
            (handle,) = ground.submit(job)
            assert ground.end(job, handle).status is Status.DONE

    def test_a_killed_rank_is_a_fault_of_the_place_and_ends_its_peers(self, ground: Ground) -> None:
        job = ground.job(LONG)
        (handle,) = ground.submit(job)
        ground.running(job, handle)
        os.kill(handle["pids"][1], signal.SIGKILL)
        state = ground.end(job, handle)
        assert (state.status, state.reason, state.detail) == (Status.FAILED, Reason.NODE, "rank 1 was killed from outside (SIGKILL)")
        assert not any(psutil.pid_exists(pid) for pid in handle["pids"])

    def test_a_rank_that_the_kernel_killed_for_memory_is_out_of_host_memory(self, ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
        job = ground.job(LONG)
        (handle,) = ground.submit(job)
        ground.running(job, handle)
        os.kill(handle["pids"][0], signal.SIGKILL)
        counter = local.oom_kills()
        monkeypatch.setattr(local, "oom_kills", lambda: counter + 1)  # the kernel's killer cannot be called in a test
        assert ground.end(job, handle).reason is Reason.HOST_MEMORY

    def test_a_crashed_rank_is_an_error_that_names_the_signal(self, ground: Ground) -> None:
        job = ground.job(LONG)
        (handle,) = ground.submit(job)
        ground.running(job, handle)
        resource.prlimit(handle["pids"][1], resource.RLIMIT_CORE, (0, 0))  # torch and all, where the tests were started
        os.kill(handle["pids"][1], signal.SIGSEGV)
        state = ground.end(job, handle)
        assert (state.reason, state.detail) == (Reason.ERROR, "rank 1 crashed (SIGSEGV)")


class TestSearchOnLocal(SearchConformance):
    """Inference."""


@pytest.mark.usefixtures("warm_servers")
def test_the_compiler_is_not_loaded_by_launchers_or_ranks_that_use_none() -> None:
    """It takes as long as torch itself, in each of them. A process that is forked here has loaded all that they load at their start."""
    loaded = warm.run("-c", "import sys; print(*sys.modules)", check=True).stdout.split()
    assert {"torch", "trainer.loop", "launcher.cli.train"} <= set(loaded) and "torch._dynamo" not in loaded


@pytest.mark.usefixtures("warm_servers")
def test_closing_the_backend_leaves_no_rank_behind(tmp_path: Path) -> None:
    ground = Ground(lambda: backend_for(CLUSTER), CLUSTER, tmp_path)
    job = ground.job(LONG)
    (handle,) = ground.submit(job)
    ground.backend.close()
    assert not any(psutil.pid_exists(pid) for pid in handle["pids"])


@pytest.mark.usefixtures("warm_servers")
def test_a_lost_worker_process_fails_its_trials_and_is_replaced(tmp_path: Path) -> None:
    ground = Ground(lambda: backend_for(CLUSTER), CLUSTER, tmp_path)
    job = ground.job(LONG)
    (handle,) = ground.submit(job)
    ground.running(job, handle)
    os.kill(psutil.Process(handle["pids"][0]).ppid(), signal.SIGKILL)
    state = ground.end(job, handle)
    assert (state.status, state.reason) == (Status.FAILED, Reason.NODE) and "ended with code -9" in state.detail
    again = ground.job()
    (handle,) = ground.submit(again)
    assert ground.end(again, handle).status is Status.DONE
    ground.backend.close()


@pytest.mark.usefixtures("warm_servers")
def test_a_worker_process_that_died_unnoticed_disturbs_neither_cancel_nor_the_next_trial_nor_close(tmp_path: Path) -> None:
    ground = Ground(lambda: backend_for(CLUSTER), CLUSTER, tmp_path)
    job = ground.job(LONG)
    (handle,) = ground.submit(job)
    _kill_and_wait(psutil.Process(handle["pids"][0]).parent())
    ground.backend.cancel([handle])
    assert ground.end(job, handle).reason is Reason.NODE
    again = ground.job()
    (handle,) = ground.submit(again)
    server = psutil.Process(handle["pids"][0]).parent()
    assert ground.end(again, handle).status is Status.DONE
    _kill_and_wait(server)
    (handle,) = ground.submit(ground.job(LONG))
    _kill_and_wait(psutil.Process(handle["pids"][0]).parent())
    ground.backend.close()


def test_a_worker_process_that_did_not_live_to_read_its_last_request_is_closed_quietly() -> None:
    server = ForkServerClient((sys.executable, "-c", "input()"))
    server._process = start_server(server._command, server._errors)
    server._process.kill()
    server._process.wait()
    with pytest.raises(ForkServerError, match="ended with code -9"):
        server.kill("a trial")
    server.close()


def _kill_and_wait(process: psutil.Process) -> None:
    """Kills a process and waits until it has ended; whoever started it collects it."""
    process.kill()
    with suppress(psutil.NoSuchProcess):
        while process.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)


def test_a_worker_process_that_cannot_start_is_said_with_its_last_words(tmp_path: Path) -> None:
    backend = LocalBackend(CLUSTER, [sys.executable, "-c", "import sys; sys.exit('no torch here')"])
    ground = Ground(lambda: backend, CLUSTER, tmp_path)
    with pytest.raises(BackendError, match="ended with code 1: no torch here"):
        ground.submit(ground.job())
    backend.close()


def test_a_process_id_given_to_another_process_is_not_taken_for_a_rank() -> None:
    backend = backend_for(CLUSTER)
    boot, _, now = steady.mark().partition(" ")
    began = f"{boot} {float(now) - 3600}"
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        handle = {"job": "trireme-000000000000-0", "host": socket.gethostname(), "pids": [other.pid], "clock": began}
        assert backend.poll([handle])[0].status is Status.FAILED
        backend.cancel([handle])
        assert other.poll() is None, "and not ended in its place"
        other.communicate()


def test_trials_that_run_at_once_see_different_gpus_of_those_that_the_launcher_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert local._devices([1, 2], {}) == {"CUDA_VISIBLE_DEVICES": "1,2"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-5,6")
    assert local._devices([1, 2], {}) == {"CUDA_VISIBLE_DEVICES": "GPU-5,6"}
    assert local._devices([1], {"CUDA_VISIBLE_DEVICES": "2,3"}) == {"CUDA_VISIBLE_DEVICES": "3"}


def test_an_image_is_refused_and_the_remedy_named() -> None:
    with pytest.raises(ConfigError, match=r"cluster\.container\.image='x' cannot be used with cluster\.backend=local.*null"):
        backend_for(LocalCluster(container=ContainerConfig(image="x"))).check()


@pytest.mark.parametrize(("name", "words"), [
    ("A=B", "cannot name an environment variable"), ("", "cannot name an environment variable"),
    *((name, "is the launcher's own") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")),
])  # fmt: skip
def test_a_variable_that_ranks_cannot_be_given_is_refused_before_anything_starts(tmp_path: Path, name: str, words: str) -> None:
    cluster = LocalCluster(gpus_per_node=2, env={"GREETING": "hello", name: "x"})
    with pytest.raises(ConfigError, match=rf"^cluster\.env has '?{name}'?, which {words}"):
        backend_for(cluster).check()
    ground = Ground(lambda: backend_for(cluster), cluster, tmp_path)
    with pytest.raises(ConfigError, match=r"^cluster\.env has "):  # a dry run asks no more than this
        ground.backend.render(ground.job())


@pytest.mark.parametrize(("limit", "capacity"), [(None, 6), (4, 4)])
def test_the_processes_of_all_trials_are_limited_by_the_cluster(limit: int | None, capacity: int) -> None:
    assert backend_for(LocalCluster(nodes=2, gpus_per_node=3, max_processes=limit)).capacity() == capacity
