"""Which measured runs a prediction is near to, and what rests on none."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from benchmarks.fit import chip
from launcher.config import compose
from launcher.config.uncertainty import OF_PARTS, known_runs, shipped_widths, widened
from launcher.cost import CostModel
from launcher.cost.inputs.case import Case
from launcher.cost.inputs.device import Device
from launcher.cost.inputs.shape import Shape
from launcher.cost.known import (
    DENSE,
    MIXTURE,
    OTHER,
    PAIR,
    MeasuredPoints,
    asked_cells,
    distances,
    kind_of,
    nearest_runs,
    place_of,
    rates_assumed,
    unmeasured,
    widths_at,
)
from launcher.cost.parts import ATTENTION, HEAD, MATRICES, WIDTH_OF_PART
from launcher.cost.uncertainty import Traits, between, own_variance
from launcher.planning.plan import plan
from tests.cost.machines import HARDWARE
from trainer.shared.run.errors import ConfigError


def asked(*overrides: str) -> Case:
    config = compose(["recipe=gpt3_175b", *overrides])
    return plan(config, wanted={"tensor": [8], "pipeline": [8], "micro_batch": [1]}).case


def distance_of(case: Case) -> float:
    return float(distances([asked_cells(case, 0)])[0])


def test_nearest_runs_are_those_of_least_distance() -> None:
    case = asked()
    near = nearest_runs(case, 0, 5)
    assert [run.distance for run in near] == sorted(run.distance for run in near)
    assert near[0].distance >= distance_of(case) and len(near) == 5


def test_a_known_run_is_no_distance_from_itself() -> None:
    places = MeasuredPoints.of(known_runs())
    assert places.apart(places, with_layouts=True).diagonal() == pytest.approx(0.0, abs=1e-6)


def test_another_number_format_and_larger_sizes_are_further_away() -> None:
    assert distance_of(asked("run.precision=fp32")) > distance_of(asked())
    assert distance_of(asked("model.seq=131072")) > distance_of(asked())


def test_another_kind_of_model_is_as_far_as_another_trainer() -> None:
    cells = asked_cells(asked(), 0)
    others = [cells, cells | {"kind": MIXTURE}, cells | {"kind": PAIR}, cells | {"trainer": "another"}]
    assert MeasuredPoints.of([cells]).apart(MeasuredPoints.of(others))[0] == pytest.approx([0, OTHER, OTHER, OTHER], abs=1e-6)
    kinds = {"recipe=gpt3_175b": DENSE, "recipe=deepseek_v3": MIXTURE, "recipe=mt5_170m": PAIR}
    assert {recipe: kind_of(Shape.of(compose([recipe]).model)) for recipe in kinds} == kinds


def test_places_that_tell_no_kind_of_model_are_those_of_dense_ones() -> None:
    place = place_of(asked_cells(asked(), 0))
    before = {name: value for name, value in place.items() if name != "kind"}
    machine = dataclasses.replace(HARDWARE["h100"], learnt={"places": [before]})
    assert place["kind"] == DENSE and widths_at(machine, [asked_cells(asked(), 0)]) == [shipped_widths()]
    for wrong in (before | {"kind": 7}, before | {"sort": "dense"}, {name: before[name] for name in before if name != "seq"}):
        with pytest.raises(ConfigError, match=r"learnt\.places is not a list of mappings"):
            widths_at(dataclasses.replace(machine, learnt={"places": [wrong]}), [asked_cells(asked(), 0)])


def test_far_from_all_known_runs_intervals_are_wider_in_proportion() -> None:
    widths = shipped_widths()
    assert widened(widths, widths.seen / 2) == widths
    assert widened(widths, 3 * widths.seen).part == pytest.approx(3 * widths.part)
    far, near = (asked(seq) for seq in ("model.seq=1048576", "model.seq=2048"))
    config = compose(["recipe=gpt3_175b"])
    cost = CostModel(config.cluster, config.trainer)
    assert cost.widths(far).common > cost.widths(near).common
    assert (
        dataclasses.replace(cost.widths(far), **{name: getattr(widths, name) for name in ("common", *OF_PARTS, "layout", "rough")})
        == widths
    )


def test_rates_are_assumed_until_the_machine_is_measured_or_has_run() -> None:
    assumed = dataclasses.replace(HARDWARE["mi300x"], rates_assumed=True)
    own = [{"calibration": {"step_s": 0.01}}, {"learnt": {"places": [place_of(asked_cells(asked(), 0))]}}, {"rates_assumed": False}]
    assert rates_assumed(assumed) and not any(rates_assumed(dataclasses.replace(assumed, **one)) for one in own)
    cells = [asked_cells(asked(), 0)]
    rates = [widths_at(dataclasses.replace(assumed, **one), cells)[0].rate for one in [{}, *own]]
    assert rates == [shipped_widths().chip, 0, 0, 0]


def test_an_assumed_rate_widens_what_is_said_of_matrix_units_alone_and_by_one_error() -> None:
    """Attention and the head's product are as much too fast as all other products."""
    names, shares = list(WIDTH_OF_PART), np.eye(len(WIDTH_OF_PART))
    usual, assumed = shipped_widths(), dataclasses.replace(shipped_widths(), rate=0.3)
    alone = Traits(shares, shares)
    wider = own_variance(assumed, alone).sure - own_variance(usual, alone).sure
    assert [name for name, more in zip(names, wider) if more > 1e-12] == [MATRICES, ATTENTION, HEAD] and wider.max() == pytest.approx(
        0.3**2
    )
    both = between(assumed, alone, alone, np.eye(len(names))).sure - between(usual, alone, alone, np.eye(len(names))).sure
    assert both[names.index(MATRICES), names.index(ATTENTION)] == pytest.approx(0.3**2)
    assert np.allclose(np.diag(both), wider)


def test_rates_of_chips_of_no_fitted_family_are_assumed() -> None:
    """And those of GH200, of whose family none was measured under its limit. V100 has the usual fraction of its peak, and many runs."""
    for name, hardware in HARDWARE.items():
        if not hardware.host and not name.startswith("v100"):
            assert hardware.rates_assumed == (not chip(Device.of(hardware, 8))[0] or name == "gh200"), name


def test_a_part_that_no_known_run_had_so_large_is_named() -> None:
    assert unmeasured({"matrix products": 1.0, "pipeline bubble": 9.0}) == {"pipeline bubble": 0.9}
    assert unmeasured({"matrix products": 7.0, "attention": 3.0}) == {}
