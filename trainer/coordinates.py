"""``python -m trainer.coordinates CONFIG.yaml...``: the sizes of activations of each run, at first and after its steps, as JSON.

A coordinate check (Yang et al. 2022, arXiv 2203.03466, appendix D.1) compares them over widths. Sizes are root mean squares of the
coordinates, on one batch that stays the same. Those of blocks are over all of them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from trainer.comm.collectives import World
from trainer.data import open_dataset
from trainer.data.dataset import Dataset
from trainer.models.attention import Attention
from trainer.models.layers import MLP
from trainer.models.transformer import Block, Transformer
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.read import load
from trainer.shared.run.resolved import ResolvedTrainConfig
from trainer.shared.run.rules import resolve
from trainer.step import Engine

Activations = dict[str, list[Tensor]]
"""Outputs by kind of layer, first block to last."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 done, 2 wrong input (one line on stderr)."""
    parser = argparse.ArgumentParser(prog="python -m trainer.coordinates", description="Sizes of activations after a few steps.")
    parser.add_argument("configs", type=Path, nargs="+", help="runs of one process each")
    try:
        print(json.dumps([measure(resolve(load(path), 1)) for path in parser.parse_args(argv).configs]))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return ConfigError.exit_code
    return 0


def measure(config: ResolvedTrainConfig) -> dict[str, dict[str, float]]:
    """Trains a run to its end. Returns of each kind of layer the size at ``first``, ``last``, and of its ``change``."""
    torch.set_num_threads(config.run.threads)
    dataset = open_dataset(config.data, config.model, config.run.seed)
    engine = Engine(config, World(0, 1, torch.device("cpu"), "", 0, config.run.timeout_s), dataset)
    first = activations(engine, dataset)
    for step in range(config.run.steps):
        engine.samples = 0  # the same batch, of which even random tokens can be learnt
        engine.step(step)
    engine.rank.state.settle()
    last = activations(engine, dataset)
    changes = {kind: [b - a for a, b in zip(first[kind], last[kind], strict=True)] for kind in first}
    return {kind: {"first": size(first[kind]), "last": size(last[kind]), "change": size(changes[kind])} for kind in first}


def size(tensors: list[Tensor]) -> float:
    """Returns the root mean square of all coordinates."""
    return float(torch.cat([tensor.flatten() for tensor in tensors]).double().square().mean().sqrt())


def activations(engine: Engine, dataset: Dataset) -> Activations:
    """Returns what each kind of layer computes of the first sequences of the data, without dropout."""
    config, chunk = engine.config, engine.rank.pipeline.chunks[0]
    rows = torch.from_numpy(dataset.batch(0, config.run.global_batch)).t()[: config.model.seq]
    found: Activations = defaultdict(list)
    hooks = [watched(module, kind, found) for module, kind in layers(chunk.model)]
    chunk.model.eval()
    with torch.no_grad():
        found["logits"] = [chunk.model(torch.where(rows < 0, ~rows, rows), lambda x, head: head(x))]
    chunk.model.train()
    for hook in hooks:
        hook.remove()
    return dict(found)


def layers(model: Transformer) -> list[tuple[nn.Module, str]]:
    """Returns the modules whose outputs are compared, each with its kind."""
    assert model.embedding is not None, "one process has the whole network"
    found: list[tuple[nn.Module, str]] = [(model.embedding, "embedding")]
    for block in model.blocks.values():
        assert isinstance(block, Block), "an encoder is refused"
        found += [(block.attention.qkv, "queries, keys, values")] if isinstance(block.attention, Attention) else []
        found.append((block.attention, "attention"))
        found += [(block.mlp.up, "inside the MLP")] if isinstance(block.mlp, MLP) else []
        found += [(block.mlp, "MLP"), (block, "residual stream")]
    return found


def watched(module: nn.Module, kind: str, found: Activations) -> torch.utils.hooks.RemovableHandle:
    """Adds the output of ``module`` to those of its ``kind``."""
    return module.register_forward_hook(lambda module, given, output: found[kind].append(output.detach().clone()))


if __name__ == "__main__":
    sys.exit(main())
