"""Mirrors a sweep in MLflow: a parent run, and a child run for each trial that has begun.

It is made from the files of launcher and trainer alone, so it can be killed, repeated and run late: tags of the runs note the written part,
and MLflow drops duplicate metrics. ``copier.py`` is the process.
"""

from __future__ import annotations

import getpass
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.results.measurements import measure, newest_logs, tail
from launcher.results.ranking import rank
from launcher.results.report import render
from launcher.tracking import names as tracked
from launcher.tracking.database import (
    artifact_folder,
    database_uri,
    exclusively,
    experiment_id,
    follow_move,
    import_mlflow,
    make_database,
    open_client,
)
from launcher.tracking.lineage import Lineage
from launcher.trials.labels import trial_labels
from launcher.trials.store import Record, Store, Sweep, owner_of
from trainer.shared.records.outcome import Status
from trainer.shared.records.trial_files import CONFIG, METRICS, OFFSET, RESULT, TIMELINE, failure_file, step_lines, step_metrics
from trainer.shared.run.files import Tail
from trainer.shared.run.read import from_record
from trainer.shared.run.schema import TrackingConfig

if TYPE_CHECKING:
    from mlflow import MlflowClient

PARENT, RUN_NAME = "mlflow.parentRunId", "mlflow.runName"
STATE = "trireme.mirrored_state"
FILES = (CONFIG, "trial.json", RESULT, TIMELINE)
LOG_FILES, LOG_BYTES = 64, 4 << 20
"""At most so many ranks' logs, and so much of the end of each, become artifacts."""


@dataclass
class MirroredRun:
    """A trial's run, and how much of the trial it holds."""

    id: str
    offset: int = 0  # bytes of metrics.jsonl
    state: str = ""  # of the record, when it was last written
    params: set[str] = field(default_factory=set)  # names; MLflow lets nobody change a value
    metrics: dict[str, float] = field(default_factory=dict)  # newest values, as they were found
    name: str = ""

    @classmethod
    def of(cls, run: Any) -> MirroredRun:
        tags = run.data.tags
        return cls(
            run.info.run_id,
            int(tags.get(OFFSET, 0)),
            tags.get(STATE, ""),
            set(run.data.params),
            dict(run.data.metrics),
            tags.get(RUN_NAME, ""),
        )


