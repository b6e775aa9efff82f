"""The first process of a pod, and the reading of what it sends: run here as processes, with a trainer that does as it is told."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from launcher.backends.kubernetes import entry
from launcher.backends.kubernetes.logs import Unpacker, nanoseconds, unpack_message, write_fenced
from launcher.backends.kubernetes.manifests import ENTRY
from tests.clusters.kubernetes.control_plane import free_ports
from tests.clusters.slurm.process import wait_for
from trainer.shared.records import trial_files as records
from trainer.shared.records.outcome import Reason

pytestmark = pytest.mark.slow

TRAINER = """
import json, os, signal, sys, time
from pathlib import Path
out, attempt, rank = Path(sys.argv[3]), int(sys.argv[5]), int(os.environ["RANK"])
def write(name, **content): (out / name).write_text(json.dumps({"attempt": attempt, **content}))
exec(os.environ["DO"])
"""
HASTY = "import sys; sys.path.insert(0, sys.argv.pop()); import entry; entry.PEER_GRACE = entry.GREETING = 0.5; sys.exit(entry.main())"
"""``entry.py`` with little patience."""


@dataclass
class Pod:
    """One process of ``entry.py``, as a pod of ``pods`` starts it."""

    folder: Path
    do: str
    index: int = 0
    pods: int = 1
    per_node: int = 2
    port: int = 29001
    attempt: int = 0
    hasty: bool = False
    process: subprocess.Popen[bytes] = field(init=False)

    def start(self) -> Pod:
        package = self.folder / "fake" / "trainer"
        package.mkdir(parents=True, exist_ok=True)
        (package / "__init__.py").touch()
        (package / "__main__.py").write_text(TRAINER)
        environment = os.environ | {
            "PYTHONPATH": str(package.parent), "DO": self.do, "TRIREME_INDEX_FROM": "INDEX", "INDEX": str(self.index),
            "WORLD_SIZE": str(self.pods * self.per_node), "TRIREME_RANKS_PER_NODE": str(self.per_node), "TRIREME_OUT": str(self.out),
            "TRIREME_ATTEMPT": str(self.attempt), "TRIREME_CONFIG": "config.yaml", "MASTER_ADDR": "localhost", "MASTER_PORT": str(self.port),
            "TRIREME_TERMINATION_LOG": str(self.folder / f"termination-{self.index}"),
        }  # fmt: skip
        program = ["-c", HASTY, str(ENTRY.parent)] if self.hasty else [str(ENTRY)]
        self.process = subprocess.Popen([sys.executable, *program], env=environment, stdout=subprocess.PIPE, cwd=self.folder)
        assert self.process.stdout is not None and self.process.stdout.readline() == b"#trireme begin\n"
        return self

    @property
    def out(self) -> Path:
        return self.folder / f"out-{self.index}"

    def lines(self) -> list[bytes]:
        """Those of ranks and files; the last one, which counts them, is not among them."""
        lines = self.process.communicate(timeout=600)[0].splitlines()
        return [line for line in lines if not line.startswith(b"#trireme end")]

    def message(self) -> dict[str, object]:
        content: dict[str, object] = json.loads((self.folder / f"termination-{self.index}").read_text())
        return content


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A trial's directory that a log is unpacked into."""
    directory = tmp_path / "home"
    directory.mkdir()
    yield directory


def unpack(lines: list[bytes], directory: Path, attempt: int = 0) -> None:
    unpacker = Unpacker(directory, attempt, range(2), {})
    for line in lines:
        unpacker.take(line)
    unpacker.close()


# -- the ranks ------------------------------------------------------------------------------------------------------------------


