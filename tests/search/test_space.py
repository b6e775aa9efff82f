"""The space holds exactly what the rules of a run allow, once each, and says why the rest is out."""

from __future__ import annotations

import dataclasses
import itertools
import random

import numpy as np
import pytest

from launcher.config.schema import ClusterConfig
from launcher.config.search import SpaceConfig
from launcher.cost.inputs.layouts import BALANCES, ORDERS, to_layout, to_table
from launcher.planning.space import RULES, space, violations
from trainer.shared.run.derived import resolve_model
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.foreign import CommandConfig
from trainer.shared.run.read import from_dict
from trainer.shared.run.rules import check
from trainer.shared.run.schema import RECOMPUTE, SCHEDULES, ExpertsConfig, LayoutConfig, ModelConfig, RunConfig, ShardingConfig, TrainConfig

MODEL = resolve_model(ModelConfig(layers=12, hidden=96, heads=12, kv_heads=4, vocab=100, seq=42, family="llama", ffn=256))
MIXTURE = dataclasses.replace(MODEL, seq=48, experts=ExpertsConfig(count=8, shared_ffn=64))
THEIRS = CommandConfig(trainer="another")
"""A trainer that trains every axis."""
CLUSTER = ClusterConfig(nodes=6, gpus_per_node=8)
WORDS = {
    "ranks": "ranks",
    "heads": "layout.tensor=",
    "sequence": "sequence_parallel",
    "experts": "model.experts.",
    "context": "pieces do not divide it",
    "fold": "to which experts are dealt out",
    "layers: more": "use at most",
    "layers: stages": "do not divide",
    "schedule": "layout.virtual_pipeline",
    "slices": "layout.slices",
    "batch": "run.global_batch",
    "sharding": "layout.sharding",
}
"""What the rule's own message says, by the beginning of its name in ``RULES``."""


def random_layout(draw: random.Random) -> LayoutConfig:
    degrees = (1, 1, 2, 3, 4, 5, 6, 8, 12)
    chunks = draw.choice((1, 1, 1, 2, 3))
    return LayoutConfig(
        tensor=draw.choice(degrees),
        pipeline=draw.choice(degrees),
        virtual_pipeline=chunks,
        data=draw.choice(degrees),
        micro_batch=draw.choice((1, 2, 3, 4)),
        schedule="interleaved" if chunks > 1 and draw.random() < 0.8 else draw.choice(SCHEDULES),
        sequence_parallel=draw.random() < 0.5,
        recompute=draw.choice(RECOMPUTE),
        balance=draw.choice(BALANCES),
        order=draw.choice(ORDERS),
        sharding=ShardingConfig(*(draw.choice((1, 1, 2, 4)) for _ in range(3))),
    )


def message(layout: LayoutConfig, world_size: int, global_batch: int, model: ModelConfig = MODEL) -> str:
    """What ``trainer.shared.run.rules.check`` says of a layout; empty when it allows it."""
    try:
        check(TrainConfig(model=model, layout=layout, run=RunConfig(global_batch=global_batch), command=THEIRS), world_size)
    except ConfigError as error:
        return str(error)
    return ""


def test_columns_and_single_runs_obey_the_same_rules_with_the_same_reason() -> None:
    draw = random.Random(7)
    layouts = [dataclasses.replace(one, slices=draw.choice((1, 2, 3, 22, 43))) for one in (random_layout(draw) for _ in range(1000))]
    layouts += [random_layout(draw) for _ in range(3000)]
    axes = random.Random(8)
    crowded = [
        dataclasses.replace(
            one, context=axes.choice((1, 1, 2, 3, 5)), expert=axes.choice((1, 1, 2, 3, 4, 8)), expert_tensor=axes.choice((1, 1, 2, 3))
        )
        for one in (random_layout(axes) for _ in range(3000))
    ]
    codes = np.concatenate(
        [violations(to_table(some), model, CLUSTER.world_size, 48) for some, model in ((layouts, MODEL), (crowded, MIXTURE))]
    )
    said = [message(layout, CLUSTER.world_size, 48) for layout in layouts]
    said += [message(layout, CLUSTER.world_size, 48, MIXTURE) for layout in crowded]
    assert [bool(text) for text in said] == [code >= 0 for code in codes]
    for code, text in zip(codes, said):
        if code >= 0:
            word = next(word for name, word in WORDS.items() if RULES[code].startswith(name))
            assert word in text, f"{RULES[code]!r} but {text!r}"
    assert len(set(codes.tolist())) == len(RULES) + 1, "every rule was met, and so was a layout that breaks none"


