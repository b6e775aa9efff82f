"""Learning rates over a run, and what groups of parameters have of their own."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from launcher.config import compose, resolve
from launcher.trials.identity import trial_id
from tests.small_runs import small
from tests.whole_parameters import parameters
from trainer.comm.collectives import World
from trainer.data import open_dataset
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.optimizer import GroupsConfig
from trainer.shared.run.read import from_dict
from trainer.shared.run.resolved import ResolvedOptimizerConfig, ResolvedTrainConfig
from trainer.shared.run.rules import resolve as resolve_run
from trainer.shared.run.schema import TrainConfig
from trainer.state.optimizer import learning_rate
from trainer.step import Engine

TABLE: dict[tuple[str, int], list[float]] = {
    ("cosine", 0): [0.5, 1.0, 1.0, 0.1 + 0.45 * (1 + math.cos(math.pi / 8)), 0.1 + 0.45 * (1 + math.cos(math.pi / 4)), 0.55, 0.1, 0.1],
    ("cosine", 4): [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.1, 0.1],
    ("linear", 0): [0.5, 1.0, 1.0, 1 - 0.9 / 8, 1 - 0.9 / 4, 0.55, 0.1, 0.1],
    ("linear", 3): [0.5, 1.0, 1.0, 1.0, 1.0, 1 - 0.9 / 5, 0.1, 0.1],
    ("sqrt", 3): [0.5, 1.0, 1.0, 1.0, 1.0, 1 - 0.9 * math.sqrt(1 / 5), 0.1, 0.1],
    ("sqrt", 0): [0.5, 1.0, 1.0, 1 - 0.9 * math.sqrt(1 / 8), 0.55, 1 - 0.9 * math.sqrt(4 / 8), 0.1, 0.1],
    ("linear", 8): [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.1],
}
"""Rates at the steps below, by style and steps at the peak: 2 steps up to 1, down to 0.1 at step 10."""
STEPS = (0, 1, 2, 3, 4, 6, 10, 20)


@pytest.mark.parametrize(("style", "stable"), TABLE)
def test_the_rate_rises_stays_and_falls_as_its_style_says(style: str, stable: int) -> None:
    config = ResolvedOptimizerConfig(lr=1.0, min_lr=0.1, warmup_steps=2, stable_steps=stable, decay_style=style, decay_steps=10)
    assert [learning_rate(config, step) for step in STEPS] == pytest.approx(TABLE[style, stable], rel=1e-14)


def run_of(optimizer: dict[str, Any], **model: Any) -> ResolvedTrainConfig:
    data = small(
        steps=3,
        model={"tied": False, **model},
        run={"global_batch": 4},
        optimizer={"clip": 0.0, "warmup_steps": 0, **optimizer},
        micro_batch=4,
    )
    return resolve_run(from_dict(TrainConfig, data), 1)


def engine_of(config: ResolvedTrainConfig) -> Engine:
    return Engine(config, World(0, 1, torch.device("cpu"), "", 0, 10.0), open_dataset(config.data, config.model, config.run.seed))


GROUPS = {
    "embedding": ("embedding.tokens.weight", "embedding.positions.weight"),
    "head": ("head.output.weight",),
    "matrices": ("blocks.0.attention.qkv.weight", "blocks.0.attention.output.weight", "blocks.1.mlp.up.weight", "blocks.1.mlp.down.weight"),
    "vectors": ("blocks.0.attention.qkv.bias", "blocks.0.attention_norm.weight", "head.norm.bias"),
}


@pytest.mark.parametrize("group", GROUPS)
def test_the_rate_and_decay_of_a_group_are_those_of_its_parameters_alone(group: str) -> None:
    """In the first step of AdamW an element moves by the rate, but for its decay; gradients do not depend on either."""
    plain = engine_of(run_of({"lr": 0.01, "weight_decay": 0.1}))
    changed = engine_of(run_of({"lr": 0.01, "weight_decay": 0.1, "groups": {group: {"lr": 0.03, "weight_decay": 0.7}}}))
    before = {name: value.clone() for name, value in parameters(plain.rank).items()}
    for engine in (plain, changed):
        engine.step(0)
    usual, own = parameters(plain.rank), parameters(changed.rank)
    for other, names in GROUPS.items():
        for name in names:
            start, usual_decay = before[name], 0.0 if other == "vectors" else 0.1
            direction = (start - usual[name]) / 0.01 - usual_decay * start
            expected = start - 0.03 * (direction + 0.7 * start) if other == group else usual[name]
            torch.testing.assert_close(own[name], expected, rtol=0, atol=1e-14)


def test_a_tied_matrix_is_an_embedding_and_every_parameter_has_a_group() -> None:
    for tied in (False, True):
        engine = engine_of(run_of({}, tied=tied))
        groups = {shard.record.name: shard.record.group for shard in engine.rank.shards}
        assert groups["embedding.tokens.weight"] == "embedding" and groups.get("head.output.weight") == (None if tied else "head")
        assert set(groups.values()) <= {f.name for f in dataclasses.fields(GroupsConfig)}


def test_a_model_whose_outputs_begin_as_zero_begins_with_the_loss_of_a_guess_and_learns() -> None:
    """The head in the first step, what its gradient reaches in the second."""
    engine, zeros = (
        engine_of(run_of({}, zero_init=["output", "down", "head"])),
        ["blocks.0.mlp.down.weight", "blocks.1.attention.output.weight"],
    )
    assert engine.step(0).loss == pytest.approx(math.log(engine.config.model.vocab), rel=1e-14)
    after = parameters(engine.rank)
    assert after["head.output.weight"].count_nonzero() and not any(after[name].count_nonzero() for name in zeros)
    engine.step(1)
    after = parameters(engine.rank)
    assert all(after[name].count_nonzero() for name in zeros)


def test_what_is_as_usual_is_the_same_trial_and_what_is_not_is_another() -> None:
    usual = trial_id(resolve(compose(["data=synthetic"])))
    told = [
        "optimizer.groups.head.lr=1e-3",
        "optimizer.groups.vectors.weight_decay=0",
        "optimizer.decay_style=cosine",
        "model.zero_init=[]",
    ]
    assert trial_id(resolve(compose(["data=synthetic", *told]))) == usual
    for other in ("optimizer.groups.head.lr=2e-3", "optimizer.decay_style=sqrt", "optimizer.stable_steps=2", "model.zero_init=[down]"):
        assert trial_id(resolve(compose(["data=synthetic", other]))) != usual


@pytest.mark.parametrize("key", ["optimizer.decay_style=sqrt", "optimizer.groups.head.lr=0.5"])
def test_another_trainer_is_not_told_it_silently(key: str) -> None:
    name, value = key.split("=")
    section, *path = name.split(".")
    told: Any = {"command": {"trainer": "theirs"}}
    place = told.setdefault(section, {})
    for word in path[:-1]:
        place = place.setdefault(word, {})
    place[path[-1]] = value if value == "sqrt" else float(value)
    with pytest.raises(ConfigError, match=f"{key} is for our own trainer; leave it out for trainer=theirs"):
        resolve_run(from_dict(TrainConfig, told), 1)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ({"stable_steps": 4}, "optimizer.stable_steps=4 end after optimizer.decay_steps=3"),
        ({"lr": 0.0, "groups": {"head": {"lr": 0.1}}}, "optimizer.groups.head.lr=0.1 has the schedule of optimizer.lr=0, which has none"),
        ({"decay_style": "sine"}, "optimizer.decay_style='sine' is not one of cosine, linear or sqrt"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(optimizer: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run_of(optimizer)
