"""The tensors of a distributed checkpoint of PyTorch (torch.distributed.checkpoint), under their Hugging Face names.

Trainers that shard a Hugging Face model (FSDP2, Accelerate) save one: ``.metadata`` maps the parts of tensors to files. The model's
config.json must be in the same folder. Tensors are read one at a time, by one process.
"""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import torch
from torch import Tensor

from trainer.shared.families.registry import FAMILIES
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.resolved import ResolvedModelConfig

METADATA = ".metadata"
OPTIMIZER = re.compile(r"(^|\.)(optim|optimizer|optimizers|lr_scheduler|scheduler|dataloader|train_state|rng\w*)(\.|$)")
"""Names of training state, which is not part of the model."""


class Checkpoint:
    """The tensors of the folder ``source`` by name. ``ConfigError`` if it cannot be read."""

    def __init__(self, source: Path, model: ResolvedModelConfig):
        from torch.distributed.checkpoint import FileSystemReader
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        self.source, self.hub = source, FAMILIES[model.family].hub
        try:
            stored = FileSystemReader(source).read_metadata().state_dict_metadata
        except Exception as error:  # a truncated pickle, or one of another version, may raise anything
            raise ConfigError(
                f"{source / METADATA} cannot be read: {error}; give a whole checkpoint of torch.distributed.checkpoint"
            ) from None
        self.tensors = {
            name: entry for name, entry in stored.items() if isinstance(entry, TensorStorageMetadata) and not OPTIMIZER.search(name)
        }
        self.used: set[str] = set()

    def take(self, name: str) -> Tensor:
        """Reads the tensor of that name, with or without a prefix from a trainer ("model.", "app.model.")."""
        known = next((found for n in (name, name.removeprefix(self.hub.root)) if (found := self._find(n)) is not None), None)
        if known is None:
            raise ConfigError(
                f"{self.source} has no tensor {name}; it is incomplete, of another architecture, or names its tensors in another way than "
                "Hugging Face: export it there first"
            )
        self.used.add(known)
        return self._read(known)

    def _find(self, name: str) -> str | None:
        found = [known for known in self.tensors if known == name or known.endswith(f".{name}")]
        return min(found, key=len, default=None)

    def _read(self, name: str) -> Tensor:
        from torch.distributed.checkpoint import load

        entry = self.tensors[name]
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # no process group
                load({name: tensor}, checkpoint_id=self.source, no_dist=True)
        except Exception as error:
            raise ConfigError(f"{self.source}: {name} cannot be read: {error}; copy the checkpoint again") from None
        return tensor

    def check_all_used(self) -> None:
        """Raises ``ConfigError`` for weights that would be left out."""
        left = sorted(n for n in self.tensors if n not in self.used and not n.endswith((*self.hub.computed, self.hub.output)))
        if left:
            raise ConfigError(f"{self.source}: no place for {left[0]} (and {len(left) - 1} more); this variant is not trained here")
