"""AdamW whose weights decay only where the update makes them smaller."""

from __future__ import annotations

import pytest
import torch

from tests.small_runs import small
from tests.whole_parameters import parameters
from trainer.comm.collectives import World
from trainer.data import open_dataset
from trainer.shared.run.read import from_dict
from trainer.shared.run.rules import resolve
from trainer.shared.run.schema import TrainConfig
from trainer.state import optimizer as adamw
from trainer.step import Engine

LR, DECAY, BETA1, BETA2, EPS = 0.01, 0.3, 0.9, 0.95, 1e-6


def engine_of(cautious: bool, precision: str = "fp64", **run: object) -> Engine:
    optimizer = {"lr": LR, "min_lr": LR, "warmup_steps": 0, "weight_decay": DECAY, "eps": EPS, "clip": 0.0, "cautious": cautious}
    data = small(precision=precision, run={"global_batch": 4, **run}, optimizer=optimizer, model={"layers": 1}, micro_batch=4)
    config = resolve(from_dict(TrainConfig, data), 1)
    return Engine(config, World(0, 1, torch.device("cpu"), "", 0, 10.0), open_dataset(config.data, config.model, 1))


def test_weights_decay_where_the_update_makes_them_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps against ten lines, a few elements at a time."""
    monkeypatch.setattr(adamw, "WIDENED", 100)
    engine = engine_of(True)
    pieces = engine.trained
    expected = [(piece.weight.clone(), torch.zeros_like(piece.weight), torch.zeros_like(piece.weight)) for piece in pieces]
    for step in range(1, 4):
        engine.step(step - 1)
        for piece, (w, m, v) in zip(pieces, expected, strict=True):
            g = piece.gradient
            m += (1 - BETA1) * (g - m)
            v += (1 - BETA2) * (g * g - v)
            u = m / (1 - BETA1**step) / ((v / (1 - BETA2**step)).sqrt() + EPS)
            decay = 0.0 if piece.record.group == "vectors" else DECAY
            w -= LR * (decay * w * ((w > 0) == (u > 0)) * (w * u != 0) + u)
            torch.testing.assert_close(piece.weight, w, rtol=1e-12, atol=1e-14, msg=piece.record.name)


@pytest.mark.parametrize("cautious", [True, False])
def test_a_skipped_step_changes_nothing_and_the_next_is_as_if_it_had_not_been(cautious: bool) -> None:
    one, other = (engine_of(cautious, on_nonfinite="skip") for _ in range(2))
    for engine in (one, other):
        engine.step(0)  # averages are no longer zero
    before = {name: value.clone() for name, value in parameters(one.rank).items()}
    for piece in one.trained:
        piece.gradient.fill_(1.0)
    one.optimizer.step(LR, torch.ones(1, dtype=torch.float64), torch.ones(()))
    assert all(torch.equal(value, before[name]) for name, value in parameters(one.rank).items())
    for engine in (one, other):
        engine.step(1)
    later = parameters(other.rank)
    assert all(torch.equal(value, later[name]) for name, value in parameters(one.rank).items())
