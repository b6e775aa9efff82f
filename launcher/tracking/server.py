"""An MLflow server over a sweep folder, for one person on this machine: ``trireme ui``, and tests."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
import urllib.request
from pathlib import Path
from types import TracebackType

import psutil

from launcher.own_python import module
from launcher.ports import PORTS, free_port, is_free
from launcher.tracking.database import artifact_folder, database_uri, environment

START_S = 300.0
STOP_S = 5.0


class ServerError(RuntimeError):
    """The MLflow server ended or did not answer; the message says where its words are."""


class PortLost(ServerError):
    """Somebody else has come to listen on the port since it was found free."""


class LocalServer:
    """``mlflow server`` on loopback with one worker and no job runner: two processes instead of fifteen. The database must exist."""

    def __init__(self, root: Path, port: int):
        self.url, self._port, self._log = f"http://127.0.0.1:{port}", port, root / "mlflow-server.log"
        command = [
            *module("mlflow", "server"), "--backend-store-uri", database_uri(root), "--artifacts-destination",
            str(artifact_folder(root)), "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
        ]  # fmt: skip
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment(), start_new_session=True
            )

    def __enter__(self) -> LocalServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def wait_ready(self) -> None:
        """Until it, and nobody else on its port, answers. ``ServerError`` when it ends first, or takes longer than ``START_S``."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                kind = ServerError if is_free(self._port) else PortLost
                raise kind(f"the MLflow server ended with code {self._process.returncode}; see {self._log}")
            if self._answered() and self._listens():
                return
            time.sleep(0.1)
        raise ServerError(f"the MLflow server did not answer within {START_S:g} s; see {self._log}")

    def _answered(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2):
                return True
        except OSError:
            return False

    def _listens(self) -> bool:
        """Returns whether one of its processes holds the port."""
        try:
            family = psutil.Process(self._process.pid)
            found = [each.net_connections("tcp") for each in (family, *family.children(recursive=True))]
        except psutil.NoSuchProcess:
            return False
        return any(c.status == psutil.CONN_LISTEN and c.laddr.port == self._port for each in found for c in each)

    def wait(self) -> int:
        """Until it ends by itself; its exit code."""
        return self._process.wait()

    def close(self) -> None:
        """Ends the server and all that it started."""
        for number, patience in ((signal.SIGTERM, STOP_S), (signal.SIGKILL, None)):
            try:
                os.killpg(self._process.pid, number)
                self._process.wait(patience)
            except ProcessLookupError:
                return
            except subprocess.TimeoutExpired:
                continue


def server_port(wanted: int | None = None) -> int:
    """``wanted`` if nobody listens there, else a free port. ``ServerError`` when there is none."""
    port = free_port([*([wanted] if wanted else []), *random.sample(PORTS, 100)])
    if port is None:
        raise ServerError("this machine has no free port")
    return port


def runs_page(url: str, experiment: str, view: str) -> str:
    """The address of a view in MLflow's page: of a sweep's trials, fastest first, as the mirror has saved it (``tracked.view``)."""
    return f"{url.rstrip('/')}/#/experiments/{experiment}/runs?viewStateShareKey={view}&workflowType=machine_learning"
