"""What a run is, as typed data without torch: the schema, how it is read, and the rules that span its fields."""

from trainer.config.errors import ConfigError
from trainer.config.outcome import Reason, Status
from trainer.config.read import flatten, from_dict, load, save, to_dict
from trainer.config.rules import check, micro_batches, resolve, resolve_model, world_size_of
from trainer.config.schema import (
    CheckpointConfig,
    DataConfig,
    LayoutConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    ShardingConfig,
    TrackingConfig,
    TrainConfig,
    field_docs,
)

__all__ = [
    "CheckpointConfig",
    "ConfigError",
    "DataConfig",
    "LayoutConfig",
    "ModelConfig",
    "OptimizerConfig",
    "Reason",
    "RunConfig",
    "ShardingConfig",
    "Status",
    "TrackingConfig",
    "TrainConfig",
    "check",
    "field_docs",
    "flatten",
    "from_dict",
    "load",
    "micro_batches",
    "resolve",
    "resolve_model",
    "save",
    "to_dict",
    "world_size_of",
]
