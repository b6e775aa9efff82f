"""Rank 0's mirror to an MLflow server: everything arrives, and no step ever waits for it."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.tracking.database import experiment_id, open_client
from launcher.tracking.mirror import PARENT, MlflowSweep
from launcher.tracking.server import LocalServer
from launcher.trials.store import Record
from tests.farm import free_port
from tests.results.trial_files import (
    SweepOnDisk,
    config,
    metric_line,
    point,
    result_of,
    step_times,
    tracked_at,
    write_json,
    write_logs,
    write_metrics,
)
from trainer.measure import forwarder as tracking
from trainer.measure.forwarder import Forwarder, forwarding
from trainer.shared.records.outcome import Status
from trainer.shared.records.trial_files import read_steps
from trainer.shared.run.read import flatten, from_dict, save
from trainer.shared.run.schema import TrainConfig

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("tracking")]


def tracked_by(uri: str | None, owner: str | None = "me") -> TrainConfig:
    run = config(1, 1).train_config()
    return replace(run, tracking=replace(run.tracking, uri=uri, owner=owner))


def train(directory: Path, steps: range, attempt: int = 0, each: Callable[[int], None] = lambda step: None) -> None:
    """What the training loop does for tracking: append a line a step."""
    directory.mkdir(parents=True, exist_ok=True)
    for step in steps:
        with (directory / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(metric_line(step, 0.1, attempt)) + "\n")
        each(step)


class OnServer:
    """The one run of a trial on a server."""

    def __init__(self, uri: str, trial: str):
        self.client = open_client(uri)
        found = self.client.search_runs([experiment_id(self.client, "trireme", None)], f"tags.trial = '{trial}'")
        assert len(found) == 1, f"{len(found)} runs of one trial"
        self.run = found[0]

    def steps(self, name: str = "train/loss") -> list[int]:
        return sorted(m.step for m in self.client.get_metric_history(self.run.info.run_id, name))


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server on a busy machine is slow; what is tested here is what arrives, not how soon."""
    for limit in ("REQUEST_S", "CLOSE_S", "CLOSE_FAILING_S"):
        monkeypatch.setattr(tracking, limit, 600.0)


