"""Places that do not answer: whoever does not want to wait any more gets one plain line within seconds."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.backends.contract import BackendError
from launcher.backends.kubernetes.backend import KubernetesBackend
from launcher.backends.kubernetes.cluster import KubernetesCluster
from launcher.backends.pool import Backends
from launcher.backends.waiting import concurrently, pause_unless
from launcher.cli import cancel
from launcher.cli.main import main
from launcher.config import resolve
from launcher.config.schema import Config, ContainerConfig
from launcher.trials.job import Handle, Job
from launcher.trials.store import Point, Store
from trainer.shared.records.outcome import Status
from trainer.shared.run.schema import DataConfig

pytestmark = pytest.mark.slow


@pytest.fixture(params=["closed", "mute"])
def nobody(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[KubernetesCluster]:
    """A cluster whose API server is gone, or takes connections and never says a word."""
    listening = socket.create_server(("127.0.0.1", 0))
    address = f"https://127.0.0.1:{listening.getsockname()[1]}"
    if request.param == "closed":
        listening.close()
    names = {
        "clusters": {"cluster": {"server": address}},
        "users": {"user": {"token": "x"}},
        "contexts": {"context": {"cluster": "it", "user": "it"}},
    }
    content: dict[str, Any] = {name: [{"name": "it", **entry}] for name, entry in names.items()}
    path = tmp_path / "kubeconfig"
    path.write_text(json.dumps(content | {"apiVersion": "v1", "kind": "Config", "current-context": "it"}))
    yield KubernetesCluster(
        backend="kubernetes",
        nodes=1,
        gpus_per_node=2,
        kubeconfig=str(path),
        container=ContainerConfig(image="trireme:1"),
        code="image",
        data="present",
    )
    listening.close()


@pytest.mark.parametrize("known", [True, False], ids=["submitted", "perhaps submitted"])
def test_cancel_says_in_one_line_that_nobody_answers_and_ends(
    nobody: KubernetesCluster, known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cancel, "_PATIENCE_SECONDS", 0.2)
    store = Store(tmp_path / "runs")
    config = resolve(Config(data=DataConfig(kind="synthetic"), cluster=nobody))
    record = store.plan(Point((), config), "far")
    handle: Handle = {"namespace": "default", "name": f"trireme-{record.id}-0", "pods": 1, "attempt": 0, "directory": str(record.directory)}
    record.status, record.handle = Status.SUBMITTED, handle if known else None
    store.save(record)
    store.write_sweep("far", [record], "test")
    assert main(["cancel", "far", "--dir", str(tmp_path / "runs")]) == 1
    (last,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert "does not answer" in last and last.endswith("what runs there has not been stopped: repeat the command when it answers")
    assert store.load(record.id).status is Status.SUBMITTED, "it may run"


def test_a_submission_is_given_up_by_whoever_is_in_a_hurry(nobody: KubernetesCluster, tmp_path: Path) -> None:
    """And what is asked afterwards is asked once."""
    store = Store(tmp_path / "runs")
    record = store.plan(Point((), resolve(Config(data=DataConfig(kind="synthetic"), cluster=nobody))), "far")
    job = Job(record.id, "far", 0, record.directory, nobody, 2, config=record.config)
    with Backends() as backends:
        backend = backends.of(nobody)
        assert isinstance(backend, KubernetesBackend)
        request = backend.render(job)
        threading.Timer(0.5, backends.hurry).start()
        with pytest.raises(BackendError):
            backend.submit([request] * 20)
        with pytest.raises(BackendError, match="does not answer"):
            backend.find([job])
        with pytest.raises(BackendError, match="does not answer"):
            backend.poll([{"namespace": "default", "name": job.name, "pods": 1, "attempt": 0, "directory": str(job.directory)}])


# -- waiting ------------------------------------------------------------------------------------------------------------------------


def test_work_is_done_in_order_by_as_many_threads_as_are_asked_for() -> None:
    together = threading.Barrier(3, timeout=300)

    def work(number: int) -> int:
        together.wait()
        return number * number

    assert concurrently(work, range(9), 3, lambda: False) == [number * number for number in range(9)]
    assert concurrently(work, [], 3, lambda: False) == []


def test_the_first_error_is_raised_when_all_else_is_done() -> None:
    done = []

    def work(number: int) -> None:
        if number == 0:
            raise ValueError("the first")
        done.append(number)

    with pytest.raises(ValueError, match="the first"):
        concurrently(work, range(8), 2, lambda: False)
    assert sorted(done) == list(range(1, 8))


def test_what_never_ends_is_left_alone_once_it_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.backends.waiting._GRACE_SECONDS", 0.2)
    begun, never, tired = threading.Semaphore(0), threading.Event(), threading.Event()
    started: list[int] = []

    def work(number: int) -> None:
        started.append(number)
        begun.release()
        never.wait()

    def tire() -> None:
        begun.acquire()
        begun.acquire()
        tired.set()

    threading.Thread(target=tire).start()
    with pytest.raises(BackendError, match="interrupted while jobs were being submitted"):
        concurrently(work, range(5), 2, tired.is_set)
    never.set()
    assert len(started) == 2, "nothing more is begun"


def test_a_pause_ends_when_nobody_waits_any_more() -> None:
    tired = threading.Event()
    threading.Timer(0.2, tired.set).start()
    pause_unless(tired.is_set, 1e9)
