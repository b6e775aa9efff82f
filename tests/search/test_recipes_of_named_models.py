"""Recipes whose model has a file in conf/model: they compose, have the size that was published, and can be planned."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from launcher.config import compose, conf_dir, resolve
from launcher.config.trainers import profile
from launcher.cost import predict
from launcher.cost.inputs.shape import Shape
from launcher.planning.plan import plan
from trainer.shared.run.derived import resolve_model
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.limits.own import untrained

pytestmark = pytest.mark.slow

FILES = {path.stem: path for path in sorted((conf_dir() / "recipe").glob("*.yaml")) if "override /model:" in path.read_text()}
SIZES = {
    "llama31_8b": 8_030_261_248, "llama31_70b": 70_553_706_496, "llama31_405b": 405_853_388_800, "llama32_1b": 1_235_814_400,
    "llama32_3b": 3_212_749_824, "qwen3_0.6b": 596_049_920, "qwen3_1.7b": 1_720_574_976, "qwen3_4b": 4_022_468_096,
    "qwen3_8b": 8_190_735_360, "qwen3_14b": 14_768_307_200, "qwen3_32b": 32_762_123_264, "qwen3_30b_a3b": 30_532_122_624,
    "qwen3_235b_a22b": 235_093_634_560, "mixtral_8x7b": 46_702_792_704, "mixtral_8x22b": 140_620_634_112, "gemma3_1b": 999_885_952,
    "gemma3_4b": 3.884e9, "gemma3_12b": 11.771e9, "gemma3_27b": 27.016e9, "olmo2_7b": 7_298_617_344, "olmo2_13b": 13_716_198_400,
    "olmo2_32b": 32.2e9, "deepseek_v3": 682.5e9, "gpt_oss_20b": 20_914_757_184, "gpt_oss_120b": 116_829_156_672,
    "smollm3_3b": 3_075_098_624,
}  # fmt: skip
"""Parameters as published: of weights on a hub to the last one, of reports as printed (Gemma 3, table 1, embedding and the rest)."""
TUNED = {"llama31_8b", "llama31_70b", "llama31_405b", "llama32_1b", "llama32_3b", "qwen3_8b", "qwen3_14b", "qwen3_32b"}


def test_each_model_has_a_recipe_and_the_usual_ones_one_of_low_rank_products() -> None:
    assert set(FILES) == {*SIZES, *(f"{name}_lora" for name in TUNED)}
    assert {path.stem for path in (conf_dir() / "model").glob("*.yaml")} >= set(SIZES)


@pytest.mark.parametrize("name", FILES)
def test_a_recipe_composes_with_the_published_size_and_is_trained_or_refused_in_one_line(name: str) -> None:
    config = compose([f"recipe={name}"])
    assert float(Shape.of(config.model).parameters) == pytest.approx(SIZES[name.removesuffix("_lora")], rel=0.005)
    assert config.optimizer.warmup_steps < (config.optimizer.decay_steps or 0) == config.run.steps
    assert config.tune.method == ("lora" if name.endswith("_lora") else "full")
    key = untrained(resolve_model(config.model))
    assert config.trainer.foreign or key is None, f"{key} is for another trainer"
    try:
        assert resolve(config).layout.data
    except ConfigError as error:
        assert config.trainer.foreign and re.fullmatch(r"[^\n]*can(not| be planned but not)[^\n]*", str(error))


@pytest.mark.parametrize("name", ["llama31_8b", "llama31_70b_lora", "qwen3_30b_a3b"])
def test_the_plan_of_a_recipe_has_a_layout_that_fits_and_is_not_slower_than_its_own(name: str) -> None:
    config = compose([f"recipe={name}"])
    planned = plan(config)
    assert len(planned.order)
    if not config.trainer.foreign:
        config = resolve(config)
        own = predict(config.model, config.layout, config.run, config.cluster, config.trainer, config.tune)
        assert planned.seconds[planned.order[0]] <= own.step_time_s * (1 + 1e-9)


@pytest.mark.parametrize(
    "name, rate, overrides",
    [
        ("llama31_8b", 14079, ["cluster.nodes=1", "run.global_batch=128"]),
        ("llama31_70b", 1619, ["cluster.nodes=8", "run.global_batch=128", "layout.sharding.optimizer=2"]),
    ],
)
def test_published_rates_of_llama_on_h100_are_predicted(name: str, rate: float, overrides: list[str]) -> None:
    """In fp8, tokens/s per GPU (NVIDIA-NeMo/Megatron-Bridge, docs/performance-summary-archive.md, 25.09)."""
    config = resolve(compose([f"recipe={name}", "run.precision=fp8", *overrides]))
    found = predict(config.model, config.layout, config.run, config.cluster, profile("megatron_bridge"))
    assert config.run.global_batch * config.model.seq / (found.step_time_s * config.cluster.world_size) == pytest.approx(rate, rel=0.15)


def test_each_file_names_its_sources_and_is_short() -> None:
    for path in [*FILES.values(), *(Path(conf_dir() / "model" / f"{name}.yaml") for name in SIZES)]:
        said = [line for line in path.read_text().splitlines() if line.startswith("# ") and "@package" not in line]
        assert any(word in " ".join(said) for word in ("arXiv", ".py", ".csv", ".md", ".yaml", "config.json")), path
        assert len(path.read_text().splitlines()) <= 26, path
