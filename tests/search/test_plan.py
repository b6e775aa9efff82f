"""A plan judges every layout, and what it lists is what one would want to run."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from launcher.config import compose
from launcher.config.hardware import hardware_files
from launcher.config.schema import ClusterConfig, Config
from launcher.config.search import SearchConfig, SpaceConfig
from launcher.config.trainers import profile
from launcher.cost.parts import GATHER, REDUCE, STEP, UPDATE
from launcher.cost.recomputing import plain
from launcher.cost.thresholds import SURELY_FITS
from launcher.cost.timeline import timeline
from launcher.planning.layout_names import layout_of, name_of, overrides_of
from launcher.planning.plan import AT_EDGE, DOMINATED, IN, MEMORY, SEQUENCES, VERDICTS, pareto, plan
from trainer.shared.parallel.simulate import makespan
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.schema import LayoutConfig, ModelConfig, RunConfig, ShardingConfig

CONFIG = Config(
    model=ModelConfig(layers=24, hidden=4096, heads=32, vocab=51200, seq=2048),
    run=RunConfig(global_batch=96, precision="bf16"),
    cluster=ClusterConfig(nodes=3, gpus_per_node=8, hardware=hardware_files()["a100_80"]),
    search=SearchConfig(space=SpaceConfig(schedules=["gpipe", "1f1b", "interleaved", "zero_bubble"], max_micro_batch=8)),
)

FUSED = dataclasses.replace(CONFIG.run, async_tensor=True)


@pytest.fixture(scope="module")
def planned():  # type: ignore[no-untyped-def]
    return plan(CONFIG)


def test_every_layout_has_one_verdict_and_every_reason_is_counted(planned) -> None:  # type: ignore[no-untyped-def]
    counts = {code: int((planned.verdict == code).sum()) for code in (IN, AT_EDGE, MEMORY, DOMINATED)}
    assert sum(counts.values()) == len(planned.space.table)
    assert planned.out == {VERDICTS[code]: count for code, count in counts.items() if code != IN and count}


def test_the_list_is_sorted_fits_and_begins_with_the_fastest_of_all_that_fit(planned) -> None:  # type: ignore[no-untyped-def]
    seconds, fits = planned.estimate.step_time, planned.estimate.fits
    listed = seconds[planned.order]
    assert (np.diff(listed) >= 0).all() and (fits[planned.order] >= 0.5).all()
    assert listed[0] == seconds[fits >= 0.5].min()


def test_what_is_dominated_is_dominated_by_a_listed_layout_of_the_same_ranks(planned) -> None:  # type: ignore[no-untyped-def]
    table, seconds, memory = planned.space.table, planned.estimate.step_time, planned.estimate.memory_total
    listed = planned.order
    for row in np.flatnonzero(planned.verdict == DOMINATED)[::37]:
        rivals = listed[(table["tensor"][listed] == table["tensor"][row]) & (table["pipeline"][listed] == table["pipeline"][row])]
        assert ((seconds[rivals] <= seconds[row]) & (memory[rivals] <= memory[row])).any()


def test_a_layout_that_recomputes_what_surely_fits_is_never_the_fastest(planned) -> None:  # type: ignore[no-untyped-def]
    """It only does more work, however much surer one is of what it does besides."""
    fits, without = planned.estimate.fits, plain(planned.space.table)
    useless = (without >= 0) & (fits[without] >= SURELY_FITS)
    assert useless.any() and not planned.chances[useless].any() and planned.chances.sum() == pytest.approx(1.0)


def test_the_front_holds_what_nothing_beats_in_time_and_memory() -> None:
    group = np.array([0, 0, 0, 0, 1])
    time = np.array([1.0, 2.0, 3.0, 2.0, 9.0])
    memory = np.array([5.0, 3.0, 4.0, 6.0, 9.0])
    assert pareto(group, time, memory).tolist() == [True, True, False, False, True]


def test_a_smaller_memory_moves_layouts_out_and_never_in(planned) -> None:  # type: ignore[no-untyped-def]
    hardware = dataclasses.replace(CONFIG.cluster.hardware, memory_gb=40.0)
    tight = plan(dataclasses.replace(CONFIG, cluster=dataclasses.replace(CONFIG.cluster, hardware=hardware)))
    assert (tight.estimate.fits <= planned.estimate.fits).all()
    assert (tight.verdict == MEMORY).sum() > (planned.verdict == MEMORY).sum()
    assert tight.estimate.step_time[tight.order[0]] >= planned.estimate.step_time[planned.order[0]]


def test_products_that_communicate_are_for_layouts_with_sequence_parallelism_and_hide_some_of_that() -> None:
    own = dataclasses.replace(CONFIG, trainer=profile("trireme"))
    planned, fused = plan(own), plan(dataclasses.replace(own, run=FUSED))
    sharded = planned.space.table["sequence_parallel"]
    assert 0 < sharded.sum() < len(sharded) and (fused.space.table == planned.space.table[sharded]).all()
    assert fused.space.dropped[SEQUENCES] == (~sharded).sum()
    assert (fused.seconds < planned.seconds[sharded]).all()
    one = dataclasses.replace(own, cluster=dataclasses.replace(own.cluster, nodes=1, gpus_per_node=1), run=FUSED)
    with pytest.raises(ConfigError, match=r"run.async_tensor=true is for layouts with layout.sequence_parallel=true, and there are none"):
        plan(one)


def test_parts_of_a_prediction_add_up(planned) -> None:  # type: ignore[no-untyped-def]
    for row in planned.order[:5]:
        predicted = planned.prediction(int(row))
        assert sum(predicted.time.values()) == pytest.approx(planned.estimate.step_time[row])
        assert sum(predicted.memory.values()) == pytest.approx(planned.estimate.memory_total[row])


def test_names_and_overrides_lead_back_to_the_layout(planned) -> None:  # type: ignore[no-untyped-def]
    draw_rows = np.random.default_rng(1).choice(len(planned.space.table), 300, replace=False)
    for drawn, row in enumerate(draw_rows):
        layout = planned.layout(int(row))
        assert planned.find(layout_of(name_of(layout))) == row
        if drawn % 30 == 0:  # composition takes half a second
            assert dataclasses.replace(compose(overrides_of(layout)).layout, data=layout.data) == layout


def test_overrides_undo_what_a_recipe_says_of_the_layout() -> None:
    recipe = ["recipe=bloom_176b"]
    wanted = LayoutConfig(tensor=8, pipeline=4, sequence_parallel=True, balance="cost", sharding=ShardingConfig(1, 1, 12))
    assert compose([*recipe, *overrides_of(wanted, compose(recipe).layout)]).layout == wanted


@pytest.mark.parametrize("name, word", [("t8 p2 d2 banana", "banana"), ("t8 p2 mb1", "data degree"), ("t8 d2 zero-4", "zero-4")])
def test_a_name_that_is_not_understood_is_a_plain_error(name: str, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        layout_of(name)


@pytest.mark.parametrize("schedule, chunks", [("gpipe", 1), ("1f1b", 1), ("zero_bubble", 1), ("interleaved", 2)])
def test_the_simulated_timeline_is_as_long_as_the_pipeline_is_predicted_to_take(planned, schedule: str, chunks: int) -> None:  # type: ignore[no-untyped-def]
    layout = LayoutConfig(tensor=2, pipeline=4, virtual_pipeline=chunks, data=3, micro_batch=1, schedule=schedule)
    row = planned.find(layout)
    assert row is not None
    drawn = timeline(dataclasses.replace(planned.case, table=planned.space.table[row : row + 1]))
    once = (GATHER, REDUCE, UPDATE, STEP)
    predicted = sum(seconds for name, seconds in planned.prediction(row).time.items() if name not in once)
    assert drawn.micro_batches == drawn.of == 32
    assert makespan(drawn.ranks) == pytest.approx(predicted, rel=0.1)


def test_a_long_step_is_drawn_shortened() -> None:
    config = dataclasses.replace(CONFIG, run=RunConfig(global_batch=96 * 200, precision="bf16"))
    long = plan(config, SpaceConfig(max_tensor=1, schedules=["1f1b"], recompute=["none"], partial_recompute=False, max_micro_batch=1))
    row = long.find(LayoutConfig(pipeline=12, data=2))
    assert row is not None
    drawn = timeline(dataclasses.replace(long.case, table=long.space.table[row : row + 1]))
    assert drawn.micro_batches < drawn.of == 9600 and drawn.micro_batches % 12 == 0
