"""A whole network from a checkpoint of any layout, or from a folder in the Hugging Face layout."""

from __future__ import annotations

from pathlib import Path

import torch

from trainer.checkpoint.manifest import CheckpointError, FoundCheckpoint, read_manifest
from trainer.checkpoint.pieces import whole
from trainer.checkpoint.shards import Reader
from trainer.convert.huggingface import read_weights
from trainer.models.transformer import Transformer
from trainer.spec import ConfigError, ModelConfig, ResolvedModelConfig, from_dict, resolve_model
from trainer.spec.artifacts import ArtifactKind, find_artifact, newest_checkpoint
from trainer.spec.corpus import TOKENIZER


def load_network(folder: Path, dtype: torch.dtype) -> tuple[Transformer, ResolvedModelConfig]:
    """The network in ``folder`` and its shape. ``ConfigError`` if there is none that can be read."""
    found = find_artifact(folder)
    if found is None or found.kind not in (ArtifactKind.CHECKPOINT, ArtifactKind.HUGGINGFACE):
        what = "nothing that is known" if found is None else f"a {found.kind.value}"
        raise ConfigError(f"{folder} holds {what}; give a checkpoint, or a folder with config.json and .safetensors files")
    if found.kind is ArtifactKind.HUGGINGFACE:
        return _from_huggingface(folder, dtype)
    path = newest_checkpoint(folder)
    assert path is not None, "an artifact of this kind has one"
    return _from_checkpoint(path, dtype)


def tokenizer_file(folder: Path) -> Path | None:
    """Where the tokenizer of a checkpoint or Hugging Face folder lies, if it came along."""
    return next((path for place in (folder, folder.parent) if (path := place / TOKENIZER).is_file()), None)


def _from_checkpoint(path: Path, dtype: torch.dtype) -> tuple[Transformer, ResolvedModelConfig]:
    try:
        manifest = read_manifest(FoundCheckpoint(0, 0, path))
        model = resolve_model(from_dict(ModelConfig, manifest["model"], "model."))
        network, reader = Transformer(model).to(dtype), Reader(path, manifest)
        for name, parameter in network.named_parameters():
            reader.read(whole(name, parameter.shape), {"weight": parameter.detach().view(-1)})
    except CheckpointError as error:
        raise ConfigError(f"{error}; give another checkpoint") from None
    return network, model


def _from_huggingface(folder: Path, dtype: torch.dtype) -> tuple[Transformer, ResolvedModelConfig]:
    model, weights = read_weights(folder)
    network = Transformer(model).to(dtype)
    parameters = dict(network.named_parameters())
    with torch.no_grad():
        for name, weight in weights:
            parameters[name].copy_(weight)
    return network, model