def test_what_ranks_write_arrives_as_they_wrote_it(tmp_path: Path, home: Path) -> None:
    big = "x" * 50_000
    do = (
        'print("hello from", rank); print("long" * 5000)\n'
        "if rank == 0:\n"
        '    (out / "metrics.jsonl").write_text("".join(json.dumps({"step": n}) + chr(10) for n in (1, 2)))\n'
        f'    write("result.json", status="done", losses=list(range(5000)), note="{big}")\n'
        '    (out / "timeline.json").write_text("{}")\n'
        'else: write("failure-1.json", reason="error")\n'
    )
    pod = Pod(tmp_path, do).start()
    lines = pod.lines()
    assert pod.process.returncode == 0 and max(map(len, lines)) < 16 * 1024
    unpack(lines, home)
    for name in ("result.json", "timeline.json", "failure-1.json", "metrics.jsonl"):
        assert (home / name).read_bytes() == (pod.out / name).read_bytes(), name
    assert (home / "logs/attempt0.rank1.log").read_text().startswith("hello from 1\nlonglong")


def test_the_last_line_of_a_pods_log_says_how_many_there_were(tmp_path: Path, home: Path) -> None:
    pod = Pod(tmp_path, 'print("one\\ntwo"); rank or write("result.json", status="done", note="x" * 20000)').start()
    lines = pod.process.communicate(timeout=600)[0].splitlines()
    unpacker = Unpacker(home, 0, range(2), {})
    for line in lines[:-1]:
        unpacker.take(line)
    assert not unpacker.told.whole
    unpacker.take(lines[-1])
    unpacker.close()
    assert unpacker.told.whole and unpacker.told.last == len(lines) - 1 > 4 and unpacker.told.result


def test_output_that_is_not_text_and_lines_without_an_end_come_through(tmp_path: Path, home: Path) -> None:
    pod = Pod(tmp_path, r'sys.stdout.buffer.write(b"\xff\xfe\x00 odd\nno end")', per_node=1).start()
    unpack(pod.lines(), home)
    assert (home / "logs/attempt0.rank0.log").read_bytes() == b"\xff\xfe\x00 odd\nno end\n"


@pytest.mark.parametrize(
    ("do", "code"),
    [
        ("pass", 0),
        ("sys.exit(2)", 2),
        ("sys.exit(75)", 75),
        ("sys.exit(0 if rank else 3)", 3),
        ("sys.exit(3 if rank else 75)", 3),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 128 + signal.SIGSEGV),
    ],
)
def test_the_pods_exit_code_is_that_of_a_rank_that_failed(tmp_path: Path, do: str, code: int) -> None:
    pod = Pod(tmp_path, do).start()
    pod.lines()
    assert pod.process.returncode == code


def test_a_rank_that_fails_ends_the_others_after_they_had_time_to_say_why(tmp_path: Path) -> None:
    began = time.monotonic()
    pod = Pod(tmp_path, "sys.exit(3) if rank else time.sleep(1000)", hasty=True).start()
    pod.lines()
    assert pod.process.returncode == 3, "and not that of the peer, which had to be killed"
    assert time.monotonic() - began > 0.5


def test_sigterm_reaches_every_rank(tmp_path: Path) -> None:
    do = 'signal.signal(signal.SIGTERM, lambda *_: (print("saved"), sys.exit(75)))\nprint("up", flush=True)\nwhile True: time.sleep(0.1)'
    pod = Pod(tmp_path, do).start()
    assert pod.process.stdout is not None
    first = [pod.process.stdout.readline() for _ in range(2)]
    pod.process.send_signal(signal.SIGTERM)
    assert sorted(first + [line + b"\n" for line in pod.lines()]) == [b"[0] saved\n", b"[0] up\n", b"[1] saved\n", b"[1] up\n"]
    assert pod.process.returncode == 75


def test_metrics_arrive_while_the_rank_still_runs(tmp_path: Path) -> None:
    do = '(out / "metrics.jsonl").write_text(\'{"step": 1}\\n{"st\')\ntime.sleep(1000)'
    pod = Pod(tmp_path, do, per_node=1).start()
    assert pod.process.stdout is not None
    assert pod.process.stdout.readline() == b'#trireme metrics.jsonl + {"step": 1}\n'
    pod.process.terminate()  # which ends the rank as well
    pod.process.communicate()


