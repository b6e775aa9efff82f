"""Processes of this Python at the cost of a fork: one process imports the launcher and torch, and each of the others is forked from it.

    process = warm.Process("-m", "launcher", "train", ..., cwd=folder, stdout=PIPE)

The interface is that of ``subprocess.Popen``, and all but the imports is real: process id, signals, exit code, streams, environment, folder.
Their sweeps are not copied into MLflow (tests/tracking looks at that), and the fork servers that they start are forked as well.

``python()`` is an interpreter for the jobs of our own clusters: what it runs is forked as well, into the namespaces, control groups and user
of whoever runs it, and gets its signals.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import functools
import gc
import importlib
import json
import os
import resource
import runpy
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT, CompletedProcess, TimeoutExpired
from typing import IO, Any

import pytest

ROOT = Path(__file__).parents[1]


@functools.cache
def address() -> str:
    """Returns where the process that forks the others listens. The first call starts it; it ends with the caller's process."""
    if Server.path:
        return Server.path
    folder = tempfile.mkdtemp(prefix="trireme-warm-")
    path = f"{folder}/socket"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-c", "from tests import warm; warm.main()", path]
    server = subprocess.Popen(command, stdin=PIPE, stdout=PIPE, env=environment, cwd=ROOT, start_new_session=True)
    assert server.stdin is not None and server.stdout is not None and server.stdout.readline() == b"ready\n"

    def end() -> None:
        server.communicate()
        shutil.rmtree(folder)

    atexit.register(end)
    return path


PYTHON = """\
#!{python} -IS
import json, os, signal, socket, sys

passed_on = {{signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}}
signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
socket.send_fds(server, [b"!"], [0, 1, 2])
request = {{"words": {words!r} + sys.argv[1 + {left_out}:], "cwd": os.getcwd(), "env": dict(os.environ), "guest": __file__, "session": False}}
server.sendall(json.dumps(request | {{"ignored": []}}).encode() + b"\\n")
answers = server.makefile("r")
answers.readline()
for number in passed_on:
    signal.signal(number, lambda number, frame: server.sendall(bytes([number])))
signal.pthread_sigmask(signal.SIG_UNBLOCK, passed_on)
code = int(answers.readline() or -signal.SIGKILL)
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
    os.kill(os.getpid(), -code)
os._exit(code)
"""
"""It stands for the process that it asks for, which dies with it."""


def python(folder: Path | None = None, words: Sequence[str] = (), left_out: int = 0) -> str:
    """Writes an executable that runs its arguments, but for the first ``left_out``, after ``words`` as a ``Process`` in its own place.
    By default it lies beside the socket, in a folder that pods may mount."""
    path = (folder or Path(address()).parent) / "python"
    text = PYTHON.format(python=os.path.realpath(sys.executable), address=address(), words=list(words), left_out=left_out)
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


class Process:
    """``python WORDS``, where ``words`` begin with ``-m MODULE`` or ``-c CODE``, after ``-P`` or ``-u`` if they are there.

    ``session``: in a session of its own, and if its standard input is a terminal, as that one's first process. ``ignored``: signals that it
    is started to ignore, as ``nohup`` does.
    """

    def __init__(
        self,
        *words: object,
        cwd: Path | str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: int | IO[Any] | None = None,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
        text: bool = False,
        session: bool = False,
        ignored: Sequence[int] = (),
    ):
        self.args, self.returncode = [str(word) for word in words], None
        theirs: list[int] = []
        self.stdin = self._pipe(theirs, 0, stdin, text)
        self.stdout = self._pipe(theirs, 1, stdout, text)
        self.stderr = self._pipe(theirs, 2, stderr, text)
        request = {"words": self.args, "cwd": str(cwd or os.getcwd()), "env": dict(os.environ if env is None else env), "session": session,
                   "ignored": [int(number) for number in ignored]}  # fmt: skip
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(address())
        socket.send_fds(self._socket, [b"!"], theirs)
        self._socket.sendall(json.dumps(request).encode() + b"\n")
        self._answers = self._socket.makefile("r")
        self.pid = int(self._answers.readline())
        for descriptor in theirs:
            os.close(descriptor)

    def _pipe(self, theirs: list[int], number: int, given: int | IO[Any] | None, text: bool) -> Any:
        """Returns our end of a stream, if there is one; adds the other end to ``theirs``."""
        if given == PIPE:
            read, write = os.pipe()
            mine, its, mode = (write, read, "w") if number == 0 else (read, write, "r")
            theirs.append(its)
            return os.fdopen(mine, mode if text else f"{mode}b")
        if given == DEVNULL:
            theirs.append(os.open(os.devnull, os.O_RDWR))
        elif given == STDOUT:
            theirs.append(os.dup(theirs[1]))
        else:
            theirs.append(os.dup(number if given is None else given if isinstance(given, int) else given.fileno()))
        return None

    def poll(self) -> int | None:
        with suppress(TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._socket], [], [], timeout)[0]:
                raise TimeoutExpired(self.args, timeout or 0.0)
            self.returncode = int(self._answers.readline())
            self._answers.close()
            self._socket.close()
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[Any, Any]:
        if self.stdin is not None:
            self.stdin.close()
        said: dict[int, Any] = {}
        streams = [(number, stream) for number, stream in ((1, self.stdout), (2, self.stderr)) if stream is not None]
        readers = [threading.Thread(target=lambda n=n, s=s: said.update({n: s.read()}), daemon=True) for n, s in streams]  # type: ignore[misc]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join()
        return said.get(1), said.get(2)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in (self.stdout, self.stderr, self.stdin):
            if stream is not None:
                stream.close()
        self.wait()


