"""Every recipe is a whole run that obeys the rules, fits, and is predicted as it was published."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from launcher.config import compose, conf_dir, resolve
from launcher.config.trainers import profile
from launcher.cost import predict
from launcher.cost.inputs.shape import Shape
from launcher.planning.plan import plan

pytestmark = pytest.mark.slow

FILES = [path for path in sorted((conf_dir() / "recipe").glob("*.yaml")) if "override /model:" not in path.read_text()]
"""Those that write their model out; the others are in test_recipes_of_named_models.py."""
TUNED = [path.stem for path in FILES if "\ntune:" in path.read_text()]
RECIPES = [path.stem for path in FILES if path.stem not in TUNED]
SIZES = {
    "gpt3_126m": 126e6, "gpt3_1.3b": 1.3e9, "gpt3_5b": 5e9, "gpt3_20b": 20e9, "gpt3_40b": 40e9, "gpt3_175b": 175e9, "mt_nlg_530b": 530e9,
    "gpt_moe_1.3b_128": 52e9, "gpt_1t": 1.008e12, "llama_7b": 6.74e9, "llama_13b": 13.0e9, "llama_30b": 32.5e9, "llama_65b": 65.3e9, "bloom_176b": 176.2e9,
    "t5_220m": 221e6, "t5_3b": 2.78e9, "t5_11b": 11e9, "t5_23b": 23.5e9, "t5_41b": 41.2e9,
    "mt5_170m": 173e6, "mt5_390m": 391e6, "mt5_3b": 3.23e9, "mt5_11b": 11.9e9, "mt5_23b": 24.6e9,
}  # fmt: skip
UNPUBLISHED = {"gpt_moe_1.3b_128", "t5_11b", "t5_23b", "t5_41b", "mt5_390m", "mt5_11b", "mt5_23b"}
"""Published of a trainer that drops tokens alone; of NeMo's T5, without a time, or of a run of 64 GPUs that is predicted a fifth too fast."""
PUBLISHED = yaml.safe_load(Path(__file__).with_name("published_steps.yaml").read_text())


def test_there_is_a_recipe_for_each_published_model() -> None:
    assert set(RECIPES) == set(SIZES) == {*PUBLISHED, *UNPUBLISHED}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_a_valid_run_of_the_size_in_its_name_that_fits(name: str) -> None:
    config = resolve(compose([f"recipe={name}"]))
    assert float(Shape.of(config.model).parameters) == pytest.approx(SIZES[name], rel=0.03)
    assert config.run.precision == "bf16" and config.run.steps > 10_000
    assert config.optimizer.warmup_steps < (config.optimizer.decay_steps or 0) <= config.run.steps * 1.2
    assert predict(config.model, config.layout, config.run, config.cluster).fits > 0.9


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_what_is_published_of_a_recipe_is_what_the_cost_model_predicts(name: str) -> None:
    expected = PUBLISHED[name]
    config = resolve(compose([f"recipe={name}", *expected.get("overrides", [])]))
    trainer = profile(expected.get("trainer", "trireme"))
    predicted = predict(config.model, config.layout, config.run, config.cluster, trainer)
    assert predicted.step_time_s == pytest.approx(expected["step_time_s"], rel=expected.get("tolerance", 0.15))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.campaign("words")] * bool(i % 3)) for i, name in enumerate(RECIPES)]
)
def test_the_plan_of_a_recipe_is_not_slower_than_its_published_layout(name: str) -> None:
    config = resolve(compose([f"recipe={name}"]))
    planned = plan(config)
    published = predict(config.model, config.layout, config.run, config.cluster)
    assert planned.estimate.step_time[planned.order[0]] <= published.step_time_s


def test_recipes_hold_no_path_of_a_machine() -> None:
    for name in [*RECIPES, *TUNED]:
        text = Path(conf_dir() / "recipe" / f"{name}.yaml").read_text()
        assert text.startswith("# @package _global_\n") and "/home" not in text and "/work" not in text
