"""A resolved configuration keeps what was given and has every value that its types promise."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path

import pytest

from trainer.spec import (
    ConfigError,
    LayoutConfig,
    ModelConfig,
    OptimizerConfig,
    ResolvedLayoutConfig,
    ResolvedModelConfig,
    ResolvedOptimizerConfig,
    ResolvedTrainConfig,
    RunConfig,
    TrainConfig,
    from_dict,
    load,
    resolve,
    save,
    to_dict,
)
from trainer.spec.schema import FAMILIES, CommandConfig, RequestsConfig
from trainer.spec.stage_run import StageRun, load_stage

RESOLVED = {
    ModelConfig: ResolvedModelConfig,
    LayoutConfig: ResolvedLayoutConfig,
    OptimizerConfig: ResolvedOptimizerConfig,
    TrainConfig: ResolvedTrainConfig,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_derived_value_has_its_promised_type(family: str) -> None:
    config = resolve(TrainConfig(model=ModelConfig(family=family)), 2)
    for part in (config, config.model, config.layout, config.optimizer):
        assert type(part) in RESOLVED.values()
        promised = typing.get_type_hints(type(part))
        for name in vars(type(part))["__annotations__"]:
            assert isinstance(getattr(part, name), promised[name]), name


def test_a_resolved_run_has_the_keys_of_any_run_in_the_same_order() -> None:
    for plain, resolved in RESOLVED.items():
        assert [f.name for f in dataclasses.fields(resolved)] == [f.name for f in dataclasses.fields(plain)]


def test_resolving_what_was_resolved_written_and_read_changes_nothing() -> None:
    once = resolve(TrainConfig(model=ModelConfig(family="llama", hidden=96, heads=3)), 4)
    again = resolve(from_dict(TrainConfig, to_dict(once)), 4)
    assert again == once and to_dict(again) == to_dict(once)


RUN = TrainConfig(run=RunConfig(steps=7, seed=5))
STAGE = StageRun("tune", "tune", "0" * 12, "/there", "checkpoint", {"base": "1"}, {"base": "/base"})
WHOLE = {
    "run": to_dict(RUN),
    "inference": to_dict(dataclasses.replace(RUN, requests=RequestsConfig(rate=2.5))),
    "other trainer": to_dict(dataclasses.replace(RUN, command=CommandConfig(words=["a"]))),
    "stage": {"stage": to_dict(STAGE)} | to_dict(RUN),
}


@pytest.mark.parametrize("kind", WHOLE)
def test_a_file_that_was_cut_at_any_line_is_refused_or_the_same_run(kind: str, tmp_path: Path) -> None:
    """Nothing is trained with defaults in place of what was lost."""
    path = tmp_path / "config.yaml"
    save(WHOLE[kind], path)
    whole, lines = (load_stage(path), load(path)), path.read_text().splitlines(keepends=True)
    refused = 0
    for count in range(len(lines)):
        path.write_text("".join(lines[:count]))
        try:
            found = (load_stage(path), load(path))
            if kind == "inference" and found[1].requests is None:
                continue  # "requests:" without what follows it: an inference of nothing, which ``trainer.generate.measure`` refuses
            assert found == whole, f"line {count} on is missing"
        except ConfigError:
            refused += 1
    assert refused >= len(lines) - 2


def test_a_run_without_a_section_is_refused_by_its_name_with_what_to_do(tmp_path: Path) -> None:
    save({name: value for name, value in to_dict(RUN).items() if name not in ("run", "tune")}, tmp_path / "config.yaml")
    with pytest.raises(ConfigError, match=r"config\.yaml lacks run, tune: it is no whole run.*repeat the command that made it"):
        load(tmp_path / "config.yaml")
