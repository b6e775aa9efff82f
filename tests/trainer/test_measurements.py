"""What a run says of itself is what happened."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import pytest
import torch

from tests.farm import Farm
from tests.small_runs import ranks, small
from trainer.comm.collectives import World
from trainer.data import open_dataset
from trainer.measure.meter import stragglers
from trainer.measure.timeline import chrome_trace
from trainer.shared.parallel.schedule import build
from trainer.shared.run.read import from_dict
from trainer.shared.run.rules import resolve
from trainer.shared.run.schema import TrainConfig
from trainer.step import Engine

PIPELINES = [
    {"schedule": "gpipe", "pipeline": 2},
    {"schedule": "1f1b", "pipeline": 2},
    {"schedule": "zero_bubble", "pipeline": 2},
    {"schedule": "interleaved", "pipeline": 2, "virtual_pipeline": 2},
    {"schedule": "1f1b", "pipeline": 2, "data": 2},
]


@pytest.mark.parametrize("layout", PIPELINES, ids=str)
def test_the_timeline_is_the_schedule_as_it_ran(farm: Farm, layout: dict[str, Any]) -> None:
    run = farm.train(small(model={"layers": 4}, **layout), ranks(layout)).checked()
    timeline = json.loads((run.directory / "timeline.json").read_text())
    assert timeline["schedule"] == layout["schedule"]
    chunks, data = layout.get("virtual_pipeline", 1), layout.get("data", 1)
    schedule = build(layout["schedule"], 2, chunks, 4 // data)
    for rank in range(ranks(layout)):
        own = [e for e in timeline["events"] if e["rank"] == rank and e["kind"] in ("forward", "backward", "input_grad", "weight_grad")]
        own = [e for e in own if e["micro_batch"] >= 0]
        stage = rank // data
        expected = [(a.kind.value, a.chunk, a.micro_batch) for a in schedule[stage] if a.kind.computes]
        assert [(e["kind"], e["chunk"], e["micro_batch"]) for e in own] == expected
        assert all(e["stage"] == e["chunk"] * 2 + stage for e in own)
        assert all(a["end_s"] <= b["start_s"] for a, b in itertools.pairwise(own))


def test_ranks_share_one_clock_so_a_stage_starts_after_its_input_was_made(farm: Farm) -> None:
    run = farm.train(small(model={"layers": 4}, pipeline=4, schedule="1f1b"), 4).checked()
    events = json.loads((run.directory / "timeline.json").read_text())["events"]
    forward = {(e["stage"], e["micro_batch"]): e for e in events if e["kind"] == "forward"}
    backward = {(e["stage"], e["micro_batch"]): e for e in events if e["kind"] == "backward" and e["micro_batch"] >= 0}
    assert len(forward) == len(backward) == 4 * 4
    for stage in range(3):
        for m in range(4):
            assert forward[stage, m]["end_s"] <= forward[stage + 1, m]["start_s"]
            assert backward[stage + 1, m]["end_s"] <= backward[stage, m]["start_s"]


def test_a_chrome_trace_holds_every_event_in_microseconds(farm: Farm) -> None:
    run = farm.train(small(pipeline=2), 2).checked()
    timeline = json.loads((run.directory / "timeline.json").read_text())
    trace = chrome_trace(timeline)
    drawn = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert [e["args"] for e in drawn] == timeline["events"]
    assert all(e["dur"] == pytest.approx(1e6 * (e["args"]["end_s"] - e["args"]["start_s"])) and e["dur"] >= 0 for e in drawn)


def test_the_parts_of_a_step_do_not_exceed_it(farm: Farm) -> None:
    result = farm.train(small(steps=6), 1).checked().result
    split = result["step_split_s"]
    assert split.keys() == {"forward", "backward", "communication", "optimizer", "data"}
    assert all(seconds > 0 for seconds in split.values())
    assert sum(split.values()) <= sum(result["step_times_s"][1:]) / 5


def test_waiting_for_others_is_communication_and_not_computation(farm: Farm) -> None:
    """Two ranks wait at every layer; one process only starts collectives that do nothing."""
    one, two = (farm.train(small(tensor=t), t).checked().result["step_split_s"] for t in (1, 2))
    assert two["communication"] > 10 * one["communication"]


def test_the_timeline_tells_computing_from_communication_as_the_parts_of_its_step_do(farm: Farm) -> None:
    run = farm.train(small(tensor=2, run={"steps": 3, "warmup_steps": 2}), 2).checked()  # one measured step: the one that is drawn
    events = json.loads((run.directory / "timeline.json").read_text())["events"]
    computed = sum(e["end_s"] - e["start_s"] - e["waited_s"] for e in events if e["kind"] in ("forward", "backward")) / 2
    split = run.result["step_split_s"]
    assert computed == pytest.approx(split["forward"] + split["backward"])
    assert 0 < sum(e["waited_s"] for e in events) / 2 <= split["communication"] * 1.001


@pytest.mark.parametrize("precision, bytes_each", [("fp64", (8, 8, 16)), ("fp32", (4, 4, 8)), ("bf16", (2, 4, 12)), ("fp16", (2, 4, 12))])
def test_states_take_the_bytes_per_parameter_of_their_precision(farm: Farm, precision: str, bytes_each: tuple[int, ...]) -> None:
    memory = farm.train(wide(precision), 1).checked().result["memory"]
    assert tuple(memory[part] / elements(1) for part in ("weights", "gradients", "optimizer")) == bytes_each


@pytest.mark.parametrize("sharding", [(1, 1, 2), (1, 2, 2), (2, 2, 2)], ids=str)
def test_sharded_states_take_their_share(farm: Farm, sharding: tuple[int, ...]) -> None:
    """Besides the shards, whole buckets come and go: of each size two at once, one in use and one on its way."""
    layers, block, ends = 8, 12 * 64 * 64 + 13 * 64, 128 * 64 + 16 * 64 + 2 * 64
    layout = {"data": 2, "sharding": dict(zip(("params", "grads", "optimizer"), sharding))}
    config = small(steps=2, precision="fp32", model={"hidden": 64, "vocab": 128, "layers": layers}, run={"bucket_mb": 0.15}, **layout)
    memory = farm.train(config, 2).checked().result["memory"]
    for name, share, each in zip(("weights", "gradients", "optimizer"), sharding, (4, 4, 8)):
        shard = each * (layers * block + ends) / share
        passing = 0 if share == 1 or name == "optimizer" else each * 2 * (block + ends)
        assert shard <= memory[name] <= 1.02 * (shard + passing)


def wide(precision: str, **layout: Any) -> dict[str, Any]:
    return small(steps=2, precision=precision, model={"hidden": 64, "vocab": 128, "layers": 2}, run={"bucket_mb": 100}, **layout)


def elements(shards: int) -> int:
    n = 128 * 64 + 16 * 64 + 2 * (12 * 64 * 64 + 13 * 64) + 2 * 64
    return math.ceil(n / (64 * shards)) * 64 * shards


@pytest.mark.parametrize("layout", [{}, {"schedule": "zero_bubble"}, {"recompute": "full"}], ids=str)
def test_a_step_leaves_no_activation_behind(layout: dict[str, Any]) -> None:
    config = resolve(from_dict(TrainConfig, small(model={"dropout": 0.1}, **layout)), 1)
    engine = Engine(config, World(0, 1, torch.device("cpu"), "", 0, 10.0), open_dataset(config.data, config.model, 1))
    engine.step(0, watch=True)
    assert engine.rank.activations.peak > 0
    assert engine.rank.activations.now == 0


def test_work_that_is_put_off_keeps_its_tensors_and_they_are_counted(farm: Farm) -> None:
    """On the last of four stages zero-bubble puts off three weight gradients: their tensors are held where 1F1B holds none."""
    usual, put_off = (
        farm.train(small(pipeline=4, schedule=schedule, model={"layers": 4, "vocab": 7, "seq": 64, "tied": False}), 4)
        .checked()
        .result["memory"]
        for schedule in ("1f1b", "zero_bubble")
    )
    assert put_off["activations"] > usual["activations"]


def test_a_rank_that_is_slower_than_its_peers_is_a_straggler() -> None:
    assert stragglers([1.0, 1.0, 1.3, 1.0], [0, 0, 0, 0]) == [2]
    assert stragglers([1.0, 5.0, 1.0, 5.0], [0, 1, 0, 1]) == []
    assert stragglers([1.0, 1.3], [0, 0]) == [1]
    assert stragglers([9.0], [0]) == []
