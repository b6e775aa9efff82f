"""Rules that concern the cluster, on top of the run's own (``trainer.config.rules``); and the values derived from it."""

from __future__ import annotations

import dataclasses

from launcher.config.schema import Config
from trainer.config import resolve as resolve_run
from trainer.config import to_dict


def resolve(config: Config) -> Config:
    """``config`` with every derived value filled in and every rule checked. ``ConfigError`` on the first broken one."""
    run = config.train_config()
    if run.run.peak_tflops is None:
        peak = config.cluster.hardware.peak_tflops.get(run.run.precision)
        run = dataclasses.replace(run, run=dataclasses.replace(run.run, peak_tflops=peak))
    run = resolve_run(run, config.cluster.world_size)
    return dataclasses.replace(config, **{f.name: getattr(run, f.name) for f in dataclasses.fields(run)})


def identity(config: Config) -> dict[str, object]:
    """What makes two trials the same: the run without where it is tracked, and the cluster. Not the sweep's bookkeeping."""
    run = to_dict(config.train_config())
    del run["tracking"]
    return {"run": run, "cluster": to_dict(config.cluster)}
