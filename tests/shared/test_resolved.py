"""A resolved configuration keeps what was given and has every value that its types promise."""

from __future__ import annotations

import dataclasses
import typing

import pytest

from trainer.shared.families.registry import FAMILIES
from trainer.shared.run.derived import resolve_model
from trainer.shared.run.limits.own import untrained
from trainer.shared.run.optimizer import OptimizerConfig
from trainer.shared.run.read import from_dict, to_dict
from trainer.shared.run.resolved import ResolvedLayoutConfig, ResolvedModelConfig, ResolvedOptimizerConfig, ResolvedTrainConfig
from trainer.shared.run.rules import resolve
from trainer.shared.run.schema import LayoutConfig, ModelConfig, TrainConfig

RESOLVED = {
    ModelConfig: ResolvedModelConfig,
    LayoutConfig: ResolvedLayoutConfig,
    OptimizerConfig: ResolvedOptimizerConfig,
    TrainConfig: ResolvedTrainConfig,
}


@pytest.mark.parametrize("family", [name for name in FAMILIES if untrained(resolve_model(ModelConfig(family=name))) is None])
def test_every_derived_value_has_its_promised_type(family: str) -> None:
    config = resolve(TrainConfig(model=ModelConfig(family=family)), 2)
    for part in (config, config.model, config.layout, config.optimizer):
        assert type(part) in RESOLVED.values()
        promised = typing.get_type_hints(type(part))
        for name in vars(type(part))["__annotations__"]:
            assert isinstance(getattr(part, name), typing.get_origin(promised[name]) or promised[name]), name


def test_a_resolved_run_has_the_keys_of_any_run_in_the_same_order() -> None:
    for plain, resolved in RESOLVED.items():
        assert [f.name for f in dataclasses.fields(resolved)] == [f.name for f in dataclasses.fields(plain)]


def test_resolving_what_was_resolved_written_and_read_changes_nothing() -> None:
    once = resolve(TrainConfig(model=ModelConfig(family="llama", hidden=96, heads=3)), 4)
    again = resolve(from_dict(TrainConfig, to_dict(once)), 4)
    assert again == once and to_dict(again) == to_dict(once)
