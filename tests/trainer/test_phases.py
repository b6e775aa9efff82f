"""A run with phases is a chain of runs without: one for each step, of its size, its rows and its learning rate."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tests.small_runs import small
from tests.whole_parameters import parameters
from trainer.comm.collectives import World
from trainer.data import Synthetic
from trainer.shared.run.phases import phases_of
from trainer.shared.run.read import from_dict
from trainer.shared.run.resolved import ResolvedTrainConfig
from trainer.shared.run.rules import resolve
from trainer.shared.run.schema import TrainConfig
from trainer.state.optimizer import learning_rate
from trainer.step import Engine

PHASES = [{"until": 64, "global_batch": 4, "seq": 8}, {"until": 128, "global_batch": 2, "lr": 0.4}]
"""Two steps of 4 x 8 tokens, two of 2 x 16, then 4 x 16."""
MODEL = {"family": "llama", "layers": 2, "seq": 16, "experts": {"count": 2, "ffn": 8, "balance_loss": 0.1}}


class Read:
    """Synthetic sequences, and which of them were read. ``cut``: their pieces."""

    name = "synthetic"

    def __init__(self, cut: int = 1):
        self.whole, self.cut, self.samples = Synthetic(101, 16, 7), cut, list[int]()

    def batch(self, first: int, count: int) -> NDArray[np.int64]:
        self.samples += range(first, first + count)
        rows, width = self.whole.batch(0, first + count), 16 // self.cut
        return np.stack([row[start : start + width + 1] for row in rows for start in range(0, 16, width)])[first:][:count]

    def check(self) -> None: ...


def run(**changes: Any) -> ResolvedTrainConfig:
    data = small(steps=7, model=MODEL | changes.pop("model", {}), optimizer={"decay_steps": 7} | changes.pop("optimizer", {}))
    return resolve(from_dict(TrainConfig, data | {"run": data["run"] | {"global_batch": 4} | changes}), 1)


def engine_of(config: ResolvedTrainConfig, data: Read) -> Engine:
    return Engine(config, World(0, 1, torch.device("cpu"), "", 0, 10.0), data)


def test_a_step_of_a_phase_is_that_of_a_run_of_its_size() -> None:
    config, data = run(phases=PHASES), Read()
    engine, table = engine_of(config, data), phases_of(config)
    consumed = 0
    for step, (batch, seq) in enumerate([(4, 8), (4, 8), (2, 16), (2, 16), (4, 16), (4, 16), (4, 16)]):
        lr = learning_rate(config.optimizer, step, table.consumed) * table.at(step).lr
        plain = {"lr": lr, "min_lr": lr, "warmup_steps": 0, "decay_steps": 7}
        alone = engine_of(run(model={"seq": seq}, optimizer=plain, global_batch=batch), Read(16 // seq))
        for mine, theirs in zip(alone.saved, engine.saved, strict=True):
            for name, state in mine.states.items():
                state.copy_(theirs.states[name])
        alone.resume({"samples": consumed * 16 // seq, "updates": step})
        expected, found = alone.step(step), engine.step(step)
        assert (found.lr, found.loss, found.grad_norm) == (lr, expected.loss, expected.grad_norm), step
        for name, value in parameters(alone.rank).items():
            assert torch.equal(parameters(engine.rank)[name], value), (step, name)
        consumed += batch * seq // 16
        assert engine.samples == consumed


def test_every_sequence_is_read_once_whatever_the_phases() -> None:
    data = Read()
    engine = engine_of(run(phases=PHASES), data)
    for step in range(7):
        engine.step(step)
    engine.batches.prefetch.thread.shutdown()
    assert sorted(set(data.samples)) == list(range(engine.samples + engine.phase.stride)), "those of the next step are read ahead"
    assert engine.samples == 2 + 2 + 2 + 2 + 4 * 3
