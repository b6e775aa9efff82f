"""Slices of sequences in the cost model: as long and as many as the trainer's own, the bubble divided, keys and values kept."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.config.schema import ClusterConfig
from launcher.cost import predict
from launcher.cost.inputs.shape import Shape
from launcher.cost.inputs.slices import lengths, most_held, quadratic_share
from launcher.cost.parts import ATTENTION, BUBBLE, TRANSFERS
from launcher.cost.prediction import Prediction
from tests.cost.machines import HARDWARE
from tests.farm import Farm
from tests.small_runs import ranks, small
from trainer.shared.parallel.balance import slices_of
from trainer.shared.parallel.schedule import build, held_at_once
from trainer.shared.run.derived import resolve_model
from trainer.shared.run.read import from_dict
from trainer.shared.run.rules import resolve
from trainer.shared.run.schema import LayoutConfig, ModelConfig, RunConfig, TrainConfig

LONG = ModelConfig(family="llama", layers=16, hidden=2048, heads=16, vocab=1000, seq=32768)


def predicted(slices: int, model: ModelConfig = LONG, **layout: object) -> Prediction:
    way = {"schedule": "sliced_1f1b", "slices": slices} if slices > 1 else {}
    cluster = ClusterConfig(gpus_per_node=4, hardware=HARDWARE["h100"])
    return predict(model, LayoutConfig(pipeline=4, data=1, **way, **layout), RunConfig(precision="bf16", global_batch=4), cluster)  # type: ignore[arg-type]


@pytest.mark.parametrize("window", [None, 4096])
@given(count=st.integers(2, 8), hidden=st.sampled_from([512, 1024, 4096]))
def test_slices_are_as_long_as_the_trainer_cuts_them(window: int | None, count: int, hidden: int) -> None:
    """But for windows in some blocks: they are cut as if work grew linearly with the sequence there."""
    model = dataclasses.replace(LONG, hidden=hidden, window=window, full_every=2 if window else 0)
    cut = [len(run) * count / model.seq for run in slices_of(resolve_model(model), LayoutConfig(slices=count))]
    share = float(np.asarray(quadratic_share(Shape.of(model))))
    assert lengths(count, share) == pytest.approx(cut, abs=0.03 if window is None else 0.15)


@given(st.integers(1, 6), st.integers(1, 8), st.integers(2, 8), st.floats(0, 0.9), st.data())
def test_what_a_rank_holds_is_that_of_its_actions(p: int, m: int, k: int, share: float, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, p - 1))
    sizes = [round(1000 * length) for length in lengths(k, share)]
    whole = max(held_at_once(build("sliced_1f1b", p, 1, m, k)[rank], sizes)) / 1000
    held, micro_batches, begun = most_held(p, rank, min(m, p + 1), k, share)
    assert held == pytest.approx(whole, abs=0.01 * k) and 1 <= micro_batches <= m and begun in (0, 1)
    if share == 0:
        assert held == pytest.approx(min(p - rank + k - 1, m * k))


def test_slices_divide_the_bubble_and_leave_the_work() -> None:
    whole, sliced = predicted(1), predicted(4)
    idle = [one.time[BUBBLE] + one.time[TRANSFERS] for one in (whole, sliced)]
    assert 3.5 < idle[0] / idle[1] < 4.1
    assert sliced.time[ATTENTION] == pytest.approx(whole.time[ATTENTION], rel=0.03)
    assert sliced.step_time_s < 0.75 * whole.step_time_s


def test_slices_of_few_tokens_lose_more_than_the_bubble() -> None:
    short = dataclasses.replace(LONG, seq=1024, hidden=1024)
    assert predicted(64, short).step_time_s > predicted(2, short).step_time_s


def test_a_rank_keeps_about_one_sequence_and_its_keys() -> None:
    held = {slices: predicted(slices).memory["activations"] for slices in (1, 2, 4, 8)}
    assert list(held.values()) == sorted(held.values(), reverse=True)
    assert 0.35 < held[8] / held[1] < 0.5  # (4 + 8 - 1) / 8 of a sequence, not 4; longer ones first; keys, values and their gradients


COUNTED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "positions are learned": ({"family": "gpt"}, {"pipeline": 2, "slices": 4}),
    "groups of rotary queries": ({"family": "llama", "kv_heads": 2}, {"pipeline": 2, "slices": 4}),
    "recomputed whole": ({"family": "llama"}, {"pipeline": 2, "slices": 2, "recompute": "full"}),
    "tensor ranks": ({"family": "llama", "kv_heads": 2}, {"tensor": 2, "sequence_parallel": True, "slices": 4}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COUNTED)
def test_predicted_activations_are_what_the_trainer_counts(name: str, farm: Farm) -> None:
    own, layout = COUNTED[name]
    model = {"layers": 4, "hidden": 128, "heads": 4, "vocab": 1000, "seq": 128, "attention": "fused"} | own
    run = {"global_batch": 3, "warmup_steps": 0, "bucket_mb": 25.0}
    plain = small(steps=1, precision="fp32", model=model, run=run, schedule="sliced_1f1b", **layout)
    world = ranks(layout)
    counted = farm.train(plain, world).checked().result["memory"]
    config = resolve(from_dict(TrainConfig, plain), world)
    found = predict(config.model, config.layout, config.run, ClusterConfig(gpus_per_node=world, hardware=HARDWARE["cpu"])).counted
    assert {part: found[part] for part in counted} == pytest.approx(
        counted, rel=0.05
    )  # the mean slice stands for all: masks of a CPU differ most
