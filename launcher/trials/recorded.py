"""The configurations in a trial's record, as this version understands them: an earlier version may have written them."""

from __future__ import annotations

from launcher.config.clusters import cluster_from_record
from launcher.config.schema import ClusterConfig
from launcher.trials.store import Record
from trainer.shared.run.read import from_record
from trainer.shared.run.rules import resolve
from trainer.shared.run.schema import ResolvedTrainConfig, TrainConfig


def recorded_run(record: Record) -> ResolvedTrainConfig:
    """``ConfigError`` when its values do not fit together, as today's rules have it."""
    return resolve(from_record(TrainConfig, record.config), record.world_size)


def recorded_cluster(record: Record) -> ClusterConfig:
    """Where the trial runs, or ran."""
    return cluster_from_record(record.cluster)
