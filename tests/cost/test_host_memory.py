"""Optimizer states in host memory: bytes move from the device to the host, and a step takes what copies and updates do not hide."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from launcher.config.search import SpaceConfig
from launcher.cost import predict
from launcher.cost.inputs.constants import SHIPPED
from launcher.cost.inputs.layouts import to_layout
from launcher.cost.memory import peak
from launcher.cost.parts import OFFLOAD
from launcher.cost.prediction import CostModel, Prediction
from launcher.planning.layout_names import layout_of, name_of
from launcher.planning.space import space
from tests.cost.machines import cluster, layout, mixed
from trainer.shared.run.schema import LayoutConfig, ModelConfig, ShardingConfig

MODEL = ModelConfig(family="llama", layers=32, hidden=4096, heads=32, ffn=11008, vocab=32000, seq=4096)


def offloaded(share: float, batch: int = 16, data: int = 1, precision: str = "bf16", **constants: float) -> Prediction:
    one = layout(data=data, recompute="full", sharding=ShardingConfig(optimizer=data, offload=share))
    asked = cluster(data)
    if constants:
        asked = dataclasses.replace(asked, hardware=dataclasses.replace(asked.hardware, constants=constants))
    return predict(MODEL, one, mixed(batch, precision), asked)


@pytest.mark.parametrize(("precision", "there", "here"), [("bf16", 18, 12), ("fp8", 18, 12), ("fp32", 16, 8)])
@pytest.mark.parametrize("data", [1, 8])
def test_states_move_to_the_host_by_the_share(precision: str, there: int, here: int, data: int) -> None:
    """There with a gradient, and weights in the type of computation where that is another one."""
    none = offloaded(0.0, precision=precision, data=data)
    states = none.memory[peak.OPTIMIZER]
    for share in (0.3, 1.0):
        found = offloaded(share, precision=precision, data=data)
        assert found.memory[peak.OPTIMIZER] == pytest.approx((1 - share) * states)
        assert found.host_bytes == pytest.approx(share * states / here * there)
        assert all(found.memory[part] == none.memory[part] for part in (peak.WEIGHTS, peak.GRADIENTS, peak.ACTIVATIONS))
    assert none.host_bytes == 0


def test_a_model_that_a_device_cannot_hold_fits_with_its_states_on_the_host() -> None:
    assert offloaded(0.0).fits < 0.01 and offloaded(1.0).fits > 0.9


def test_what_nothing_hides_is_the_copies_and_the_update() -> None:
    """Gradients of 4 bytes go down; states are read and written, the gradient too, and weights of 2 bytes written, while others go up."""
    held = offloaded(0.0).memory[peak.OPTIMIZER] / 12
    for share in (0.3, 1.0):
        shown = offloaded(share, data_hidden=1e-9).time[OFFLOAD]
        assert shown == pytest.approx(share * held * (4 / SHIPPED.pinned_link + max(34 / SHIPPED.host_update, 2 / SHIPPED.pinned_link)))


def test_longer_steps_and_faster_hosts_show_less_of_it() -> None:
    shares = [offloaded(share).time[OFFLOAD] for share in np.linspace(0, 1, 6)]
    assert shares == sorted(shares) and shares[0] == 0
    slow = offloaded(1.0, host_update=SHIPPED.host_update / 10)
    assert slow.time[OFFLOAD] > 3 * shares[-1] and offloaded(1.0, pinned_link=1e12, host_update=1e14).time[OFFLOAD] < 0.1 * shares[-1]
    long = offloaded(1.0, batch=128)
    assert long.time[OFFLOAD] / long.step_time_s < 0.2 * shares[-1] / offloaded(1.0).step_time_s


def test_ranks_of_a_host_share_what_its_cores_update() -> None:
    """A rank of eight has an eighth of the states, and takes as long for them as one rank for all."""
    alone, shared = (offloaded(1.0, batch=16 * data, data=data, data_hidden=1e-9, pinned_link=1e15) for data in (1, 8))
    assert shared.time[OFFLOAD] == pytest.approx(alone.time[OFFLOAD], rel=1e-3)


def test_shares_are_searched_only_if_asked_for() -> None:
    usual = space(MODEL, cluster(8), 16)
    assert not usual.table["offload"].any()
    both = space(MODEL, cluster(8), 16, SpaceConfig(offload=[0.0, 0.5]))
    assert len(both.table) == 2 * len(usual.table) and (both.table["offload"] == 0.5).sum() == len(usual.table)
    predicted = CostModel(cluster(8)).predict_table(MODEL, both.table, mixed(16))
    for row in (0, 1):
        one = to_layout(both.table[row])
        assert layout_of(name_of(one)) == one
        alone = predict(MODEL, one, mixed(16), cluster(8))
        assert alone.step_time_s == pytest.approx(float(predicted.step_time[row])) and alone.memory_bytes == float(
            predicted.memory_total[row]
        )


def test_a_name_tells_layouts_with_other_shares_apart() -> None:
    one = LayoutConfig(data=2, sharding=ShardingConfig(1, 2, 2, 0.25))
    assert name_of(one).endswith("zero-2 offload-0.25") and layout_of(name_of(one)) == one
