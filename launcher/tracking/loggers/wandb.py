"""Runs of Weights & Biases, offline: one for each trial that has ended. ``wandb sync`` of its folder sends them, when the user likes."""

from __future__ import annotations

from launcher.results.rows import configuration, step_rows
from launcher.tracking.loggers import SweepLogger
from launcher.tracking.names import run_name, trial_metrics
from launcher.trials.labels import trial_labels
from launcher.trials.store import Record, Sweep

MARK = ".written"
"""Ending of an empty file that says of which attempt of a trial a run is complete."""


class WandbLogger(SweepLogger):
    """Writes each trial's run once per attempt. A run's id is the trial's, so that one which is sent again replaces the former."""

    def update(self, sweep: Sweep) -> None:
        names, wrote = trial_labels(sweep.records), False
        for record in sweep.records:
            mark = self.folder / f".{record.id}-{record.attempt}{MARK}"
            if record.status.final and record.config and not mark.exists():
                self.folder.mkdir(parents=True, exist_ok=True)
                self._write(sweep, record, run_name(record, names[record.id]))
                mark.touch()
                wrote = True
        if wrote:
            import wandb

            wandb.teardown()  # its service would outlive us

    def _write(self, sweep: Sweep, record: Record, name: str) -> None:
        import wandb

        settings = wandb.Settings(silent=True, console="off", disable_git=True, save_code=False, x_disable_stats=True, x_disable_meta=True)
        run = wandb.init(
            mode="offline", dir=str(self.folder), project="trireme", group=sweep.name, id=record.id, name=name, tags=[record.status.value],
            config=configuration(record), notes=record.detail, reinit="create_new", settings=settings,
        )  # fmt: skip
        for row in step_rows(record):
            run.log({f"train/{name}": row[name] for name in row if name not in ("trial", "attempt", "step", "time")}, step=row["step"])
        run.summary.update(trial_metrics(record) | {"status": record.status.value, "reason": record.reason.value if record.reason else ""})
        run.finish(exit_code=0 if record.status.value == "done" else 1)