def test_what_an_earlier_attempt_left_on_a_volume_is_not_sent_again(tmp_path: Path) -> None:
    Pod(
        tmp_path, '(out / "metrics.jsonl").write_text(\'{"attempt": 0}\\n\'); write("result.json", status="stopped")', per_node=1
    ).start().lines()
    pod = Pod(tmp_path, 'open(out / "metrics.jsonl", "a").write(\'{"attempt": 1}\\n\'); sys.exit(1)', per_node=1, attempt=1).start()
    assert pod.lines() == [b'#trireme metrics.jsonl + {"attempt": 1}']


def test_a_rank_that_the_kernel_killed_is_explained_by_the_counter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TRIREME_OUT": str(tmp_path), "TRIREME_ATTEMPT": "2"}.items():
        monkeypatch.setenv(name, value)
    node = entry.Node(range(4, 6))
    monkeypatch.setattr(entry, "oom_kills", lambda: node.kills_before + 1)
    node.explain({4: 1, 5: -signal.SIGKILL})
    told = json.loads((tmp_path / "failure-5.json").read_text())
    assert (told["reason"], told["attempt"], told["rank"]) == ("host memory", 2, 5) and not (tmp_path / "failure-4.json").exists()


# -- the gang -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [0, 1])
def test_ranks_start_when_all_pods_are_there_whichever_comes_last(tmp_path: Path, free_port: int, late: int) -> None:
    first = Pod(tmp_path, 'print("rank", rank)', index=1 - late, pods=2, port=free_port).start()
    with pytest.raises(subprocess.TimeoutExpired):
        first.process.wait(1.0)
    last = Pod(tmp_path, 'print("rank", rank)', index=late, pods=2, port=free_port).start()
    said = sorted(first.lines() + last.lines())
    assert said == [b"[0] rank 0", b"[1] rank 1", b"[2] rank 2", b"[3] rank 3"]


@pytest.mark.parametrize("index", [0, 1])
def test_a_pod_that_waits_for_its_peers_can_be_told_to_end(tmp_path: Path, free_port: int, index: int) -> None:
    pod = Pod(tmp_path, "pass", index=index, pods=2, port=free_port).start()
    wait_for(lambda: _catches_term(pod.process.pid), "the pod to handle SIGTERM")
    pod.process.send_signal(signal.SIGTERM)
    pod.lines()
    assert pod.process.returncode == 75


def test_a_pod_that_ends_after_it_has_joined_does_not_keep_the_others_waiting(tmp_path: Path, free_port: int) -> None:
    pod = Pod(tmp_path, 'print("started")', index=0, pods=3, port=free_port).start()
    wait_for(lambda: _connects(free_port - 1), "pod 0 to listen")
    gone = socket.create_connection(("localhost", free_port - 1))
    gone.sendall(b"here\n")
    gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # as the kernel does for a process that was killed
    time.sleep(1.0)  # it is heard
    gone.close()
    with socket.create_connection(("localhost", free_port - 1)) as other:
        other.sendall(b"here\n")
        other.settimeout(60.0)
        assert other.recv(16) == b"go\n"
    assert sorted(pod.lines()) == [b"[0] started", b"[1] started"] and pod.process.returncode == 0