def in_pairs(table: np.ndarray) -> np.ndarray:
    """Layouts in which any two values of two columns that occur together somewhere in the table do so, too."""
    codes = [np.unique(table[name], return_inverse=True)[1] for name in table.dtype.names or ()]
    firsts = [np.unique(one * len(table) + other, return_index=True)[1] for one, other in itertools.combinations(codes, 2)]
    return table[np.unique(np.concatenate(firsts))]


@pytest.mark.parametrize("levels", ["levels", "all"])
def test_layouts_of_the_space_are_valid_runs_that_fill_the_cluster_and_none_comes_twice(levels: str) -> None:
    found = space(MODEL, CLUSTER, 48, SpaceConfig(sharding=levels)).table
    layouts = [to_layout(record) for record in in_pairs(found)]
    assert len(layouts) > 300 and not [text for layout in layouts if (text := message(layout, CLUSTER.world_size, 48))]
    assert (found["tensor"] * found["pipeline"] * found["data"] == CLUSTER.world_size).all()
    assert len(np.unique(found)) == len(found)


def test_what_is_in_and_what_each_reason_took_out_is_the_whole_grid() -> None:
    limits = SpaceConfig(max_micro_batch=4)
    found = space(MODEL, CLUSTER, 48, limits)
    tensors, pipelines, chunks, micro_batches = [1, 2, 3, 4, 6, 8], [1, 2, 3, 4, 6, 8, 12], [1, 2, 3, 4, 6, 12], [1, 2, 3, 4]
    ways = (len(limits.recompute) + 1) * len(limits.sequence_parallel)
    grid = len(tensors) * len(pipelines) * len(chunks) * len({*limits.schedules} - {"sliced_1f1b"}) * len(micro_batches) * ways
    shardings = {name: found.table[name] for name in ("params", "grads", "optimizer")}
    unsharded = np.all([column == 1 for column in shardings.values()], axis=0)
    assert sum(found.dropped.values()) + int(unsharded.sum()) == grid


def test_a_space_of_five_axes_fills_the_cluster_with_valid_runs_and_shards_over_context_ranks_too() -> None:
    limits = SpaceConfig(
        max_tensor=2, max_pipeline=2, max_context=4, max_expert=8, max_micro_batch=2, schedules=["1f1b"], recompute=["none"]
    )
    found = space(MIXTURE, CLUSTER, 48, limits).table
    layouts = [to_layout(record) for record in found]
    assert not [text for layout in layouts if (text := message(layout, CLUSTER.world_size, 48, MIXTURE))]
    ranks = found["tensor"] * found["pipeline"] * found["context"] * found["data"]
    assert (ranks == CLUSTER.world_size).all() and len(np.unique(found)) == len(found)
    assert set(found["context"].tolist()) == {1, 2, 3, 4} and set(found["expert"].tolist()) == {1, 2, 4, 8}
    assert (found["params"] == found["data"] * found["context"]).any()


def test_context_ranks_that_nobody_asked_for_have_thousands_of_tokens_each() -> None:
    def degrees(seq: int, **limits: int) -> set[int]:
        model = dataclasses.replace(MODEL, seq=seq)
        return set(space(model, CLUSTER, 48, SpaceConfig(max_tensor=1, **limits)).table["context"].tolist())

    assert degrees(8190) == {1} and degrees(8192) == {1, 2} and degrees(49152) == {1, 2, 4, 8}
    assert degrees(8184, max_context=4) == {1, 2, 3, 4}, "what is asked for is looked at"


def test_slices_that_nobody_asked_for_have_thousands_of_tokens_each_and_a_pipeline() -> None:
    def slices(seq: int, **limits: int) -> set[int]:
        table = space(dataclasses.replace(MODEL, seq=seq), CLUSTER, 48, SpaceConfig(max_tensor=1, max_context=1, **limits)).table
        sliced = table[table["schedule"] == SCHEDULES.index("sliced_1f1b")]
        assert (sliced["pipeline"] > 1).all() and (sliced["slices"] > 1).all() and len(sliced) < 0.5 * len(table)
        return set(sliced["slices"].tolist())

    assert slices(8190) == set() and slices(8192) == {2} and slices(16384) == {2, 4}
    assert slices(42, max_slices=3) == {2, 3}, "what is asked for is looked at"
    with pytest.raises(ConfigError, match=r"break 'slices: they need sliced_1f1b"):
        space(MODEL, CLUSTER, 48, SpaceConfig(schedules=["sliced_1f1b"]))


