"""How well a checkpoint predicts text: ``python -m trainer`` with ``run.task=evaluate``, under any layout.

The weights are those of the newest checkpoint in ``run.checkpoint.dir``. What is read is the held-out end of the corpus, or all of it
where nothing is held out, in the order of the text: ``run.steps`` batches of ``run.global_batch`` sequences, or as many as there are.
Rank 0 writes loss, perplexity and bits per byte into ``result.json``, under "evaluation", and a line of ``metrics.jsonl`` a batch.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint.manifest import CheckpointError, FoundCheckpoint, read_manifest
from trainer.checkpoint.shards import Reader, piece_of
from trainer.comm.collectives import World
from trainer.data.dataset import HeldOut, open_held_out
from trainer.engine import Engine
from trainer.launch.rank_env import RankEnv
from trainer.loop import choose_device
from trainer.pipeline.forward import ForwardPipeline
from trainer.spec import ConfigError, ModelConfig, ResolvedTrainConfig, Status
from trainer.spec.artifacts import newest_checkpoint
from trainer.spec.corpus import read_in_training
from trainer.spec.records import METRICS, RESULT, write_outcome

NOT_SHAPE = ("dropout", "attention", "init_std")
"""Fields of a model in which an evaluation may differ from the checkpoint."""


def evaluate(config: ResolvedTrainConfig, env: RankEnv, out: Path, attempt: int) -> Status:
    """Evaluate on every rank of ``env``. ``ConfigError`` if the checkpoint or the corpus cannot be read, or do not fit the model."""
    device = choose_device(config.run.device, env.local_rank)
    torch.set_num_threads(config.run.threads)
    config = _without_dropout(config)
    text = open_held_out(config.data, config.model)
    batches = _batches(config, text)
    world = World(env.rank, env.world_size, device, env.address, env.port, config.run.timeout_s)
    world.group.together(text.check if env.local_rank == 0 else lambda: None, (ConfigError,))
    try:
        evaluation = Evaluation(config, world, text)
        figures = evaluation.run(batches, out, attempt)
        if world.rank == 0:
            result = {"status": Status.DONE.value, "attempt": attempt, "world_size": world.size, "layout": asdict(config.layout)}
            write_outcome(out / RESULT, result | {"model": asdict(config.model), "evaluation": figures})
    finally:
        world.close()
    return Status.DONE


def _without_dropout(config: ResolvedTrainConfig) -> ResolvedTrainConfig:
    """Nothing is dropped, and nothing is computed again: there is no backward."""
    return replace(config, model=replace(config.model, dropout=0.0), layout=replace(config.layout, recompute="none"))


def _batches(config: ResolvedTrainConfig, text: HeldOut) -> int:
    """How many whole batches are evaluated; ``ConfigError`` if there is not one."""
    found = text.windows // config.run.global_batch
    if not found:
        raise ConfigError(
            f"run.global_batch={config.run.global_batch} is more than the {text.windows} sequences of model.seq={config.model.seq} "
            f"that data.path={config.data.path} has to evaluate on; lower run.global_batch, or raise data.held_out"
        )
    return min(found, config.run.steps)


class Evaluation:
    """A checkpoint's weights on the ranks of a layout, and the sums of what it was asked."""

    def __init__(self, config: ResolvedTrainConfig, world: World, text: HeldOut):
        self.config, self.world, self.text = config, world, text
        self.engine = Engine(config, world, text)
        self.found = newest(Path(config.run.checkpoint.dir or "."))
        self.manifest: dict[str, Any] = world.group.together(self._load, (ConfigError, CheckpointError))
        self.engine.state.publish_updates()
        self.pipeline = ForwardPipeline.of(self.engine.pipeline, self.engine.recorder)
        self.bytes_of = torch.from_numpy(text.token_bytes()).to(world.device)

    def _load(self) -> dict[str, Any]:
        """Read this rank's weights."""
        try:
            manifest = read_manifest(self.found)
            check_model(self.found, manifest["model"], self.config.model)
            reader = Reader(self.found.path, manifest)
            for owned in self.engine.owned:
                piece = piece_of(owned)
                reader.read(piece, {"weight": owned.weight[: piece.numel]})
        except CheckpointError as error:
            raise ConfigError(f"{error}; give another checkpoint") from None
        return manifest

    def run(self, batches: int, out: Path, attempt: int) -> dict[str, Any]:
        """The figures of ``batches`` batches."""
        sums = torch.zeros(2, dtype=torch.float64)  # nats, bytes
        for number in range(batches):
            start = time.perf_counter()
            sums += self._batch(number)
            if self.world.rank == 0:
                tokens = self.engine.tokens_per_step * (number + 1)
                self._tell(out, number, batches, float(sums[0]) / tokens, time.perf_counter() - start, attempt)
        return self._figures(batches, *sums.tolist())

    def _batch(self, number: int) -> Tensor:
        """Sum of ``-ln p`` over the targets of a batch, and their bytes, over all ranks."""
        engine = self.engine
        engine.samples = number * self.config.run.global_batch
        batch = replace(engine._batch(number), weight=1.0)
        losses = self.pipeline.losses_of(batch)
        own = torch.zeros(2, dtype=torch.float64, device=engine.device)
        if losses and engine.groups.tensor.index == 0 and batch.rows is not None:
            own[0] = torch.stack(losses).double().sum()
            own[1] = self.bytes_of[batch.rows[:, 1:]].sum()
        self.world.group.all_reduce(own).wait()
        return own.cpu()

    def _tell(self, out: Path, number: int, batches: int, loss: float, seconds: float, attempt: int) -> None:
        line = {"attempt": attempt, "step": number + 1, "loss": loss, "step_time_s": seconds, "time": time.time()}
        with (out / METRICS).open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(f"batch {number + 1}/{batches}  loss so far {loss:.4f}  {seconds:.3f} s", flush=True)

    def _figures(self, batches: int, nats: float, size: float) -> dict[str, Any]:
        tokens, data, trained = batches * self.engine.tokens_per_step, self.config.data, self.manifest["data"]
        sha256 = self.text.tokens.index.sha256
        return {
            "loss": nats / tokens,
            "perplexity": math.exp(min(nats / tokens, 700.0)),
            "bits_per_byte": nats / math.log(2) / size if size else None,
            "tokens": tokens,
            "bytes": int(size),
            "sequences": batches * self.config.run.global_batch,
            "sequences_there": self.text.windows,
            "read_in_training": bool(trained) and read_in_training(trained["corpus"], sha256, data.held_out),
            "step": self.manifest["step"],
            "checkpoint": str(self.found.path),
            "corpus": sha256,
        }


def newest(folder: Path) -> FoundCheckpoint:
    """The newest checkpoint in ``folder``; ``ConfigError`` when there is none."""
    path = newest_checkpoint(folder)
    if path is None:
        raise ConfigError(f"{folder} is no checkpoint and holds none; give a folder that 'run.checkpoint.every' has filled")
    return FoundCheckpoint(0, 0, path)


def check_model(found: FoundCheckpoint, saved: dict[str, Any], model: ModelConfig) -> None:
    """``ConfigError`` if the checkpoint is of another model."""
    for name, value in asdict(model).items():
        if name not in NOT_SHAPE and saved.get(name) != value:
            raise ConfigError(
                f"checkpoint {found.path} is of another model: model.{name}={saved.get(name)} there, {value} here; leave it out"
            )