class MlflowSweep:
    """One sweep's parent run and child runs. Any exception of MLflow or of the network may come out of ``update``."""

    def __init__(self, root: Path, sweep: str):
        self.name, self._root = sweep, root
        self._store = Store(root)
        self._client: MlflowClient | None = None
        self.experiment = ""  # its id, once ``update`` has succeeded
        self._owner = owner_of(root)
        self._parent = self._parent_state = ""
        self._parent_metrics: dict[str, float] = {}
        self._runs: dict[str, MirroredRun] = {}
        self._embedded = True

    def update(self) -> None:
        """Brings MLflow up to date with the disk. Takes the lock, and lets others have it between trials; idempotent."""
        sweep = self._store.sweep(self.name)
        try:
            client = self._client or self._open(sweep)
            names = trial_labels(sweep.records)
            for record in sweep.records:
                with exclusively(self._root):
                    self._update_trial(client, record, names[record.id])
            with exclusively(self._root):
                self._update_parent(client, sweep)
        except BaseException:
            self._client = None  # memory may differ from the server: look again next time
            raise

    # -- finding existing runs ----------------------------------------------------------------------------------------------

    def _open(self, sweep: Sweep) -> MlflowClient:
        settings = tracking_of(sweep)
        self._embedded = settings.uri is None
        import_mlflow()  # takes seconds, and is nothing to hold a lock for
        if self._embedded:
            make_database(self._root)
        with exclusively(self._root):
            client = open_client(settings.uri or database_uri(self._root))
            if self._embedded:
                follow_move(self._root)
            return self._find(client, sweep, settings)

    def _find(self, client: MlflowClient, sweep: Sweep, settings: TrackingConfig) -> MlflowClient:
        """The sweep's runs as far as there are any; its parent run is made if there is none."""
        self.experiment = experiment_id(client, settings.experiment, artifact_folder(self._root) if self._embedded else None)
        client.set_experiment_tag(self.experiment, *tracked.view(sweep.name, self._owner))
        tags = {"sweep": sweep.name, "kind": "sweep", "owner": self._owner}
        parents = self._search(client, **tags)
        parent = parents[0] if parents else client.create_run(self.experiment, int(1000 * sweep.created), tags, sweep.name)
        self._parent = parent.info.run_id
        self._parent_state, self._parent_metrics = "", dict(parent.data.metrics)
        children = self._search(client, **{PARENT: self._parent})
        self._runs = {run.data.tags["trial"]: MirroredRun.of(run) for run in children if "trial" in run.data.tags}
        self._client = client
        return client

    def _search(self, client: MlflowClient, **tags: str) -> list[Any]:
        """The runs that have these tags, the oldest first."""
        query = " and ".join(f"tags.`{name}` = '{value}'" for name, value in tags.items())
        found: list[Any] = []
        token: str | None = ""
        while token is not None:
            page = client.search_runs([self.experiment], query, max_results=1000, order_by=["start_time ASC"], page_token=token or None)
            found, token = found + list(page), page.token or None
        return found

    def _run(self, client: MlflowClient, record: Record) -> MirroredRun:
        """Returns the trial's run: known, begun meanwhile by rank 0 or another mirror, or new. MLflow's start times are fixed."""
        if record.id not in self._runs:
            found = self._search(client, trial=record.id, owner=self._owner)
            ours = [run for run in found if run.data.tags.get(PARENT, self._parent) == self._parent]
            if ours:
                client.set_tag(ours[0].info.run_id, PARENT, self._parent)
                self._runs[record.id] = MirroredRun.of(ours[0])
            else:
                start = int(1000 * (record.started or record.ended or time.time()))
                tags = {PARENT: self._parent, "trial": record.id, "owner": self._owner}
                self._runs[record.id] = MirroredRun(client.create_run(self.experiment, start, tags, record.id).info.run_id)
        return self._runs[record.id]

    # -- writing changes ----------------------------------------------------------------------------------------------------

    def _update_trial(self, client: MlflowClient, record: Record, name: str) -> None:
        """Writes new metrics and changes of the record; with a server, rank 0 writes until it has ended. A waiting trial has no run, whose
        duration would include the queue."""
        if not record.status.final and (not self._embedded or (record.status is not Status.RUNNING and record.id not in self._runs)):
            return
        run, state = self._run(client, record), f"{record.status.value} {record.attempt} {record.ended or ''}".strip()
        self._write_metrics(client, record, run)
        if run.state != state:
            self._write_record(client, record, run)
            client.set_tag(run.id, STATE, state)  # last: a mirror that is killed before writes the record again
            run.state = state
        if run.name != (name := tracked.run_name(record, name)):  # it says what sets the trial apart, and trials may have been added
            client.set_tag(run.id, RUN_NAME, name)
            run.name = name

    def _write_metrics(self, client: MlflowClient, record: Record, run: MirroredRun) -> None:
        from mlflow.entities import Metric

        tail = Tail(record.directory / METRICS, run.offset)
        lines = step_lines(tail)
        if tail.offset != run.offset:
            client.log_batch(run.id, [Metric(*values) for line in lines for values in step_metrics(line)])
            client.set_tag(run.id, OFFSET, str(tail.offset))  # last: lines that are sent again are dropped by MLflow
            run.offset = tail.offset

    def _write_record(self, client: MlflowClient, record: Record, run: MirroredRun) -> None:
        from mlflow.entities import Metric, Param, RunTag

        ended = int(1000 * (record.ended or record.created or 0))
        params = {name: value for name, value in tracked.params(record).items() if name not in run.params}
        summary = {name: value for name, value in tracked.trial_metrics(record).items() if run.metrics.get(name) != value}
        client.log_batch(
            run.id,
            metrics=[Metric(name, value, ended, 0) for name, value in summary.items()],
            params=[Param(name, value) for name, value in params.items()],
            tags=[RunTag(name, value) for name, value in (tracked.tags(record, self.name) | {"mlflow.user": user()}).items()],
        )
        run.params |= params.keys()
        run.metrics |= summary
        if record.status is Status.DONE:
            Lineage(client, self.experiment, self.name, self._owner).write(run.id, record)
        if record.status.final:
            self._write_files(client, record, run)
            client.set_terminated(run.id, tracked.RUN_STATUS[record.status], ended or None)
        else:
            client.update_run(run.id, tracked.RUN_STATUS[record.status])

    def _write_files(self, client: MlflowClient, record: Record, run: MirroredRun) -> None:
        for path in [*(record.directory / name for name in FILES), *record.directory.glob(failure_file("*"))]:
            if path.exists():
                client.log_artifact(run.id, str(path))
        for path in newest_logs(record.directory)[:LOG_FILES]:
            client.log_text(run.id, tail(path, LOG_BYTES), f"logs/{path.name}")

    def _update_parent(self, client: MlflowClient, sweep: Sweep) -> None:
        state = " ".join([f"{record.id}:{record.status.value}:{record.ended}" for record in sweep.records] + ["front"] * bool(sweep.front))
        if state == self._parent_state:
            return
        from mlflow.entities import Metric, RunTag

        ranked, now = rank(measure(sweep.records)), int(1000 * time.time())
        changed = {name: value for name, value in tracked.sweep_metrics(ranked).items() if self._parent_metrics.get(name) != value}
        tags = tracked.sweep_tags(sweep, ranked) | {"mlflow.user": user()}
        client.log_batch(
            self._parent,
            metrics=[Metric(name, value, now, 0) for name, value in changed.items()],
            tags=[RunTag(name, value) for name, value in tags.items()],
        )
        self._parent_metrics |= changed
        if sweep.front:
            client.log_text(self._parent, render(sweep), "report.html")
        if all(record.status.final for record in sweep.records):
            ends = [record.ended for record in sweep.records if record.ended]
            client.set_terminated(self._parent, "FINISHED", int(1000 * max(ends)) if ends else None)
        else:
            client.update_run(self._parent, "RUNNING")
        self._parent_state = state


def tracking_of(sweep: Sweep) -> TrackingConfig:
    """Returns where the sweep is tracked: all its trials agree, and pruned points have no setting."""
    configs = [record.config["tracking"] for record in sweep.records if "tracking" in record.config]
    return from_record(TrackingConfig, configs[0]) if configs else TrackingConfig()


def attempt(update: Callable[[], None]) -> str:
    """Runs one update. Returns what went wrong in MLflow, a file or the network, in one line; empty when nothing did."""
    try:
        update()
    except Exception as error:
        return f"{type(error).__name__}: {error}".partition("\n")[0][:500]
    return ""


def user() -> str:
    """Returns this process' user; a number without a name, as in a container."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())