def test_layouts_known_to_be_good_are_in_the_space() -> None:
    """Korthikanti et al. 2022, table 3: 175B on tensor 8 x pipeline 8 x 3 chunks; 530B on tensor 8 x pipeline 35 x 3."""
    for layers, hidden, heads, nodes, pipeline in ((96, 12288, 96, 64, 8), (105, 20480, 128, 35 * 8, 35)):
        model = ModelConfig(layers=layers, hidden=hidden, heads=heads, vocab=51200, seq=2048)
        table = space(model, ClusterConfig(nodes=nodes, gpus_per_node=8), nodes * 8).table
        good = (table["tensor"] == 8) & (table["pipeline"] == pipeline) & (table["virtual_pipeline"] == 3) & table["sequence_parallel"]
        assert good.any()


def test_layers_that_stages_do_not_divide_are_spread_by_cost() -> None:
    table = space(dataclasses.replace(MODEL, layers=10), CLUSTER, 48).table
    uneven = table[10 % (table["pipeline"] * table["virtual_pipeline"]) != 0]
    assert len(uneven) and (uneven["balance"] == BALANCES.index("cost")).all() and (uneven["virtual_pipeline"] == 1).all()


def test_limits_narrow_the_space() -> None:
    limits = SpaceConfig(max_tensor=2, max_pipeline=3, max_micro_batch=2, schedules=["1f1b"], recompute=["full"], sequence_parallel=[False])
    table = space(MODEL, CLUSTER, 48, limits).table
    assert table["tensor"].max() == 2 and table["pipeline"].max() == 3 and table["micro_batch"].max() == 2
    assert set(table["schedule"].tolist()) == {SCHEDULES.index("1f1b")} and set(table["recompute"].tolist()) == {RECOMPUTE.index("full")}
    assert not table["sequence_parallel"].any()


def test_limits_that_allow_nothing_and_unknown_words_are_plain_errors() -> None:
    with pytest.raises(ConfigError, match=r"no layout fits 48 ranks with run.global_batch=7.*batch"):
        space(MODEL, CLUSTER, 7, SpaceConfig(max_tensor=1, max_pipeline=1))
    with pytest.raises(ConfigError, match=r"space.schedules\[0\]='1b1f' is not one of gpipe, 1f1b"):
        from_dict(SpaceConfig, {"schedules": ["1b1f"]}, "space.")
    with pytest.raises(ConfigError, match=r"space.recompute=\[\] leaves nothing to choose from; give one or more of none, selective"):
        from_dict(SpaceConfig, {"recompute": []}, "space.")


def test_the_reason_given_when_nothing_is_left_is_that_of_the_combinations_that_came_nearest() -> None:
    """A batch that no number of replicas divides is the cause, however many combinations have more stages than layers."""
    cluster = dataclasses.replace(CLUSTER, nodes=5000)
    with pytest.raises(ConfigError, match=r"nearest.*break 'batch: "):
        space(MODEL, cluster, 1009, SpaceConfig())


def test_a_model_that_no_layout_can_run_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.heads=7 does not divide model.hidden=96"):
        space(ModelConfig(hidden=96, heads=7), CLUSTER, 48)


def test_no_two_layouts_recompute_the_same_blocks() -> None:
    found = space(
        MODEL, CLUSTER, 48, SpaceConfig(max_tensor=2, schedules=["1f1b", "interleaved", "1f1b"], sequence_parallel=[True, False, True])
    )
    runs = set()
    for layout in map(to_layout, found.table):
        blocks = MODEL.layers // (layout.pipeline * layout.virtual_pipeline)
        redone = tuple(range(0, blocks, layout.recompute_every))
        runs.add((repr(dataclasses.replace(layout, recompute_every=1)), redone if layout.balance == "equal" else layout.recompute_every))
    assert len(runs) == len(found.table)


def test_words_of_the_table_are_those_of_the_schema() -> None:
    metadata = {f.name: f.metadata.get("choices") for f in dataclasses.fields(LayoutConfig)}
    assert metadata["balance"] == BALANCES and metadata["order"] == ORDERS


def test_a_layout_survives_the_way_through_the_table() -> None:
    draw = random.Random(3)
    layouts = [random_layout(draw) for _ in range(200)]
    layouts += [LayoutConfig(data=1, recompute="full", recompute_layers=2), LayoutConfig(data=1, recompute="full", recompute_every=3)]
    assert [to_layout(record) for record in to_table(layouts)] == layouts
