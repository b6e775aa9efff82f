"""The process that copies a sweep into MLflow: ``python -m launcher.results.mirror --dir runs SWEEP``.

It follows the files that launcher and trainer write, and nothing else, so it can be killed, repeated and run late: what it
has written is noted in tags of the runs themselves, and MLflow drops a metric that it has already. It runs beside measured
trials, so it takes only processor time that nobody else wants.

A line on standard input means "look now"; its end means "look once more and finish".
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import select
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.results import tracked
from launcher.results.database import artifact_folder, database_uri, exclusively, experiment_id, open_client, owner_of
from launcher.results.measurements import measure, newest_logs, read_lines, tail
from launcher.results.ranking import rank
from launcher.sweep.labels import trial_labels
from launcher.sweep.store import Record, Store, Sweep
from trainer.config import TrackingConfig, from_dict

if TYPE_CHECKING:
    from mlflow import MlflowClient

log = logging.getLogger("mirror")

PERIOD_S = 5.0
"""Seconds between looks at the files while nothing is reported."""
LONGEST_PAUSE_S = 60.0
"""Between attempts while the tracking store fails."""

PARENT, RUN_NAME = "mlflow.parentRunId", "mlflow.runName"
OFFSET, STATE = "trireme.mirrored_bytes", "trireme.mirrored_state"
FILES = ("config.yaml", "trial.json", "result.json", "timeline.json")
LOG_FILES, LOG_BYTES = 64, 4 << 20
"""At most so many ranks' logs, and so much of the end of each, become artifacts."""


@dataclass
class Run:
    """A trial's run, and how much of the trial it holds."""

    id: str
    offset: int = 0  # bytes of metrics.jsonl
    state: str = ""  # of the record, when it was last written
    params: set[str] = field(default_factory=set)  # names; MLflow lets nobody change a value
    metrics: dict[str, float] = field(default_factory=dict)  # newest values, as they were found
    name: str = ""

    @classmethod
    def of(cls, run: Any) -> Run:
        tags = run.data.tags
        return cls(
            run.info.run_id,
            int(tags.get(OFFSET, 0)),
            tags.get(STATE, ""),
            set(run.data.params),
            dict(run.data.metrics),
            tags.get(RUN_NAME, ""),
        )


class Mirror:
    """One sweep's parent run and child runs. Any exception of MLflow or of the network may come out of ``update``."""

    def __init__(self, root: Path, sweep: str):
        self.name, self._root = sweep, root
        self._store = Store(root)
        self._client: MlflowClient | None = None
        self.experiment = ""  # its id, once ``update`` has succeeded
        self._owner = owner_of(root)
        self._parent = self._parent_state = ""
        self._runs: dict[str, Run] = {}
        self._embedded = True

    def update(self) -> None:
        """Bring MLflow up to what is on disk. Takes the lock; may be repeated at will."""
        with exclusively(self._root):
            try:
                sweep = self._store.sweep(self.name)
                client = self._client or self._open(sweep)
                names = trial_labels(sweep.records)
                for record in sweep.records:
                    self._update_trial(client, record, names[record.id])
                self._update_parent(client, sweep)
            except BaseException:
                self._client = None  # what is in memory may differ from what was written: look again next time
                raise

    # -- finding what is there ----------------------------------------------------------------------------------------------

    def _open(self, sweep: Sweep) -> MlflowClient:
        settings = tracking_of(sweep)
        self._embedded = settings.uri is None
        client = open_client(settings.uri or database_uri(self._root))
        self.experiment = experiment_id(client, settings.experiment, artifact_folder(self._root) if self._embedded else None)
        client.set_experiment_tag(self.experiment, *tracked.view(sweep.name, self._owner))
        tags = {"sweep": sweep.name, "kind": "sweep", "owner": self._owner}
        parents = self._search(client, **tags)
        parent = parents[0] if parents else client.create_run(self.experiment, int(1000 * sweep.created), tags, sweep.name)
        self._parent = parent.info.run_id
        self._parent_state = ""
        children = self._search(client, **{PARENT: self._parent})
        self._runs = {run.data.tags["trial"]: Run.of(run) for run in children if "trial" in run.data.tags}
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

    def _run(self, client: MlflowClient, record: Record) -> Run:
        """The trial's run in this sweep: known, or begun by rank 0 or another mirror meanwhile, or new."""
        if record.id not in self._runs:
            found = self._search(client, trial=record.id, owner=self._owner)
            ours = [run for run in found if run.data.tags.get(PARENT, self._parent) == self._parent]
            if ours:
                client.set_tag(ours[0].info.run_id, PARENT, self._parent)
                self._runs[record.id] = Run.of(ours[0])
            else:
                start = int(1000 * (record.started or record.created or time.time()))
                tags = {PARENT: self._parent, "trial": record.id, "owner": self._owner}
                self._runs[record.id] = Run(client.create_run(self.experiment, start, tags, record.id).info.run_id)
        return self._runs[record.id]

    # -- writing what is new ------------------------------------------------------------------------------------------------

    def _update_trial(self, client: MlflowClient, record: Record, name: str) -> None:
        """New lines of metrics, and whatever a change of the record brings. With a server rank 0 writes, until it has ended."""
        if not self._embedded and not record.status.final:
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

    def _write_metrics(self, client: MlflowClient, record: Record, run: Run) -> None:
        from mlflow.entities import Metric

        lines, offset = read_lines(record.directory / "metrics.jsonl", run.offset)
        if offset != run.offset:
            client.log_batch(run.id, [Metric(*values) for line in lines for values in tracked.step_metrics(line)])
            client.set_tag(run.id, OFFSET, str(offset))  # last: lines that are sent again are dropped by MLflow
            run.offset = offset

    def _write_record(self, client: MlflowClient, record: Record, run: Run) -> None:
        from mlflow.entities import Metric, Param, RunTag

        ended = int(1000 * (record.ended or record.created or 0))
        params = {name: value for name, value in tracked.params(record).items() if name not in run.params}
        summary = {name: value for name, value in tracked.summary_metrics(record).items() if run.metrics.get(name) != value}
        client.log_batch(
            run.id,
            metrics=[Metric(name, value, ended, 0) for name, value in summary.items()],
            params=[Param(name, value) for name, value in params.items()],
            tags=[RunTag(name, value) for name, value in tracked.tags(record, self.name).items()],
        )
        run.params |= params.keys()
        run.metrics |= summary
        if record.status.final:
            self._write_files(client, record, run)
            client.set_terminated(run.id, tracked.RUN_STATUS[record.status], ended or None)
        else:
            client.update_run(run.id, tracked.RUN_STATUS[record.status])

    def _write_files(self, client: MlflowClient, record: Record, run: Run) -> None:
        for path in [*(record.directory / name for name in FILES), *record.directory.glob("failure-*.json")]:
            if path.exists():
                client.log_artifact(run.id, str(path))
        for path in newest_logs(record.directory)[:LOG_FILES]:
            client.log_text(run.id, tail(path, LOG_BYTES), f"logs/{path.name}")

    def _update_parent(self, client: MlflowClient, sweep: Sweep) -> None:
        state = " ".join(f"{record.id}:{record.status.value}:{record.ended}" for record in sweep.records)
        if state == self._parent_state:
            return
        for name, value in tracked.sweep_tags(sweep, rank(measure(sweep.records))).items():
            client.set_tag(self._parent, name, value)
        if all(record.status.final for record in sweep.records):
            ends = [record.ended for record in sweep.records if record.ended]
            client.set_terminated(self._parent, "FINISHED", int(1000 * max(ends)) if ends else None)
        else:
            client.update_run(self._parent, "RUNNING")
        self._parent_state = state