def test_a_stranger_that_connects_is_not_taken_for_a_pod(tmp_path: Path, free_port: int) -> None:
    pod = Pod(tmp_path, 'print("started")', index=0, pods=2, port=free_port).start()
    wait_for(lambda: _connects(free_port - 1), "pod 0 to listen")
    with socket.create_connection(("localhost", free_port - 1)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with pytest.raises(subprocess.TimeoutExpired):
            pod.process.wait(1.0)
    peer = Pod(tmp_path, "pass", index=1, pods=2, port=free_port).start()
    assert sorted(pod.lines()) == [b"[0] started", b"[1] started"] and peer.lines() == []


def test_who_connects_and_says_nothing_does_not_keep_the_pods_waiting(tmp_path: Path, free_port: int) -> None:
    pod = Pod(tmp_path, 'print("started")', index=0, pods=2, port=free_port, hasty=True).start()
    wait_for(lambda: _connects(free_port - 1), "pod 0 to listen")
    with socket.create_connection(("localhost", free_port - 1)) as silent:
        peer = Pod(tmp_path, "pass", index=1, pods=2, port=free_port).start()
        try:
            assert pod.process.wait(entry.GREETING + 60.0) == peer.process.wait(60.0) == 0
        finally:
            pod.process.kill()
            peer.process.kill()
        silent.settimeout(10.0)
        assert silent.recv(16) == b"", "it is dropped, not released"
    assert sorted(pod.lines()) == [b"[0] started", b"[1] started"] and peer.lines() == []


def test_a_pod_that_has_joined_may_wait_longer_than_a_greeting_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry, "GREETING", 0.1)
    here, there = socket.socketpair()
    with here, there:
        there.sendall(b"here\n")
        assert entry.greets(here) and here.gettimeout() is None
    here, there = socket.socketpair()
    with here, there:
        there.sendall(b"he")
        assert not entry.greets(here), "which has said the half in time"


def test_a_stranger_that_says_much_and_ends_no_line_is_dropped_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry, "GREETING", 1000.0)
    here, there = socket.socketpair()
    with here, there:
        there.sendall(b"x" * 50)
        assert not entry.greets(here)


def test_a_silent_stranger_does_not_keep_pod_0_from_ending(tmp_path: Path, free_port: int) -> None:
    pod = Pod(tmp_path, "pass", index=0, pods=2, port=free_port).start()
    wait_for(lambda: _connects(free_port - 1), "pod 0 to listen")
    with socket.create_connection(("localhost", free_port - 1)):
        with pytest.raises(subprocess.TimeoutExpired):
            pod.process.wait(2.0)  # it listens to the stranger meanwhile
        pod.process.terminate()
        try:
            assert pod.process.wait(entry.GREETING + 60.0) == 75
        finally:
            pod.process.kill()
    pod.lines()


# -- last words -----------------------------------------------------------------------------------------------------------------


def test_the_termination_message_holds_a_result_too_long_for_it_without_its_series(tmp_path: Path, home: Path) -> None:
    pod = Pod(tmp_path, 'write("result.json", status="done", step_time_s=0.5, losses=[0.1] * 5000)', per_node=1).start()
    pod.lines()
    assert pod.message() == {"file": "result.json", "content": {"attempt": 0, "status": "done", "step_time_s": 0.5}}


def test_without_a_result_it_holds_the_first_failure(tmp_path: Path) -> None:
    pod = Pod(tmp_path, 'write(f"failure-{rank}.json", reason="out of memory", rank=rank); sys.exit(1)', index=0).start()
    pod.lines()
    assert pod.message()["file"] == "failure-0.json"


def ended_with(message: str) -> dict[str, object]:
    return {"metadata": {}, "spec": {}, "status": {"containerStatuses": [{"state": {"terminated": {"message": message}}}]}}


def test_a_termination_message_fills_in_only_what_the_log_did_not_bring(home: Path) -> None:
    told = ended_with(json.dumps({"file": "result.json", "content": {"attempt": 1, "status": "failed"}}))
    (home / "result.json").write_text('{"attempt": 0, "status": "stopped"}')
    unpack_message(told, home, 1)
    assert json.loads((home / "result.json").read_text()) == {"attempt": 1, "status": "failed"}
    (home / "result.json").write_text('{"attempt": 1, "status": "failed", "losses": [1]}')
    unpack_message(told, home, 1)
    assert "losses" in (home / "result.json").read_text()


