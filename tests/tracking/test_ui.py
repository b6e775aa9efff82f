"""``trireme ui`` in a real browser, and that it leaves nothing behind."""

from __future__ import annotations

import http.server
import os
import re
import signal
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import psutil
import pytest

from launcher.cli import ui
from launcher.results.measurements import measure
from launcher.results.ranking import rank
from launcher.tracking.mirror import MlflowSweep, attempt
from launcher.tracking.server import LocalServer, PortLost, server_port
from tests.results.trial_files import SweepOnDisk, demo_sweep, point, tracked_at
from tests.tracking.headless import Page
from trainer.shared.records.outcome import Status
from trainer.shared.run.errors import ConfigError

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("tracking")]
ROWS = """[...document.querySelectorAll('[role=row]')]
    .filter(row => row.getAttribute('row-index') !== null && row.innerText.trim())
    .sort((a, b) => a.getAttribute('row-index') - b.getAttribute('row-index'))
    .map(row => row.innerText)"""


class Ui:
    """``trireme ui`` as a person starts it."""

    def __init__(self, root: Path, *arguments: str):
        command = [sys.executable, "-m", "launcher.cli.main", "ui", "--dir", str(root), *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def address(self) -> str:
        output: IO[str] | None = self.process.stdout
        assert output is not None
        for line in output:
            found = re.search(r"http://\S+", line)
            if found:
                return found.group()
        raise AssertionError("no address was printed")

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[SweepOnDisk, str, Ui]]:
    """A sweep that nobody had mirrored, and what ``trireme ui`` printed for it, and itself: the last test ends it."""
    sweep = demo_sweep(tmp_path_factory.mktemp("ui"))
    running = Ui(sweep.store.root)
    yield sweep, running.address(), running
    running.process.terminate()


def test_page_shows_the_sweeps_runs_sorted_by_step_time(shown: tuple[SweepOnDisk, str, Ui], page: Page) -> None:
    sweep, address, _ = shown
    page.open(address)
    page.wait_for("document.body.innerText.includes('5 matching runs')")
    page.wait_for("document.body.innerText.includes('step_time_s')")
    text = page.wait_for(f"(rows => rows.length >= 5 && rows.join('\\n'))({ROWS})")
    ranked = [m for m in rank(measure(sweep.records)) if m.status is not Status.PLANNED]
    places = [text.find(m.trial[:6]) for m in ranked]
    assert -1 not in places, text
    assert places[:3] == sorted(places[:3]) and max(places[:3]) < min(places[3:]), text
    times = page.evaluate(f"{ROWS}.map(row => (row.match(/0\\.\\d{{3,}}/) || [''])[0]).filter(Boolean)")
    assert [float(value) for value in times[:3]] == pytest.approx([m.step_time_s for m in ranked[:3]], rel=1e-3)

    page.resize(1300, 900)
    page.wait_for("document.body.innerText.includes('5 matching runs') && document.body.innerText.includes('step_time_s')")
    page.resize(390, 844)  # a phone
    page.wait_for("document.body.innerText.includes('5 matching runs')")
    seen = page.evaluate("document.body.innerText")
    assert sorted(ranked[:3], key=lambda m: seen.index(m.trial[:6])) == ranked[:3], "the fastest are named in their order"
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_server_listens_on_this_machine_only_and_ctrl_c_ends_every_process(shown: tuple[SweepOnDisk, str, Ui]) -> None:
    _, _, running = shown
    family = running.family()
    listening = {c.laddr.ip for process in family for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    assert listening == {"127.0.0.1"}
    running.process.send_signal(signal.SIGINT)
    assert running.process.wait(300) == 0
    _, alive = psutil.wait_procs(family, timeout=300)
    assert len(family) > 1 and not alive


@pytest.mark.campaign("tracking")
def test_two_pages_started_together_are_two_servers(root: Path, tmp_path: Path) -> None:
    """Both find the usual port free; one is quicker to listen there. The other must not take the answers of the first for its own."""
    running = []
    for place in (root, tmp_path / "other"):
        SweepOnDisk(place).done(point(1, 1), 0.2)
        running.append(Ui(place))
    try:
        for one, port in zip(running, [int(re.search(r":(\d+)/", each.address()).group(1)) for each in running]):  # type: ignore[union-attr]
            listening = [c.laddr.port for process in one.family() for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
            assert port in listening
    finally:
        for one in running:
            one.process.terminate()
    assert [one.process.wait(300) for one in running] == [0, 0]


@pytest.mark.campaign("tracking")
def test_a_port_that_others_answer_on_is_not_taken_for_ones_own(root: Path) -> None:
    SweepOnDisk(root).done(point(1, 1), 0.2)
    assert not attempt(MlflowSweep(root, "planted").update)
    with socketserver.TCPServer(("127.0.0.1", server_port()), Answering) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        with LocalServer(root, other.server_address[1]) as server, pytest.raises(PortLost):
            server.wait_ready()
        other.shutdown()


class Answering(http.server.BaseHTTPRequestHandler):
    """Any server at all that says it is well."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing."""


def test_port_that_is_taken_is_one_plain_error_if_it_was_asked_for(root: Path) -> None:
    SweepOnDisk(root).done(point(1, 1), 0.2)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", server_port()))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port={port} cannot be used"):
            ui.main(["--dir", str(root), "--port", str(port)])
        assert server_port(port) != port


def test_sweep_on_a_server_that_is_away_is_one_plain_error(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    away = f"http://127.0.0.1:{server_port()}"
    sweep = SweepOnDisk(root)
    sweep.done(tracked_at(point(1, 1), away), 0.2)
    with pytest.raises(ConfigError, match=f"sweep planted cannot be copied to MLflow at {away}"):
        ui.main(["--dir", str(root)])


def test_sweep_on_a_server_is_shown_there(root: Path, server: str, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = SweepOnDisk(root, "elsewhere")
    sweep.done(tracked_at(point(1, 1), server), 0.2)
    assert ui.main(["--dir", str(root)]) == 0
    assert capsys.readouterr().out.startswith(f"sweep elsewhere is tracked at\n  {server}/#/experiments/")


def test_folder_without_sweeps_is_one_plain_error_and_stays_empty(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no sweep"):
        ui.main(["--dir", str(tmp_path)])
    assert os.listdir(tmp_path) == []
