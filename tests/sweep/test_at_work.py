"""A command in the background: a closed terminal is nothing to it, others see and refuse what they have to, and its end is told."""

from __future__ import annotations

import json
import os
import signal
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import psutil
import pytest

from launcher.cli import attach
from launcher.interrupt import Interrupted
from launcher.sweep.at_work import Command, at_work
from launcher.sweep.notify import check_notify, document, notify
from launcher.trials.store import Store
from tests.results.trial_files import SweepOnDisk, point, seeded
from tests.sweep.support import PROJECT, until
from tests.sweep.test_interrupted import LONG, Terminal, running
from tests.warm import PIPE, Process
from trainer.shared.records.outcome import Reason, Status
from trainer.shared.run.errors import ConfigError


@pytest.mark.slow
def test_a_sweep_in_the_background_outlives_its_terminal_and_is_attached_to_and_ends_when_it_is_told_to(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    told = tmp_path / "told"
    words = ["train", *LONG, "sweep.name=bg", f"sweep.notify=echo $TRIREME_SWEEP $TRIREME_OUTCOME > {told}", "--detach"]
    terminal = Terminal(tmp_path, *words)
    assert terminal.process.wait(600) == 0, terminal.text
    assert "trireme attach bg" in terminal.text
    process = int(terminal.text.partition("as process ")[2].split(",")[0])

    def end() -> None:
        if psutil.pid_exists(process):
            os.kill(process, signal.SIGTERM)

    request.addfinalizer(end)
    folder = running(tmp_path / "runs")
    terminal.hang_up()
    store = Store(tmp_path / "runs")
    made = (store.load(folder.name).read_last_step() or {})["step"]
    until(lambda: (store.load(folder.name).read_last_step() or {})["step"] > made)
    attached = Terminal(tmp_path, "attach")
    until(lambda: "bg: 1 running" in attached.text)
    again = Process("-m", "launcher", *words, cwd=tmp_path, stderr=PIPE, text=True)
    assert attached.end("Ctrl-C") == 130
    assert again.wait(600) == 2 and again.stderr is not None
    assert again.stderr.read().splitlines()[-1] == "error: sweep bg is being run already; 'trireme attach bg' shows it"
    assert at_work(store, "bg") and store.load(folder.name).status is Status.RUNNING
    os.kill(process, signal.SIGTERM)
    until(lambda: not at_work(store, "bg") and told.exists() and told.read_text())
    record = store.load(folder.name)
    assert (record.status, record.reason) == (Status.STOPPED, Reason.CANCELLED) and told.read_text() == "bg interrupted\n"
    assert "stopping" in (store.sweeps / "bg.log").read_text()


REFUSED = """
import sys
from pathlib import Path
from launcher.sweep.at_work import into_background
into_background(Path("words.log"), lambda pid: "never said")
print("error: no cluster", file=sys.stderr)
sys.exit(2)
"""


@pytest.mark.slow
def test_a_command_that_ends_before_it_has_begun_says_why_where_it_was_typed(tmp_path: Path) -> None:
    (tmp_path / "words.log").write_text("of an earlier command\n")
    process = Process("-c", REFUSED, cwd=tmp_path, stdout=PIPE, stderr=PIPE, text=True, env=os.environ | {"PYTHONPATH": str(PROJECT)})
    assert process.wait(600) == 2
    assert process.stdout is not None and process.stderr is not None
    assert (process.stdout.read(), process.stderr.read()) == ("", "error: no cluster\n")
    assert (tmp_path / "words.log").read_text().startswith("of an earlier command\n--- 2")


def test_what_nobody_runs_cannot_be_attached_to(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no command is at work on a sweep in"):
        attach.main(["--dir", str(tmp_path)])
    SweepOnDisk(tmp_path).done(seeded(1), 0.2)
    with pytest.raises(ConfigError, match="no command is at work on sweep planted; 'trireme status planted'"):
        attach.main(["planted", "--dir", str(tmp_path)])
    with pytest.raises(ConfigError, match="there is no sweep 'plant'"):
        attach.main(["plant", "--dir", str(tmp_path)])


@pytest.mark.parametrize("words", [["--dry-run"], ["hydra/sweeper=trireme"]])
def test_detach_is_refused_where_nothing_would_go_on(words: list[str]) -> None:
    from launcher.cli import train

    with pytest.raises(ConfigError, match="--detach"):
        train.main(["--detach", *words])


# -- notifications -------------------------------------------------------------------------------------------------------


def ended_sweep(folder: Path) -> SweepOnDisk:
    sweep = SweepOnDisk(folder)
    sweep.done(point(4, 1), 0.2, spread=0.0)
    sweep.done(point(2, 2), 0.1, spread=0.0)
    sweep.failed(point(1, 4))
    return sweep


def test_the_notification_counts_trials_and_names_the_fastest(tmp_path: Path) -> None:
    sweep = ended_sweep(tmp_path)
    told = document(sweep.store.sweep(), None, 75)
    assert (told["outcome"], told["done"], told["failed"], told["trial"], told["step_time_s"]) == ("done", 2, 1, sweep.records[1].id, 0.1)
    assert (
        told["text"] == f"sweep planted done; 1 failed, 2 done; fastest {told['fastest']}, 100 ms a step; 1:15"
        and "t2 p2" in told["fastest"]
    )
    assert document(sweep.store.sweep(), Interrupted(signal.SIGTERM), 1)["outcome"] == "interrupted"
    assert document(sweep.store.sweep(), OSError("the disk is full"), 1)["text"].endswith("the disk is full; 0:01")
    sweep.add(seeded(9), Status.SUBMITTED)
    assert document(sweep.store.sweep(), None, 1)["outcome"] == "submitted"


def test_a_command_and_a_webhook_get_the_outcome_and_their_failure_is_one_line(tmp_path: Path) -> None:
    sweep, got = ended_sweep(tmp_path).store.sweep(), list[bytes]()

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(404 if self.path == "/gone" else 200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Hook)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    try:
        assert notify(address, sweep, None, 75) == ""
        assert "404" in notify(f"{address}/gone", sweep, None, 75)
    finally:
        server.shutdown()
        server.server_close()
    assert "refused" in notify(address, sweep, None, 75)
    assert json.loads(got[0]) == document(sweep, None, 75)
    assert notify(f'echo "$TRIREME_OUTCOME $TRIREME_FAILED" > {tmp_path}/told', sweep, None, 75) == ""
    assert (tmp_path / "told").read_text() == "done 1\n"
    assert notify("(echo a; echo b) >&2; exit 3", sweep, None, 75) == "exit code 3 a b"


def test_a_refused_command_notifies_nobody_and_one_that_began_does_at_its_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ended_sweep(tmp_path)
    with pytest.raises(ConfigError), Command(tmp_path, "planted", "exit 3"):
        raise ConfigError("no cluster")
    assert capfd.readouterr().err == ""
    with Command(tmp_path, "planted", "exit 3") as command:
        command.begin()
        command.begin()  # a search begins with each of its trials
    assert capfd.readouterr().err == "warning: sweep.notify: exit code 3\n"


@pytest.mark.parametrize("target", ["", "  ", "ftp://host/hook", "https://", "http:///"])
def test_what_is_neither_a_command_nor_an_address_is_refused(target: str) -> None:
    with pytest.raises(ConfigError, match=r"sweep.notify=.* is neither a command nor an address"):
        check_notify(target)
    check_notify("curl -d done ftp://host/hook")