def run(*words: object, check: bool = False, **options: Any) -> CompletedProcess[str]:
    """Runs a ``Process`` to its end with captured text output, as ``subprocess.run`` does."""
    process = Process(*words, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, text=True, **options)
    said, complaints = process.communicate()
    done = CompletedProcess(process.args, process.wait(), said, complaints)
    if check:
        assert done.returncode == 0, said + complaints
    return done


def start_server(command: Sequence[str], errors: IO[bytes]) -> Any:
    """Stands in for ``launcher.backends.local.fork_server.start_server``."""
    from launcher.own_python import finding_ours

    environment = os.environ | finding_ours() | {"OMP_NUM_THREADS": "1"}
    if command[0] != sys.executable:
        return subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=errors, env=environment, start_new_session=True)
    return Process(*command[1:], stdin=PIPE, stdout=PIPE, stderr=errors, env=environment, session=True)


class Unmirrored:
    """An observer that tells MLflow nothing, whatever it is called for."""

    begun = False

    def __init__(self, *_: Any):
        self.begin = self.on_trial = self.on_poll = self.close = self.finish = lambda *_: None


REPLACED: dict[str, Any] = {
    "launcher.backends.local.fork_server.start_server": start_server,
    "launcher.tracking.process.MlflowMirror": Unmirrored,
    "launcher.tracking.process.start_copier": lambda *_: None,
}
"""Stand-ins in the launchers of tests, by the name that they replace."""


@contextmanager
def replaced() -> Iterator[None]:
    """Puts the stand-ins in place for verbs that tests run in their own process."""
    with pytest.MonkeyPatch.context() as patch:
        for name, replacement in REPLACED.items():
            patch.setattr(name, replacement)
        yield


@pytest.fixture(scope="module", autouse=True)
def forked() -> Iterator[None]:
    """Applies ``replaced`` to all tests of a folder whose conftest.py imports this, or of a file that does."""
    with replaced():
        yield


# -- the process that forks -------------------------------------------------------------------------------------------------------