@pytest.fixture
def black_hole() -> Iterator[socket.socket]:
    """A port that accepts connections and never says a word."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(8)
        yield listener


def test_all_steps_summary_and_params_arrive(server: str, tmp_path: Path) -> None:
    directory, run = tmp_path / "0000000000a1", tracked_by(server)
    with forwarding(run, 0, directory):
        train(directory, range(1, 401))
        write_json(directory / "result.json", {"status": "done", "step_time_s": 0.25, "mfu": None, "tokens_per_s": 1024.0})
    found = OnServer(server, directory.name)
    assert found.steps() == list(range(1, 401))
    assert found.run.data.metrics["step_time_s"] == 0.25 and "mfu" not in found.run.data.metrics
    assert found.run.info.status == "FINISHED"
    wanted = {name: str(value) for name, value in flatten(run).items() if isinstance(value, int) and not isinstance(value, bool)}
    assert wanted.items() <= found.run.data.params.items()
    assert not any(name.startswith("tracking") for name in found.run.data.params)


def test_steps_arrive_while_the_trial_runs(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "PERIOD_S", 0.05)
    directory = tmp_path / "0000000000a2"
    arrived = threading.Event()

    class Watched(Forwarder):
        def _forward(self, last: bool) -> None:
            super()._forward(last)
            if self._offset:
                arrived.set()

    monkeypatch.setattr(tracking, "Forwarder", Watched)
    with forwarding(tracked_by(server), 0, directory):
        train(directory, range(1, 4))
        assert arrived.wait(600)
        assert OnServer(server, directory.name).steps() == [1, 2, 3]


def test_not_a_number_and_infinity_arrive(server: str, tmp_path: Path) -> None:
    directory = tmp_path / "0000000000a3"
    directory.mkdir()
    (directory / "metrics.jsonl").write_text('{"step": 1, "loss": NaN, "grad_norm": Infinity, "time": 1.0}\n')
    with forwarding(tracked_by(server), 0, directory):
        pass
    assert OnServer(server, directory.name).steps() == [1]


def test_resumed_attempt_goes_on_in_the_same_run_without_duplicates(server: str, tmp_path: Path) -> None:
    directory = tmp_path / "0000000000a4"
    with pytest.raises(RuntimeError, match="preempted"), forwarding(tracked_by(server), 0, directory):
        train(directory, range(1, 5))
        raise RuntimeError("preempted")
    assert OnServer(server, directory.name).run.info.status == "FAILED"
    with forwarding(tracked_by(server), 0, directory):
        train(directory, range(5, 9), attempt=1)
    found = OnServer(server, directory.name)
    assert found.steps() == list(range(1, 9))
    assert found.run.info.status == "FINISHED"


def test_attempt_in_a_fresh_folder_goes_on_in_the_same_run(server: str, tmp_path: Path) -> None:
    """As in a pod: the new attempt has the checkpoint, but not the metrics that the old one wrote."""
    for attempt, steps in enumerate((range(1, 4), range(4, 30))):
        directory = tmp_path / str(attempt) / "0000000000a6"
        with forwarding(tracked_by(server), 0, directory):
            train(directory, steps, attempt)
    assert OnServer(server, directory.name).steps() == list(range(1, 30))


def test_the_same_trial_of_another_launcher_on_the_same_server_is_another_run(server: str, tmp_path: Path) -> None:
    directory = tmp_path / "0000000000a5"
    for owner, steps in (("ada", 3), ("bob", 5), (None, 7)):
        (directory / "metrics.jsonl").unlink(missing_ok=True)
        with forwarding(tracked_by(server, owner), 0, directory):
            train(directory, range(1, steps + 1))
    client = open_client(server)
    found = client.search_runs([experiment_id(client, "trireme", None)], f"tags.trial = '{directory.name}'")
    logged = {run.data.tags["owner"]: len(client.get_metric_history(run.info.run_id, "train/loss")) for run in found}
    assert logged == {"ada": 3, "bob": 5, "": 7}


def test_launcher_adopts_rank_0s_run_and_completes_it_without_duplicates(server: str, tmp_path: Path) -> None:
    sweep = SweepOnDisk(tmp_path, "adopted")
    record = sweep.add(tracked_at(point(2, 1), server), Status.DONE)
    with forwarding(from_dict(TrainConfig, record.config), 0, record.directory):
        write_metrics(record, step_times(0.2, 0.02))
        write_json(record.directory / "result.json", result_of(record, step_times(0.2, 0.02)))
    write_metrics(record, [0.2], first=9)  # a line that rank 0 did not live to send
    write_logs(record, "ready\n")
    mirror = MlflowSweep(tmp_path, "adopted")
    mirror.update()
    found = OnServer(server, record.id)
    assert found.steps() == list(range(1, 10))
    for name in ("step_time_s", "tokens_per_s", "peak_memory_bytes"):
        assert found.steps(name) == [0], "a figure of the summary was logged twice"
    assert found.run.data.tags["layout"] == "t2 p1 d2 mb1" and PARENT in found.run.data.tags
    assert found.run.data.params["cluster.backend"] == "local"
    assert {f.path for f in found.client.list_artifacts(found.run.info.run_id)} >= {"config.yaml", "result.json", "logs"}


def test_no_step_waits_for_a_server_that_never_answers(black_hole: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forwarder is inside its first request during the whole run: had any step waited for it, the run would not have ended."""
    monkeypatch.setattr(tracking, "CLOSE_S", 0.1)
    directory = tmp_path / "0000000000b1"
    with forwarding(tracked_by(f"http://127.0.0.1:{black_hole.getsockname()[1]}"), 0, directory):
        connection, _ = black_hole.accept()
        assert connection.recv(4096).startswith(b"GET /api/2.0/mlflow/experiments/get-by-name")
        train(directory, range(1, 51))
    assert [line["step"] for line in read_steps(directory)] == list(range(1, 51))
    connection.close()


def test_forwarder_gives_up_after_a_bounded_number_of_refusals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracking, "PERIOD_S", 1e-4)
    monkeypatch.setattr(tracking, "LONGEST_PAUSE_S", 1e-3)
    uri = f"http://127.0.0.1:{free_port()}"
    forwarder = Forwarder(tracked_by(uri), tmp_path)
    forwarder.start()
    forwarder.join(600)
    assert not forwarder.is_alive()
    said = [record.message.endswith("given up") for record in caplog.records if uri in record.message]
    assert said == [False, True], "the first refusal and the last are said"
    forwarder.finish("FINISHED")


