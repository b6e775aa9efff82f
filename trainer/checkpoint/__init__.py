"""Saving and resuming: sharded, asynchronous, atomic, and readable under any other layout."""

from trainer.checkpoint.checkpoints import Checkpoints, DataOrder, Resumed
from trainer.shared.records.manifest import CheckpointError, FoundCheckpoint

__all__ = ["CheckpointError", "Checkpoints", "DataOrder", "FoundCheckpoint", "Resumed"]
