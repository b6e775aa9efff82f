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
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trainer.build import build_rank
from trainer.checkpoint.tuned import fill, open_reader, tune_of
from trainer.comm.collectives import World
from trainer.data.dataset import HeldOut, HeldOutExamples, open_held_out
from trainer.launch.failure import record_failure
from trainer.launch.rank_env import RankEnv
from trainer.loop import choose_device
from trainer.shared.corpora.index import read_in_training
from trainer.shared.records.artifacts import check_model_of, checkpoint_facts
from trainer.shared.records.manifest import CheckpointError, read_manifest
from trainer.shared.records.outcome import Status
from trainer.shared.records.resume import newest
from trainer.shared.records.stage_run import Finish
from trainer.shared.records.trial_files import METRICS, RESULT, write_outcome
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.resolved import ResolvedTrainConfig
from trainer.shared.run.tuning import check_tasks, text_model
from trainer.validation import Sums, Validation, whole_batches


def evaluate(config: ResolvedTrainConfig, env: RankEnv, out: Path, attempt: int, finish: Finish = lambda result: None) -> Status:
    """Evaluate on every rank of ``env``. ``ConfigError`` if the checkpoint or the corpus cannot be read, or do not fit the model."""
    device = choose_device(config.run.device, env.local_rank)
    torch.set_num_threads(config.run.threads)
    config = _without_dropout(config)
    check_tasks(config)
    text = open_held_out(config.data, text_model(config.model, config.tune))
    batches = min(whole_batches(config, text), config.run.steps)
    record = partial(record_failure, env=env, out=out, attempt=attempt)
    world = World(env.rank, env.world_size, device, env.address, env.port, config.run.timeout_s, record)
    world.group.together(text.check if env.local_rank == 0 else lambda: None, (ConfigError,))
    try:
        evaluation = Evaluation(config, world, text)
        figures = evaluation.run(batches, out, attempt)
        if world.rank == 0:
            result = {"status": Status.DONE.value, "attempt": attempt, "world_size": world.size, "layout": asdict(config.layout)}
            result |= {"model": asdict(config.model), "evaluation": figures}
            finish(result)
            write_outcome(out / RESULT, result)
    finally:
        world.close()
    return Status.DONE


def _without_dropout(config: ResolvedTrainConfig) -> ResolvedTrainConfig:
    """Nothing is dropped, and nothing is computed again: there is no backward. What tuning added is that of the checkpoint."""
    tune = tune_of(checkpoint_facts(Path(config.run.checkpoint.dir or "."))[1])
    return replace(
        config, model=replace(config.model, dropout=0.0), layout=replace(config.layout, recompute="none"), tune=replace(tune, dropout=0.0)
    )


class Evaluation:
    """A checkpoint's weights on the ranks of a layout, and the sums of what it was asked."""

    def __init__(self, config: ResolvedTrainConfig, world: World, text: HeldOut | HeldOutExamples):
        self.config, self.world, self.text = config, world, text
        self.found = newest(Path(config.run.checkpoint.dir or "."))
        positions = max(config.model.seq, checkpoint_facts(self.found.path)[1]["model"]["seq"])
        self.rank = build_rank(config, world, positions)
        self.manifest: dict[str, Any] = world.group.together(self._load, (ConfigError, CheckpointError))
        self.rank.state.publish_updates()
        self.validation = Validation(self.rank, text)

    def _load(self) -> dict[str, Any]:
        """Read this rank's weights."""
        try:
            manifest = read_manifest(self.found)
            check_model_of(self.found.path, manifest["model"], self.config.model, "leave it out")
            fill(open_reader(self.found, manifest, merge=False), self.rank.shards)
        except CheckpointError as error:
            raise ConfigError(f"{error}; give another checkpoint") from None
        return manifest

    def run(self, batches: int, out: Path, attempt: int) -> dict[str, Any]:
        """The figures of ``batches`` batches."""
        sums = Sums()
        for number in range(batches):
            start = time.perf_counter()
            sums += self.validation.batch(number)
            if self.world.rank == 0:
                self._tell(out, number, batches, sums.loss, time.perf_counter() - start, attempt)
        return self._figures(batches, sums)

    def _tell(self, out: Path, number: int, batches: int, loss: float, seconds: float, attempt: int) -> None:
        line = {"attempt": attempt, "step": number + 1, "loss": loss, "step_time_s": seconds, "time": time.time()}
        with (out / METRICS).open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(f"batch {number + 1}/{batches}  loss so far {loss:.4f}  {seconds:.3f} s", flush=True)

    def _figures(self, batches: int, sums: Sums) -> dict[str, Any]:
        data, trained = self.config.data, self.manifest["data"]
        sha256 = self.text.sha256
        return {
            "loss": sums.loss,
            "perplexity": math.exp(min(sums.loss, 700.0)),
            "bits_per_byte": sums.bits_per_byte,
            **({"exact_match": sums.exact / sums.rows} if self.validation.asks else {}),
            "tokens": sums.tokens,
            "bytes": sums.bytes,
            "sequences": batches * self.config.run.global_batch,
            "sequences_there": self.text.windows,
            "read_in_training": bool(trained) and read_in_training(trained["corpus"], sha256, data.held_out),
            "step": self.manifest["step"],
            "checkpoint": str(self.found.path),
            "corpus": sha256,
        }
