"""The language that launcher and trainer share, without torch: configurations, layouts, and the files that they exchange.

``schema``, ``read`` and ``rules`` define a run; ``grid``, ``balance``, ``shards``, ``schedule``, ``messages`` and ``simulate`` define
its layout; ``flops`` counts its work; ``files``, ``records``, ``outcome`` and ``corpus`` what is left on disk.
"""

from trainer.spec.actions import Action, Kind, Schedule
from trainer.spec.balance import blocks_per_chunk, head_weight
from trainer.spec.errors import ConfigError
from trainer.spec.grid import Coordinates, Grid
from trainer.spec.outcome import Reason, Status
from trainer.spec.read import flatten, from_dict, from_record, load, save, to_dict
from trainer.spec.rules import check, micro_batches, resolve, resolve_model, world_size_of
from trainer.spec.schedule import build, in_flight
from trainer.spec.schema import (
    LOSS_CHUNK_MB,
    CheckpointConfig,
    DataConfig,
    LayoutConfig,
    ModelConfig,
    OptimizerConfig,
    ResolvedLayoutConfig,
    ResolvedModelConfig,
    ResolvedOptimizerConfig,
    ResolvedTrainConfig,
    RunConfig,
    ShardingConfig,
    TrackingConfig,
    TrainConfig,
    TuneConfig,
    field_docs,
)
from trainer.spec.shards import Bucket, Factors, Level, Piece, Slot, plan_buckets, vocabulary_rows
from trainer.spec.simulate import Deadlock, Span, Times, idle_fraction, makespan, simulate

__all__ = [
    "LOSS_CHUNK_MB",
    "Action",
    "Bucket",
    "CheckpointConfig",
    "ConfigError",
    "Coordinates",
    "DataConfig",
    "Deadlock",
    "Factors",
    "Grid",
    "Kind",
    "LayoutConfig",
    "Level",
    "ModelConfig",
    "OptimizerConfig",
    "Piece",
    "Reason",
    "ResolvedLayoutConfig",
    "ResolvedModelConfig",
    "ResolvedOptimizerConfig",
    "ResolvedTrainConfig",
    "RunConfig",
    "Schedule",
    "ShardingConfig",
    "Slot",
    "Span",
    "Status",
    "Times",
    "TrackingConfig",
    "TrainConfig",
    "TuneConfig",
    "blocks_per_chunk",
    "build",
    "check",
    "field_docs",
    "flatten",
    "from_dict",
    "from_record",
    "head_weight",
    "idle_fraction",
    "in_flight",
    "load",
    "makespan",
    "micro_batches",
    "plan_buckets",
    "resolve",
    "resolve_model",
    "save",
    "simulate",
    "to_dict",
    "vocabulary_rows",
    "world_size_of",
]
