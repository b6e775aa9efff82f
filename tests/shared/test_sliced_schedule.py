"""Slices of sequences as a pipeline schedule: each once and in order, as idle and as large as the formulas say; and where they are cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.shared.schedule_validator import ScheduleError, validate
from trainer.shared.parallel.actions import Action, Kind, Schedule
from trainer.shared.parallel.balance import slices_of
from trainer.shared.parallel.messages import add_communication
from trainer.shared.parallel.schedule import build, compute_order, held_at_once, in_flight
from trainer.shared.parallel.sequence import equal_work
from trainer.shared.parallel.simulate import Times, idle_fraction, simulate
from trainer.shared.run.derived import resolve_model
from trainer.shared.run.flops import core_flops, seen_pairs, work_up_to
from trainer.shared.run.schema import LayoutConfig, ModelConfig

SHAPES = st.tuples(st.integers(1, 8), st.integers(1, 8), st.integers(1, 8))
"""Stages, micro-batches, slices."""


def sliced(stages: int, micro_batches: int, slices: int) -> Schedule:
    return build("sliced_1f1b", stages, 1, micro_batches, slices)


@given(SHAPES)
def test_every_slice_runs_once_each_way_in_order_and_without_deadlock(shape: tuple[int, int, int]) -> None:
    stages, micro_batches, slices = shape
    validate(sliced(*shape), 1, micro_batches, most_in_flight=stages + slices - 1, slices=slices)


@given(st.integers(1, 8), st.integers(1, 24))
def test_one_slice_is_1f1b_action_for_action(stages: int, micro_batches: int) -> None:
    assert sliced(stages, micro_batches, 1) == build("1f1b", stages, 1, micro_batches)


@given(SHAPES, st.floats(0.1, 9), st.floats(0.1, 9))
def test_slices_of_equal_time_divide_the_bubble(shape: tuple[int, int, int], forward: float, half: float) -> None:
    stages, micro_batches, slices = shape
    spans = simulate(sliced(*shape), Times.equal(stages, forward, half, half))
    assert idle_fraction(spans) == pytest.approx((stages - 1) / (micro_batches * slices + stages - 1), abs=1e-9)


@given(SHAPES)
def test_a_rank_holds_a_slice_for_each_rank_behind_it_and_one_sequence(shape: tuple[int, int, int]) -> None:
    stages, micro_batches, slices = shape
    for rank, actions in enumerate(sliced(*shape)):
        assert in_flight(actions) == min(stages - rank + slices - 1, micro_batches * slices)


@given(SHAPES, st.data())
def test_what_a_rank_holds_is_counted_in_the_sizes_of_its_slices(shape: tuple[int, int, int], data: st.DataObject) -> None:
    slices = shape[-1]
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=slices, max_size=slices))
    for actions in sliced(*shape):
        held, most = [], []
        for action in actions:
            if action.kind is Kind.FORWARD:
                held.append(action.item)
                most.append(sum(sizes[part] for *_, part in held))
            elif action.kind is Kind.BACKWARD:
                held.remove(action.item)
        assert list(held_at_once(actions, sizes)) == most and not held


def test_unequal_slices_take_their_own_times() -> None:
    """Rank 1 waits for the first slice alone; its own two forwards follow each other."""
    times = [Times([3.0] * 2, [1.0] * 2, send=[0.5]), Times([1.0] * 2, [2.0] * 2, send=[0.25])]
    ranks = simulate(sliced(2, 1, 2), times)
    starts = {(rank, span.action.kind, span.action.slice): span.start for rank, spans in enumerate(ranks) for span in spans}
    assert starts[1, Kind.FORWARD, 0] == 3.5 and starts[1, Kind.FORWARD, 1] == 6.5 and starts[1, Kind.BACKWARD, 1] == 7.5
    assert starts[0, Kind.BACKWARD, 1] == 9.75


def test_a_backward_before_that_of_the_slice_behind_it_is_refused() -> None:
    order = compute_order("sliced_1f1b", 1, 1, 1, 2)
    order[0][2:] = order[0][:1:-1]
    with pytest.raises(ScheduleError, match=r"runs 'backward 0.0' before"):
        validate(add_communication(order), 1, 1, slices=2)
    forward, backward = ([Action(kind, 0, 0, slice=s) for s in (1, 0)] for kind in (Kind.FORWARD, Kind.BACKWARD))
    with pytest.raises(ScheduleError, match=r"runs 'forward 0.0 slice 1' before"):
        validate(add_communication([[*forward, *backward]]), 1, 1, slices=2)


@given(st.integers(1, 60), st.integers(1, 8), st.integers(1, 4), st.floats(0, 1))
def test_slices_of_equal_work_cover_a_sequence_in_units(units: int, count: int, unit: int, share: float) -> None:
    length = units * unit

    def work(n: int) -> float:
        return (1 - share) * n / length + share * (n / length) ** 2

    if units < count:
        with pytest.raises(ValueError, match="are not"):
            equal_work(length, count, unit, work)
        return
    runs = equal_work(length, count, unit, work)
    assert [i for run in runs for i in run] == [*range(length)] and len(runs) == count
    assert all(run and len(run) % unit == 0 for run in runs)


@given(st.floats(0, 1), st.integers(1, 8))
def test_slices_of_long_sequences_are_of_equal_work(share: float, count: int) -> None:
    """The cut in closed form: the share of the work up to x is (1 - a) x + a x^2."""
    length = 1 << 16
    runs = equal_work(length, count, 1, lambda n: (1 - share) * n / length + share * (n / length) ** 2)
    for number, run in enumerate(runs, 1):
        x = run.stop / length
        assert (1 - share) * x + share * x**2 == pytest.approx(number / count, abs=2 / length)


@given(st.integers(1, 40), st.one_of(st.none(), st.integers(1, 50)))
def test_pairs_of_queries_and_keys_are_counted_one_by_one(positions: int, window: int | None) -> None:
    assert seen_pairs(positions, window) == sum(1 for q in range(positions) for k in range(q + 1) if window is None or k > q - window)


def test_a_models_slices_are_cut_for_its_own_work_in_multiples_that_kernels_want() -> None:
    model = resolve_model(ModelConfig(layers=2, hidden=1024, heads=16, seq=32768, vocab=512))
    runs = slices_of(model, LayoutConfig(schedule="sliced_1f1b", slices=4, pipeline=2, tensor=2))
    lengths = [len(run) for run in runs]
    assert lengths == sorted(lengths, reverse=True) and lengths[0] > 2 * lengths[-1] and not any(n % 128 for n in lengths)
    work = [work_up_to(model, run.stop) - work_up_to(model, run.start) for run in runs]
    assert max(work) < 1.03 * min(work)
    # half of the square, and the diagonal; 3.5 times forward
    attention = work_up_to(model, model.seq) - 3 * 2 * model.seq * 12 * model.hidden**2 * 2
    assert attention == pytest.approx(3.5 * sum(core_flops(model, block) for block in range(2)) / 2, rel=1e-4)
    short = resolve_model(ModelConfig(layers=2, hidden=32, heads=4, seq=12, vocab=61))
    parallel = LayoutConfig(schedule="sliced_1f1b", slices=3, tensor=2, sequence_parallel=True)
    assert all(len(run) % 2 == 0 for run in slices_of(short, parallel))
    assert [len(run) for run in slices_of(short, LayoutConfig(slices=2, slice_lengths=[11, 1]))] == [11, 1]
