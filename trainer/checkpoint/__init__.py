"""Saving and resuming: sharded, asynchronous, atomic, and readable under any other layout."""

from trainer.checkpoint.checkpoints import Checkpoints, Resumed
from trainer.checkpoint.folder import CheckpointError, Found

__all__ = ["CheckpointError", "Checkpoints", "Found", "Resumed"]