@pytest.mark.parametrize(
    "message",
    [
        "",
        "Segmentation fault",
        "[]",
        '{"file": "../../x", "content": {"attempt": 0}}',
        '{"file": "result.json", "content": {"attempt": 7}}',
    ],
)
def test_other_last_words_write_nothing(home: Path, message: str) -> None:
    unpack_message(ended_with(message), home, 0)
    assert list(home.parent.rglob("*")) == [home]


# -- unpacking --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../evil.json", "/etc/passwd", "trial.json", "config.yaml", "logs/x", "result.json.bak"])
def test_a_pod_has_no_say_over_other_files(home: Path, name: str) -> None:
    unpack([f"#trireme {name} + owned".encode(), f"#trireme {name} 1/1 eJwDAAAAAAE=".encode()], home)
    assert list(home.parent.rglob("*")) == [home]


def test_a_file_of_which_a_piece_is_missing_is_not_written(home: Path) -> None:
    unpack([b"#trireme result.json 1/3 aaaa", b"#trireme result.json 3/3 bbbb"], home)
    assert not (home / "result.json").exists()


def test_a_newer_attempt_is_not_overwritten_by_the_last_words_of_an_older_one(home: Path) -> None:
    path = home / "result.json"
    write_fenced(path, '{"attempt": 1}', 1)
    write_fenced(path, '{"attempt": 0}', 0)
    assert path.read_bytes() == b'{"attempt": 1}'
    write_fenced(path, '{"attempt": 2}', 2)
    assert path.read_bytes() == b'{"attempt": 2}'


def test_complaints_of_the_interpreter_itself_are_kept(home: Path) -> None:
    unpack([b"python: can't open file '/trireme/entry.py'"], home)
    assert (home / "logs/attempt0.rank0.log").read_text() == "python: can't open file '/trireme/entry.py'\n"


@pytest.mark.parametrize(
    ("earlier", "later"),
    [
        ("2026-11-20T10:00:05.12Z", "2026-11-20T10:00:05.123Z"),
        ("2026-11-20T10:00:05Z", "2026-11-20T10:00:05.000000001Z"),
        ("2026-11-20T12:00:05+02:00", "2026-11-20T10:00:05.1Z"),
        ("2026-11-20T10:00:05.999999999Z", "2026-11-20T10:00:06Z"),
    ],
)
def test_times_of_lines_order_as_times_not_as_text(earlier: str, later: str) -> None:
    assert 0 < nanoseconds(earlier) < nanoseconds(later)


def test_what_is_no_time_is_none() -> None:
    assert nanoseconds("unable") == nanoseconds("") == nanoseconds("2026-11-20") == 0


@pytest.fixture
def free_port() -> int:
    """A port such that it and the one before are free."""
    return next(port for port in free_ports(50) if not _connects(port - 1))


def _connects(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _catches_term(pid: int) -> bool:
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt"))
    return bool(int(line.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


# -- the contract that it repeats ---------------------------------------------------------------------------------------------------


def test_the_first_process_of_a_pod_knows_the_same_files_codes_and_reasons_as_the_records() -> None:
    """It is shipped alone, so it cannot import them. All of its file names stand in the constants that are compared here."""
    own = (entry.METRICS, entry.RESULT, entry.TIMELINE, entry.FAILURE.format(rank=3), entry.FORMAT, entry.REFUSED, entry.STOPPED)
    assert own == (
        *(records.METRICS, records.RESULT, records.TIMELINE, records.failure_file(3)),
        *(records.FORMAT, records.EXIT_REFUSED, records.EXIT_STOPPED),
    )
    tree = ast.parse(Path(entry.__file__).read_text())
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    names = [text for text in texts if re.fullmatch(r"[\w{}*-]*\.jsonl?", text)]
    assert sorted(names) == sorted((entry.METRICS, entry.RESULT, entry.TIMELINE, entry.FAILURE))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "self.write_failure"]
    reasons = [ast.literal_eval(call.args[1]) for call in calls]
    assert len(reasons) == 2 and set(reasons) <= {reason.value for reason in Reason}
