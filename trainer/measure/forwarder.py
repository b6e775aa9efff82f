"""Forwards metrics.jsonl from rank 0 to an MLflow server, in a thread that no step waits for.

The thread follows the training loop's file: there is no queue, and nothing accumulates in memory. Every request has a timeout, every
failure lengthens the pause, and after ``FAILURES`` in a row the thread gives up; the launcher copies the rest when the trial has ended. Six
calls of MLflow's REST API suffice: its client would cost rank 0 a second of imports while steps are timed, and retries for minutes.
"""

from __future__ import annotations

import base64
import json
import logging
import math
import os
import ssl
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainer.shared.records.outcome import Status
from trainer.shared.records.trial_files import METRICS, OFFSET, RESULT, step_lines, step_metrics, summary_metrics
from trainer.shared.run.files import Tail, read_json
from trainer.shared.run.read import flatten
from trainer.shared.run.schema import TrackingConfig, TrainConfig

log = logging.getLogger(__name__)

PERIOD_S, LONGEST_PAUSE_S = 2.0, 60.0  # between looks at the file; twice as long after each failure
REQUEST_S = 5.0
CLOSE_S, CLOSE_FAILING_S = 5.0, 0.5  # how long the end of a trial waits for a server that answers, and for one that does not
FAILURES = 20  # in a row: some 15 minutes
BATCH = 150  # lines per request; MLflow takes 1000 metrics at once


@contextmanager
def forwarding(config: TrainConfig, rank: int, directory: Path) -> Iterator[None]:
    """Mirrors ``directory/metrics.jsonl`` while the body runs, on rank 0 and if ``tracking.uri`` is a server. Leaving takes at most
    ``CLOSE_S`` seconds and never raises because of MLflow."""
    uri = config.tracking.uri or ""
    if rank != 0 or not uri.startswith(("http://", "https://")):
        yield
        return
    forwarder = Forwarder(config, directory)
    forwarder.start()
    try:
        yield
    except BaseException:
        forwarder.finish("FAILED")
        raise
    forwarder.finish("FINISHED")


class Forwarder(threading.Thread):
    """One trial's run on the server, known by the tags ``trial`` and ``owner``: a resumed attempt continues it, the launcher adopts it."""

    def __init__(self, config: TrainConfig, directory: Path):
        super().__init__(name="mlflow", daemon=True)
        self._config, self._directory, self._trial = config, directory, directory.resolve().name
        self._server = Server(config.tracking)
        self._ending = threading.Event()
        self._status = "RUNNING"
        self._new_folder = not (directory / METRICS).exists()  # this attempt's file starts at 0, whatever the MLflow run has
        self._run_id, self._offset = "", 0
        self._failures = 0  # in a row

    def finish(self, status: str) -> None:
        """Sends the rest, then ``status``; returns within ``CLOSE_S`` seconds."""
        self._status = status
        self._ending.set()
        self.join(CLOSE_FAILING_S if self._failures else CLOSE_S)
        if self.is_alive():
            log.warning("MLflow at %s is slow; the rest of this trial stays in %s", self._config.tracking.uri, self._directory)

    def run(self) -> None:
        last = False
        while self._failures < FAILURES and not last:
            last = self._ending.is_set()
            try:
                self._forward(last)
                self._failures = 0
            except (OSError, ValueError, KeyError) as error:  # a timeout, an HTTP error, or an unexpected answer
                self._failures += 1
                if self._failures in (1, FAILURES):
                    state = "" if self._failures < FAILURES else "; given up"
                    log.warning("MLflow at %s cannot be reached: %s%s", self._config.tracking.uri, error, state)
            if not last:
                self._ending.wait(min(PERIOD_S * 2**self._failures, LONGEST_PAUSE_S))

    def _forward(self, last: bool) -> None:
        if not self._run_id:
            self._run_id, self._offset = self._open()
        tail = Tail(self._directory / METRICS, self._offset)
        lines = step_lines(tail)
        for first in range(0, len(lines), BATCH):
            metrics = [_metric(*values) for line in lines[first : first + BATCH] for values in step_metrics(line)]
            self._server.call("runs/log-batch", run_id=self._run_id, metrics=metrics)
        if tail.offset != self._offset:
            self._server.call("runs/log-batch", run_id=self._run_id, tags=_pairs({OFFSET: str(tail.offset)}))
            self._offset = tail.offset
        if last:
            figures = summary_metrics(read_json(self._directory / RESULT) or {})
            summary = [_metric(name, value, _now(), 0) for name, value in figures.items()]
            self._server.call("runs/log-batch", run_id=self._run_id, metrics=summary)
            self._server.call("runs/update", run_id=self._run_id, status=self._status, end_time=_now())

    def _open(self) -> tuple[str, int]:
        """The trial's run and how many bytes of the file it has. Creates one, with the resolved configuration, if there is none."""
        experiment, owner = self._server.experiment(), self._config.tracking.owner
        query = f"tags.trial = '{self._trial}' and tags.owner = '{owner}'"
        found = owner and self._server.call("runs/search", experiment_ids=[experiment], filter=query, max_results=1).get("runs")
        if found:
            run_id, tags = found[0]["info"]["run_id"], {tag["key"]: tag["value"] for tag in found[0]["data"].get("tags", [])}
            self._server.call("runs/update", run_id=run_id, status="RUNNING")
            return run_id, 0 if self._new_folder else int(tags.get(OFFSET, 0))
        tags = {"trial": self._trial, "status": Status.RUNNING.value, "owner": owner or ""}
        run = self._server.call("runs/create", experiment_id=experiment, start_time=_now(), run_name=self._trial, tags=_pairs(tags))
        run_id = run["run"]["info"]["run_id"]
        params = [pair for pair in _pairs(flatten(self._config)) if not pair["key"].startswith("tracking.")]
        for first in range(0, len(params), 100):
            self._server.call("runs/log-batch", run_id=run_id, params=params[first : first + 100])
        return run_id, 0


