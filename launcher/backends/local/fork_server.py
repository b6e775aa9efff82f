"""The launcher's end of ``python -m trainer.fork_server``: one process that has imported torch already and forks ranks on request.

Messages are JSON lines over its standard input and output. The server is in a session of its own, so that Ctrl-C reaches the
launcher only; when the launcher dies, even by SIGKILL, the pipe ends and the fork server takes its ranks with it.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, Any

from launcher.backends.contract import BackendError
from launcher.own_python import finding_ours, module

COMMAND = module("trainer.fork_server")


class ForkServerError(BackendError):
    """The server ended or does not answer. The message holds the last lines that it wrote to standard error."""


@dataclass
class RankGroup:
    """The ranks of one request: process ids and, for those that ended, exit codes (negative: killed by that signal)."""

    pids: dict[int, int] = field(default_factory=dict)
    codes: dict[int, int] = field(default_factory=dict)
    error: str = ""  # why it could not be started


class ForkServerClient:
    """Starts lazily, with the first request. ``groups`` is as of the last ``listen``."""

    def __init__(self, command: Sequence[str] = COMMAND):
        self.groups: dict[str, RankGroup] = {}
        self._command = list(command)
        self._process: subprocess.Popen[bytes] | None = None
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the fork server
        self._buffer = b""

    def start(self, key: str, request: dict[str, Any], timeout: float = 120.0) -> RankGroup:
        """Forks the ranks of ``request`` (protocol: ``trainer/fork_server.py``) and returns once their process ids are known."""
        group = self.groups[key] = RankGroup()
        self._send({"start": key, **request})
        deadline = time.monotonic() + timeout
        while not group.pids:
            if time.monotonic() > deadline:
                raise ForkServerError(f"the worker process did not answer within {timeout:g} s{self._last_words()}")
            self.listen(0.1)
            if group.error:
                raise ForkServerError(f"the ranks could not be started: {group.error}")
        return group

    def kill(self, key: str) -> None:
        """SIGTERM to all ranks of ``key``, then SIGKILL after the fork server's grace. ``ForkServerError`` if it has ended."""
        self._send({"kill": key})

    def listen(self, seconds: float = 0.0) -> None:
        """Reads messages of the fork server, waiting up to ``seconds``. Raises ``ForkServerError`` if it has ended."""
        if self._process is None or self._process.stdout is None:
            return
        stream = self._process.stdout
        while select.select([stream], [], [], seconds)[0]:
            data = os.read(stream.fileno(), 1 << 16)
            if not data:
                raise ForkServerError(f"the worker process ended with code {self._process.wait()}{self._last_words()}")
            *lines, self._buffer = (self._buffer + data).split(b"\n")
            for line in lines:
                self._take(json.loads(line))
            seconds = 0.0

    def close(self, timeout: float = 15.0) -> None:
        """Closes its input: the fork server kills running ranks and ends, if it has not ended by itself."""
        if self._process is not None and self._process.stdin is not None:
            with suppress(BrokenPipeError):  # what it did not live to read is still in the buffer
                self._process.stdin.close()
            try:
                self._process.wait(timeout)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None
        self._errors.close()

    def _send(self, message: dict[str, Any]) -> None:
        if self._process is None:
            self._process = start_server(self._command, self._errors)
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise ForkServerError(f"the worker process ended with code {self._process.wait()}{self._last_words()}") from None

    def _take(self, message: dict[str, Any]) -> None:
        if "started" in message:
            self.groups[message["started"]].pids = {int(rank): pid for rank, pid in message["pids"].items()}
        elif message.get("error") and message.get("start") in self.groups:
            self.groups[message["start"]].error = message["error"]
        elif "exited" in message:
            self.groups[message["exited"]].codes[int(message["rank"])] = message["code"]

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode("utf-8", "replace").strip().splitlines()[-3:]
        return ": " + " | ".join(lines) if lines else ""


def start_server(command: Sequence[str], errors: IO[bytes]) -> subprocess.Popen[bytes]:
    """Starts ``command`` as a fork server in a session of its own, which writes its complaints to ``errors``."""
    environment = os.environ | finding_ours() | {"OMP_NUM_THREADS": "1"}  # must be there before torch is imported
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=environment, start_new_session=True)