def tracking_of(sweep: Sweep) -> TrackingConfig:
    """Where the sweep is tracked: all its trials say the same, and pruned points say nothing."""
    configs = [record.config["tracking"] for record in sweep.records if "tracking" in record.config]
    return from_dict(TrackingConfig, configs[0]) if configs else TrackingConfig()


# -- the process --------------------------------------------------------------------------------------------------------------


def main(argv: list[str]) -> int:
    """0 when everything was mirrored, 1 when the tracking store failed until the end."""
    parser = argparse.ArgumentParser("python -m launcher.results.mirror", description="Copy a sweep into MLflow while it runs.")
    parser.add_argument("sweep")
    parser.add_argument("--dir", default="runs")
    arguments = parser.parse_args(argv)
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.WARNING, stream=sys.stderr)
    logging.getLogger("urllib3").setLevel(logging.ERROR)  # each retry would be a page
    stand_back()
    return follow(Mirror(Path(arguments.dir), arguments.sweep))


def follow(mirror: Mirror) -> int:
    """Mirror until standard input ends, then what is left. A store that fails is asked ever less often, and once more at the end."""
    pause, trouble, ended = PERIOD_S, "", False
    while not ended:
        ended = wait(pause)
        if ended:
            come_forward()
        said, trouble = trouble, attempt(mirror)
        pause = min(2 * pause, LONGEST_PAUSE_S) if trouble else PERIOD_S
        if trouble not in ("", said):
            log.warning("%s is not mirrored: %s", mirror.name, trouble)
    return 1 if trouble else 0


def attempt(mirror: Mirror) -> str:
    """One update. What went wrong in MLflow, the database or the network, in one line; empty when nothing did."""
    try:
        mirror.update()
    except Exception as error:
        return f"{type(error).__name__}: {error}".partition("\n")[0][:500]
    return ""


def wait(seconds: float) -> bool:
    """Until something is reported on standard input, at most ``seconds``; True once the input has ended."""
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    return bool(ready) and os.read(sys.stdin.fileno(), 65536) == b""


def stand_back() -> None:
    """Run only when a processor would be idle: the trials that share the machine are being timed."""
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    else:
        os.nice(19)


def come_forward() -> None:
    """Run like any other process, where the system lets one return to that: the launcher waits."""
    if hasattr(os, "SCHED_IDLE"):
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
