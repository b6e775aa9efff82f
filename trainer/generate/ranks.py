"""The ranks that generate together, or one alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch

from trainer.comm.collectives import World
from trainer.generate.weights import open_weights
from trainer.launch.rank_env import RankEnv
from trainer.loop import choose_device
from trainer.shared.run.resolved import ResolvedTrainConfig
from trainer.shared.run.rules import resolve
from trainer.shared.run.schema import DataConfig, RunConfig, TrainConfig


@contextlib.contextmanager
def alone(model: Path, precision: str, threads: int = 1) -> Iterator[tuple[ResolvedTrainConfig, World]]:
    """Yields configuration and world of this process as the only rank, for the model in a folder."""
    run = RunConfig(task="generate", steps=1, warmup_steps=0, global_batch=1, precision=precision, threads=threads)
    plain = TrainConfig(model=open_weights(model).model, data=DataConfig(kind="synthetic"), run=run)
    config, env = resolve(plain, 1), RankEnv()
    with world_of(config, env) as world:
        yield config, world


@contextlib.contextmanager
def world_of(config: ResolvedTrainConfig, env: RankEnv) -> Iterator[World]:
    device = choose_device(config.run.device, env.local_rank)
    torch.set_num_threads(config.run.threads)
    world = World(env.rank, env.world_size, device, env.address, env.port, config.run.timeout_s)
    try:
        yield world
    finally:
        world.close()