def test_refusal_is_told_in_the_servers_own_words(server: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with forwarding(tracked_by(server + "/no/such/place"), 0, tmp_path / "0000000000d1"):
        pass
    assert "404" in caplog.text and "Not Found" in caplog.text


def test_credentials_come_from_the_environment(monkeypatch: pytest.MonkeyPatch, black_hole: socket.socket, tmp_path: Path) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "ada")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "secret")
    for limit in ("CLOSE_S", "CLOSE_FAILING_S"):
        monkeypatch.setattr(tracking, limit, 0.1)
    with forwarding(tracked_by(f"http://127.0.0.1:{black_hole.getsockname()[1]}"), 0, tmp_path):
        connection, _ = black_hole.accept()
        request = connection.recv(4096).decode()
        connection.close()
    assert f"Authorization: Basic {base64.b64encode(b'ada:secret').decode()}" in request


@pytest.mark.parametrize(("uri", "rank"), [(None, 0), ("http://127.0.0.1:9", 1), ("sqlite:///x.db", 0)])
def test_nothing_is_started_without_a_server_or_on_another_rank(tmp_path: Path, uri: str | None, rank: int) -> None:
    before = threading.active_count()
    with forwarding(tracked_by(uri), rank, tmp_path):
        assert threading.active_count() == before


class Relay(socketserver.ThreadingTCPServer):
    """The way to a server: while it is open each connection to its port is one to the server."""

    allow_reuse_address = daemon_threads = True

    def __init__(self, port: int, server: str):
        host, _, number = server.removeprefix("http://").partition(":")

        class Passing(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with socket.create_connection((host, int(number))) as far:
                    ends = {self.request: far, far: self.request}
                    while True:
                        for end in select.select(list(ends), [], [])[0]:
                            if not (words := end.recv(65536)):
                                return
                            ends[end].sendall(words)

        super().__init__(("127.0.0.1", port), Passing)
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()


@pytest.mark.parametrize("killed", [False, pytest.param(True, marks=pytest.mark.campaign("tracking"))], ids=["unreachable", "killed"])
def test_server_away_mid_run_costs_no_step_and_gets_the_rest_when_it_is_back(
    killed: bool, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit, value in (("PERIOD_S", 0.01), ("LONGEST_PAUSE_S", 0.1), ("FAILURES", 1000)):
        monkeypatch.setattr(tracking, limit, value)
    directory, port = tmp_path / "0000000000c1", free_port()
    first_batch, failed = threading.Event(), threading.Event()

    class Watched(Forwarder):
        def _forward(self, last: bool) -> None:
            try:
                super()._forward(last)
            except OSError:
                failed.set()
                raise
            if self._offset:
                first_batch.set()

    def started() -> Relay | LocalServer:
        if not killed:
            return Relay(port, request.getfixturevalue("server"))
        server = LocalServer(tmp_path, port)
        server.wait_ready()
        return server

    monkeypatch.setattr(tracking, "Forwarder", Watched)
    shutil.copy(request.getfixturevalue("empty_database") / "mlflow.db", tmp_path)
    server = started()
    with forwarding(tracked_by(f"http://127.0.0.1:{port}"), 0, directory):
        train(directory, range(1, 3))
        assert first_batch.wait(600)
        if isinstance(server, LocalServer):
            os.killpg(server._process.pid, signal.SIGKILL)
        server.close()
        train(directory, range(3, 7))
        assert failed.wait(600)
        train(directory, range(7, 9))
        server = started()
    assert OnServer(f"http://127.0.0.1:{port}", directory.name).steps() == list(range(1, 9))
    server.close()


def test_record_of_a_sweep_names_the_directory_that_the_forwarder_reads(tmp_path: Path) -> None:
    """The run on the server is found by the directory's name, which must be the trial's id."""
    record: Record = SweepOnDisk(tmp_path).add(point(1, 1))
    assert record.directory.name == record.id


def test_the_trainer_itself_forwards_its_steps(server: str, tmp_path: Path) -> None:
    directory = tmp_path / "0000000000e1"
    directory.mkdir()
    run = tracked_by(server)
    alone = replace(run, layout=replace(run.layout, data=1), data=replace(run.data, kind="synthetic"), run=replace(run.run, steps=3))
    save(alone, directory / "config.yaml")
    command = [sys.executable, "-m", "trainer", str(directory / "config.yaml")]
    ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "JOB_COMPLETION_INDEX")
    environment = {name: value for name, value in os.environ.items() if name not in ranks} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = OnServer(server, directory.name)
    assert found.steps() == [1, 2, 3]
    assert found.run.data.metrics["step_time_s"] == json.loads((directory / "result.json").read_text())["step_time_s"]
    assert found.run.info.status == "FINISHED"
