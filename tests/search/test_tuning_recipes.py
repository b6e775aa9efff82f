"""Recipes of tuning fit, have a layout of their own, and are predicted as such runs were published."""

from __future__ import annotations

import dataclasses

import pytest

from launcher.config import Config, compose, resolve
from launcher.config.trainers import profile
from launcher.cost import Prediction, predict
from launcher.cost.inputs.shape import Shape
from launcher.planning.plan import plan
from tests.search.test_recipes import TUNED

SIZES = {"llama_7b": 6.74e9, "llama_13b": 13.0e9, "llama_70b": 69e9, "gpt3_5b": 5e9}
METHODS = {"lora": "lora", "sft": "full", "p_tuning": "p_tuning"}


def estimated(config: Config) -> Prediction:
    return predict(config.model, config.layout, config.run, config.cluster, config.trainer, config.tune)


def run_of(name: str) -> Config:
    return resolve(compose([f"recipe={name}"]))


def test_llama_has_a_recipe_of_each_size_and_method() -> None:
    assert set(TUNED) == {f"{size}_{way}" for size in ("llama_7b", "llama_13b", "llama_70b") for way in ("lora", "sft")} | {
        "gpt3_5b_p_tuning"
    }


@pytest.mark.parametrize("name", TUNED)
def test_a_tuning_recipe_is_a_valid_run_that_fits_and_its_plan_is_not_slower(name: str) -> None:
    config, size = run_of(name), next(size for size in SIZES if name.startswith(size))
    assert float(Shape.of(config.model).parameters) == pytest.approx(SIZES[size], rel=0.03)
    assert config.tune.method == METHODS[name.removeprefix(f"{size}_")]
    own, planned = estimated(config), plan(config)
    assert own.fits > 0.5
    assert planned.estimate.step_time[planned.order[0]] <= own.step_time_s * (1 + 1e-9)


@pytest.mark.parametrize("size", ["llama_7b", "llama_13b", "llama_70b"])
def test_low_rank_products_take_fewer_devices_for_each_model_than_all_weights(size: str) -> None:
    """Less memory asks for less model parallelism: the plan of a tuning is one of its own."""
    lora, full = (plan(run_of(f"{size}_{way}")) for way in ("lora", "sft"))
    spread = [(found := each.layout(int(each.order[0]))).tensor * found.pipeline for each in (lora, full)]
    assert spread[0] <= spread[1] and (size == "llama_7b" or spread[0] < spread[1])


def test_the_published_rate_of_70b_on_eight_h100_is_predicted_and_fits() -> None:
    """In fp8, 2,621 tokens/s on each (NVIDIA NeMo, performance_summary.md, 2024)."""
    config = run_of("llama_70b_lora")
    run = dataclasses.replace(config.run, precision="fp8")
    found = predict(config.model, config.layout, run, config.cluster, profile("nemo"), config.tune)
    assert found.step_time_s == pytest.approx(32 * 4096 / (8 * 2621), rel=0.1) and found.fits > 0.9


def test_low_rank_products_take_seven_tenths_of_the_step_of_all_weights() -> None:
    """Published in bf16 for 8B on eight H100: 0.92 s against 1.32 s."""
    lora, full = (estimated(run_of(f"llama_7b_{way}")).step_time_s for way in ("lora", "sft"))
    assert lora / full == pytest.approx(0.70, abs=0.05)
