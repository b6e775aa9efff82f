"""Event files for TensorBoard: a run for each trial that has begun, its metrics by step, its summary once it is done."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.results.rows import figures, step_figures
from launcher.tracking.loggers import SweepLogger
from launcher.tracking.names import run_name, trial_metrics
from launcher.trials.labels import trial_labels
from launcher.trials.store import Record, Sweep
from trainer.shared.records.trial_files import METRICS, positive, step_lines
from trainer.shared.run.files import Tail


@dataclass
class EventRun:
    """A trial's event file, and how much of the trial it holds."""

    file: Path
    offset: int = 0  # bytes of metrics.jsonl
    step: int = -1  # the last one
    ended: bool = False  # it has the summary
    waiting: list[Any] = field(default_factory=list)  # events to be written


class TensorboardLogger(SweepLogger):
    """Appends to event files; a run that this process does not know is written anew, in place of the file of a killed one."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self._runs: dict[str, EventRun] = {}

    def update(self, sweep: Sweep) -> None:
        names = trial_labels(sweep.records)
        for record in sweep.records:
            if record.started or (record.status.final and (record.directory / METRICS).exists()):
                run = self._run(record, run_name(record, names[record.id]).replace("/", "_"))
                self._steps(record, run)
                self._summary(record, run)
                self._write(run)

    def _run(self, record: Record, name: str) -> EventRun:
        """Returns the trial's run under its present name, which changes with the trials beside it."""
        from tensorboard.compat.proto.event_pb2 import Event

        folder = self.folder / name
        for other in self.folder.glob(f"* {record.id[:6]}"):
            if other != folder:
                other.rename(folder)
        folder.mkdir(parents=True, exist_ok=True)
        if record.id not in self._runs:
            for old in folder.glob("events.out.tfevents.*"):
                old.unlink()
            run = self._runs[record.id] = EventRun(folder / f"events.out.tfevents.{int(time.time())}.{record.id}")
            run.waiting.append(Event(wall_time=record.started or time.time(), file_version="brain.Event:2"))
        self._runs[record.id].file = folder / self._runs[record.id].file.name
        return self._runs[record.id]

    def _steps(self, record: Record, run: EventRun) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        tail = Tail(record.directory / METRICS, run.offset)
        for line in step_lines(tail):
            if line["step"] <= run.step:  # a later attempt runs it again, and counts
                run.waiting.append(Event(step=line["step"], session_log=SessionLog(status=SessionLog.START)))
            run.step = line["step"]
            scalars = {f"train/{name}": value for name, value in step_figures(line).items()}
            run.waiting.append(_event(scalars, run.step, positive(line.get("time")) or 0.0))
        run.offset = tail.offset

    def _summary(self, record: Record, run: EventRun) -> None:
        if record.status.final and not run.ended:
            scalars = {f"trial/{name}": value for name, value in (trial_metrics(record) | figures(record)).items()}
            run.waiting.append(_event(scalars, max(run.step, 0), record.ended or 0.0))
            run.ended = True

    def _write(self, run: EventRun) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        if run.waiting:
            with run.file.open("ab") as file:
                writer = RecordWriter(file)
                for event in run.waiting:
                    writer.write(event.SerializeToString())
            run.waiting = []


def _event(scalars: Mapping[str, float], step: int, at: float) -> Any:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
    return Event(wall_time=at, step=step, summary=Summary(value=values))