class Refusal(OSError):
    """The server answered with an HTTP error: its code and the start of its text."""

    def __init__(self, error: urllib.error.HTTPError):
        super().__init__(f"{error.code} {error.read(300).decode(errors='replace').strip() or error.reason}")
        self.code = error.code


class Server:
    """Calls an MLflow server's REST interface. Credentials come from MLflow's variables, never from the address, which files hold."""

    def __init__(self, tracking: TrackingConfig):
        self._base = f"{(tracking.uri or '').rstrip('/')}/api/2.0/mlflow/"
        self._experiment = tracking.experiment
        user, password = (os.environ.get(f"MLFLOW_TRACKING_{name}", "") for name in ("USERNAME", "PASSWORD"))
        token = os.environ.get("MLFLOW_TRACKING_TOKEN")
        self._headers = {"Content-Type": "application/json"}
        if user:
            self._headers["Authorization"] = "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()
        elif token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._tls = ssl.create_default_context(cafile=os.environ.get("MLFLOW_TRACKING_SERVER_CERT_PATH"))
        if os.environ.get("MLFLOW_TRACKING_INSECURE_TLS", "").lower() in ("1", "true"):
            self._tls.check_hostname, self._tls.verify_mode = False, ssl.CERT_NONE

    def call(self, method: str, **body: Any) -> dict[str, Any]:
        """POST ``body``; the answer. ``OSError`` if the server cannot be reached, ``Refusal`` if it answers with an error."""
        return self._send(urllib.request.Request(self._base + method, json.dumps(body).encode(), self._headers))

    def experiment(self) -> str:
        """The id of the configured experiment, created if there is none."""
        url = f"{self._base}experiments/get-by-name?{urllib.parse.urlencode({'experiment_name': self._experiment})}"
        try:
            return str(self._send(urllib.request.Request(url, headers=self._headers))["experiment"]["experiment_id"])
        except Refusal as refusal:
            if refusal.code != 404:
                raise
        return str(self.call("experiments/create", name=self._experiment)["experiment_id"])

    def _send(self, request: urllib.request.Request) -> dict[str, Any]:
        try:
            with urllib.request.urlopen(request, timeout=REQUEST_S, context=self._tls) as answer:
                return dict(json.loads(answer.read() or b"{}"))
        except urllib.error.HTTPError as error:
            raise Refusal(error) from None


def _metric(name: str, value: float, stamp_ms: int, step: int) -> dict[str, Any]:
    return {"key": name, "value": _json_number(value), "timestamp": stamp_ms, "step": step}


def _pairs(values: Mapping[str, Any]) -> list[dict[str, str]]:
    return [{"key": name, "value": value if isinstance(value, str) else json.dumps(value)} for name, value in values.items()]


def _json_number(value: float) -> float | str:
    """JSON has no NaN; MLflow reads it, and infinity, from text."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return value


def _now() -> int:
    return int(1000 * time.time())
