"""Rules that concern the cluster, on top of the run's own (``trainer.config.rules``); and the values derived from it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from launcher.config.schema import Config
from trainer.config import resolve as resolve_run
from trainer.config.corpus import check_corpus


def resolve(config: Config) -> Config:
    """``config`` with every derived value filled in and every rule checked. ``ConfigError`` on the first broken one."""
    run = config.train_config()
    if run.run.peak_tflops is None:
        peak = config.cluster.hardware.peak_tflops.get(run.run.precision)
        run = dataclasses.replace(run, run=dataclasses.replace(run.run, peak_tflops=peak))
    run = resolve_run(run, config.cluster.world_size)
    return dataclasses.replace(config, **{f.name: getattr(run, f.name) for f in dataclasses.fields(run)})


def locate_data(config: Config) -> Config:
    """``config`` with the corpus found where the ranks will look for it; ``ConfigError`` if it cannot be read.

    The path becomes absolute, so that a trial's configuration can be run by hand from anywhere. Ranks that see another file
    system (pods, a container image) find their data themselves, and their path is left as it is.
    """
    if config.data.kind != "corpus" or config.cluster.backend == "kubernetes" or config.cluster.container.image is not None:
        return config
    check_corpus(config.data, config.model)
    return dataclasses.replace(config, data=dataclasses.replace(config.data, path=str(Path(config.data.path).absolute())))
