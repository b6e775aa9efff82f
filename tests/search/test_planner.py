"""The sharding planner: AMSP's choices where AMSP's assumptions hold, and never worse than a named strategy of its own."""

from __future__ import annotations

import dataclasses

import pytest

from launcher.config.hardware import hardware_files
from launcher.config.schema import ClusterConfig
from launcher.cost import trainers
from launcher.cost.sharding_planner import best, choices, node_levels, published_choices, sharding_chains
from trainer.config import ConfigError, LayoutConfig, ModelConfig, RunConfig

CLUSTER = ClusterConfig(nodes=128, gpus_per_node=8, hardware=hardware_files()["a800"])
AMSP = {
    "7B": ((32, 4096, 32, 11008), "none", (1, 1, 8)),
    "13B": ((40, 5120, 40, 13824), "none", (4, 4, 8)),
    "30B": ((60, 6656, 52, 17920), "full", (8, 8, 32)),
}
"""Shape, recomputation and chosen {params, grads, optimizer} on 1,024 A800: Chen et al. 2023 (arXiv 2311.00257), section VI."""
STRATEGIES = {"DDP": (1, 1, 1), "ZeRO-1": (1, 1, 1024), "ZeRO-2": (1, 1024, 1024), "ZeRO-3": (1024,) * 3, "MiCS": (8, 8, 8)}


def question(size: str, micro_batches: int = 2) -> tuple[ModelConfig, LayoutConfig, RunConfig, ClusterConfig]:
    (layers, hidden, heads, ffn), recompute, _ = AMSP[size]
    model = ModelConfig("llama", layers, hidden, heads, heads, ffn, vocab=32000, seq=4096)
    run = RunConfig(global_batch=1024 * micro_batches, precision="bf16")
    return model, LayoutConfig(data=1024, recompute=recompute), run, CLUSTER


@pytest.mark.parametrize("size", sorted(AMSP))
def test_by_amsps_equations_its_choice_is_the_fastest_strategy_that_fits(size: str) -> None:
    by_factors = {c.factors: c for c in published_choices(*question(size), trainers.INTERNEVO)}
    chosen = by_factors[AMSP[size][2]]
    assert chosen.fits > 0.9
    for name, factors in STRATEGIES.items():
        other = by_factors[factors]
        assert other.fits < 0.9 or other.step_time_s > chosen.step_time_s, name


@pytest.mark.parametrize("size", sorted(AMSP))
def test_by_amsps_equations_nothing_that_fits_is_much_faster_than_its_choice(size: str) -> None:
    found = published_choices(*question(size), trainers.INTERNEVO)
    chosen = next(c for c in found if c.factors == AMSP[size][2])
    assert chosen.step_time_s < 1.06 * best(found).step_time_s


def test_amsps_choice_for_7b_is_found_exactly() -> None:
    assert best(published_choices(*question("7B"), trainers.INTERNEVO)).factors == AMSP["7B"][2]


@pytest.mark.parametrize("size", sorted(AMSP))
def test_with_overlap_and_equal_shards_the_planner_beats_every_named_strategy_and_amsps_choice(size: str) -> None:
    found = choices(*question(size))
    picked = best(found)
    for factors in (*STRATEGIES.values(), AMSP[size][2]):
        other = next(c for c in found if c.factors == factors)
        assert other.fits < 0.9 or picked.step_time_s <= 1.01 * other.step_time_s


def test_less_memory_means_more_shards() -> None:
    model, layout, run, cluster = question("13B")
    small = dataclasses.replace(cluster, hardware=dataclasses.replace(cluster.hardware, memory_gb=68.0))
    roomy, tight = best(choices(model, layout, run, cluster)), best(choices(model, layout, run, small))
    assert tight.memory_bytes < 68e9 and tight.memory_bytes <= roomy.memory_bytes and tight.step_time_s >= roomy.step_time_s


def test_nothing_fits_is_said_with_the_least_need() -> None:
    model, layout, run, cluster = question("30B")
    tiny = dataclasses.replace(cluster, hardware=dataclasses.replace(cluster.hardware, memory_gb=4.0))
    with pytest.raises(ConfigError, match=r"no sharding fits into memory: even \(.*\) needs .* GB"):
        best(choices(model, layout, run, tiny))


def test_amsps_equations_are_refused_where_they_do_not_hold() -> None:
    model, _, run, cluster = question("7B")
    with pytest.raises(ConfigError, match=r"layout.tensor=1 and layout.pipeline=1, not 8 and 1"):
        published_choices(model, LayoutConfig(tensor=8, data=128), run, cluster)


@pytest.mark.parametrize("data", [1, 2, 6, 12, 64])
def test_chains_are_all_and_only_the_allowed_factors(data: int) -> None:
    allowed = {
        (p, g, o)
        for p in range(1, data + 1)
        for g in range(1, data + 1)
        for o in range(1, data + 1)
        if data % o == 0 and o % g == 0 and g % p == 0
    }
    chains = sharding_chains(data)
    assert set(chains) == allowed and len(chains) == len(allowed)


def test_levels_are_one_the_node_and_all() -> None:
    assert node_levels(64, 8) == [1, 8, 64] and node_levels(4, 8) == [1, 4] and node_levels(6, 4) == [1, 2, 6] and node_levels(1, 8) == [1]