class Server:
    """Forks a process for each connection and says its pid, then its exit code. Ends, with all that it forked, at the end of its input."""

    path = ""
    """Where it listens, in itself and in all that it forks."""

    def __init__(self, path: str):
        Server.path = path
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(path)
        for place, mode in ((path, 0o777), (os.path.dirname(path), 0o755)):  # pods have users of their own
            os.chmod(place, mode)
        self.listener.listen(64)
        self.running: dict[int, socket.socket] = {}
        self.guests: dict[socket.socket, int] = {}
        self.wake, wake = os.pipe()
        self.descriptors = [self.wake, wake, self.listener.fileno()]
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> dict[str, Any] | None:
        """Returns the request in each process that is forked, and None in the server, at its end."""
        while True:
            ready = select.select([0, self.listener, self.wake, *self.guests], [], [])[0]
            for connection in self.guests.keys() & ready:
                self.pass_on(connection)
            if self.wake in ready:
                os.read(self.wake, 4096)
                self.reap()
            if self.listener in ready and (request := self.fork()):
                return request
            if 0 in ready and not os.read(0, 1):
                break
        for pid in self.running:
            os.kill(pid, signal.SIGKILL)
        return None

    def reap(self) -> None:
        with suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                connection = self.running.pop(found[0])
                self.guests.pop(connection, None)
                with connection, suppress(BrokenPipeError):
                    connection.sendall(f"{os.waitstatus_to_exitcode(found[1])}\n".encode())

    def pass_on(self, connection: socket.socket) -> None:
        """Sends a guest the signals that its stand-in got, and ends it with that one."""
        signals = b""
        with suppress(ConnectionResetError):
            signals = connection.recv(64)
        pid = self.guests[connection] if signals else self.guests.pop(connection)
        for number in signals or [signal.SIGKILL]:
            os.kill(pid, number)

    def fork(self) -> dict[str, Any] | None:
        connection, _ = self.listener.accept()
        _, streams, _, _ = socket.recv_fds(connection, 1, 3)
        with connection.makefile("r") as lines:
            line = lines.readline()
        if not line.endswith("\n"):  # whoever asked was killed
            connection.close()
            return None
        request: dict[str, Any] = json.loads(line)
        if pid := os.fork():
            self.running[pid] = connection
            if "guest" in request:
                self.guests[connection] = pid
            with suppress(BrokenPipeError):
                connection.sendall(f"{pid}\n".encode())
            for descriptor in streams:
                os.close(descriptor)
            return None
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if "guest" in request:
            enter(*struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)))
        for number, descriptor in enumerate(streams):
            os.dup2(descriptor, number)
        for other in (connection, *self.running.values()):
            other.close()
        for descriptor in (*streams, *self.descriptors):
            os.close(descriptor)
        return request


def enter(pid: int, user: int, group: int) -> None:
    """Moves this process to where another one is: its control groups, its namespaces but that of process ids, its user."""
    namespaces = [os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY) for kind in ("net", "uts", "ipc", "mnt")]
    theirs, ours = (set(Path(f"/proc/{of}/cgroup").read_text().splitlines()) for of in (pid, "self"))
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    groups = [int(number) for number in status["Groups"].split()]
    for line in theirs - ours:
        _, controllers, path = line.split(":", 2)
        folder = Path("/sys/fs/cgroup", controllers.removeprefix("name="))
        if (members := Path(f"{folder}{path}") / "cgroup.procs").exists():
            members.write_text(str(os.getpid()))
    for namespace in namespaces:
        if ctypes.CDLL(None, use_errno=True).setns(namespace, 0):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(namespace)
    os.setgroups(groups)
    os.setgid(group)
    os.setuid(user)


def become(request: dict[str, Any]) -> None:
    """Runs the words of a request in this process, as the interpreter would have."""
    if request["session"]:
        os.setsid()
        if os.isatty(0):
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))  # some are crashed on purpose
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever runs the tests may be under nohup
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    time.tzset()
    words = request["words"]
    safe = "-P" in words[:2]
    while words[0] in ("-P", "-u"):
        del words[0]
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:0] = [*([] if safe else [""]), *(os.path.abspath(path) for path in paths)]
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=stream.isatty())  # type: ignore[union-attr]
    sys.executable = request.get("guest", sys.executable)
    how, *rest = words
    if how == "-m":
        sys.argv = rest
        warnings.filterwarnings("ignore", ".*found in sys.modules", RuntimeWarning)
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif how == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = words
        runpy.run_path(how, run_name="__main__")


def preload() -> None:
    """Imports all that launchers and ranks need."""
    from launcher.cli.main import VERBS
    from launcher.config import compose
    from trainer.__main__ import preload

    for verb in VERBS:
        importlib.import_module(f"launcher.cli.{verb}")
    for name in (
        "launcher.sweep.multirun",
        "launcher.stages.runner",
        "launcher.backends.local.backend",
        "trainer.fork_server",
        "trainer.health",
    ):
        importlib.import_module(name)
    compose(["model=gpt_tiny"])
    preload()
    for name, replacement in REPLACED.items():
        pytest.MonkeyPatch().setattr(name, replacement)


def main() -> None:
    """Forks processes until the end of standard input."""
    preload()
    server = Server(sys.argv[1])
    gc.freeze()
    print("ready", flush=True)
    if request := server.serve():
        try:
            become(request)
            code = 0
        except SystemExit as end:  # any other error ends the interpreter as it always does
            code = end.code if isinstance(end.code, int) else 1 if end.code else 0
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # taking torch apart takes longer than most of these processes
