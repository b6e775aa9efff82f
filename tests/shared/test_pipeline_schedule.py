"""Pipeline schedules: complete, ordered, free of deadlock, within their memory, and as fast as their papers say."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.shared.schedule_validator import ScheduleError, validate
from trainer.shared.parallel.actions import Action, Kind, Schedule
from trainer.shared.parallel.messages import add_communication
from trainer.shared.parallel.schedule import build, in_flight
from trainer.shared.parallel.simulate import Deadlock, Times, idle_fraction, makespan, simulate
from trainer.shared.run.errors import ConfigError

SINGLE = ("gpipe", "1f1b", "zero_bubble")

shapes = st.one_of(
    st.tuples(st.sampled_from(SINGLE), st.integers(1, 8), st.just(1), st.integers(1, 24)),
    st.tuples(st.just("interleaved"), st.integers(1, 6), st.integers(1, 4), st.integers(1, 24)),
)


def kinds(actions: list[Action]) -> list[tuple[Kind, int, int]]:
    return [(a.kind, a.chunk, a.micro_batch) for a in actions if a.kind.computes]


@given(shapes)
def test_every_schedule_is_complete_ordered_and_free_of_deadlock(shape: tuple[str, int, int, int]) -> None:
    name, stages, chunks, micro_batches = shape
    validate(build(name, stages, chunks, micro_batches), chunks, micro_batches)


@given(shapes)
def test_in_flight_micro_batches_stay_within_each_schedules_bound(shape: tuple[str, int, int, int]) -> None:
    name, stages, chunks, micro_batches = shape
    for rank, actions in enumerate(build(*shape)):
        bound = {
            "gpipe": micro_batches,
            "1f1b": stages - rank,
            "zero_bubble": stages,
            "interleaved": 2 * (stages - 1 - rank) + (chunks - 1) * stages + 1,
        }[name]
        assert in_flight(actions) <= min(bound, micro_batches * chunks)
        if name != "interleaved":
            assert in_flight(actions) == min(bound, micro_batches)


@given(st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 8), st.integers(1, 24), st.floats(0.1, 9), st.floats(0.1, 9))
def test_idle_share_of_equal_stages_is_the_textbook_bubble(name: str, p: int, m: int, forward: float, half: float) -> None:
    spans = simulate(build(name, p, 1, m), Times.equal(p, forward, half, half))
    assert idle_fraction(spans) == pytest.approx((p - 1) / (m + p - 1), abs=1e-9)


@given(st.integers(2, 6), st.integers(2, 4), st.integers(1, 4))
def test_interleaving_divides_the_bubble_by_the_chunks(p: int, v: int, groups: int) -> None:
    spans = simulate(build("interleaved", p, v, groups * p), Times.equal(p * v))
    assert idle_fraction(spans) == pytest.approx((p - 1) / (v * groups * p + p - 1))


@given(st.integers(1, 8), st.integers(0, 12), st.integers(1, 5), st.integers(1, 5), st.integers(1, 5))
def test_zero_bubble_waits_as_long_as_its_paper_says(p: int, more: int, forward: int, input_grad: int, weight_grad: int) -> None:
    """Bubble (p-1)(T_F + T_B - T_W) of ZB-H1 (Qi et al. 2023, table 1), where the weight gradient is no longer than the others."""
    m = p + more
    weight_grad = min(weight_grad, forward, input_grad)
    spans = simulate(build("zero_bubble", p, 1, m), Times.equal(p, forward, input_grad, weight_grad))
    assert makespan(spans) == pytest.approx(m * (forward + input_grad + weight_grad) + (p - 1) * (forward + input_grad - weight_grad))


@given(st.integers(2, 6), st.integers(1, 12), st.floats(0.01, 2))
def test_zero_bubble_never_loses_to_1f1b(p: int, m: int, send: float) -> None:
    times = Times.equal(p, send=send)
    assert makespan(simulate(build("zero_bubble", p, 1, m), times)) <= makespan(simulate(build("1f1b", p, 1, m), times)) + 1e-9


def oracle(name: str, p: int, m: int, v: int | None = None) -> Iterator[list[tuple[str, int, int]]]:
    """The order of computation of torch's own pipelining schedule: (kind, global stage, micro-batch)."""
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops  # here: to collect pure tests loads no torch

    short = {"FORWARD": "F", "FULL_BACKWARD": "B"}
    for actions in get_schedule_ops(name, p, m, v):
        yield [(short[n], a.stage_index, a.microbatch_index) for a in actions if a and (n := a.computation_type.name) in short]


def ours(schedule: Schedule) -> Iterator[list[tuple[str, int, int]]]:
    for rank, actions in enumerate(schedule):
        yield [("F" if k is Kind.FORWARD else "B", c * len(schedule) + rank, m) for k, c, m in kinds(actions)]


def unnumbered(ranks: Iterator[list[tuple[str, int, int]]]) -> list[list[str]]:
    return [[kind for kind, _, _ in actions] for actions in ranks]


@pytest.mark.slow
@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 2), (2, 5), (4, 4), (4, 11), (6, 8)])
def test_gpipe_and_1f1b_compute_in_the_order_of_torch(p: int, m: int) -> None:
    assert list(ours(build("gpipe", p, 1, m))) == list(oracle("GPipe", p, m))
    # torch 2.13's table misnumbers the forwards of 1F1B (micro-batch m of 0 .. m-1 appears), so only what is run is compared
    assert unnumbered(ours(build("1f1b", p, 1, m))) == unnumbered(oracle("1F1B", p, m))


@pytest.mark.slow
@pytest.mark.parametrize(("p", "v", "m"), [(2, 2, 2), (2, 3, 4), (4, 2, 8), (3, 4, 6)])
def test_interleaved_computes_in_the_order_of_torch(p: int, v: int, m: int) -> None:
    assert list(ours(build("interleaved", p, v, m))) == list(oracle("Interleaved1F1B", p, m, v))


@given(shapes)
def test_receives_are_posted_while_the_computation_before_their_use_runs(shape: tuple[str, int, int, int]) -> None:
    for actions in build(*shape):
        computed = [i for i, a in enumerate(actions) if a.kind.computes]
        for before, use in itertools.pairwise(computed):
            user = actions[use]
            receive = Kind.RECV_FORWARD if user.kind is Kind.FORWARD else Kind.RECV_BACKWARD
            assert (receive, user.chunk, user.micro_batch) not in [(a.kind, a.chunk, a.micro_batch) for a in actions[before:use]]


def test_a_tensor_needed_late_is_received_early_if_it_was_sent_early() -> None:
    """Rank 1 wants micro-batch 1 first, but rank 0 sends 0 first: without tags the first to arrive is 0."""
    forward, backward = ([Action(kind, 0, m) for m in (0, 1)] for kind in (Kind.FORWARD, Kind.BACKWARD))
    schedule = add_communication([[*forward, *backward[::-1]], [forward[1], backward[1], forward[0], backward[0]]])
    assert [a.micro_batch for a in schedule[1] if a.kind is Kind.RECV_FORWARD] == [0, 1]
    validate(schedule, 1, 2)


@given(shapes)
def test_gradients_are_reduced_right_after_the_last_computation_of_their_chunk(shape: tuple[str, int, int, int]) -> None:
    for actions in build(*shape):
        for i, action in enumerate(actions):
            if action.kind is Kind.REDUCE:
                before = [a for a in actions[:i] if a.kind.computes][-1]
                assert before.chunk == action.chunk and before.kind in (Kind.BACKWARD, Kind.WEIGHT_GRAD)


def test_a_transfer_takes_time_only_where_it_is_waited_for() -> None:
    free = simulate(build("1f1b", 2, 1, 8), Times.equal(2))
    slow = simulate(build("1f1b", 2, 1, 8), Times.equal(2, send=0.25))
    assert makespan(free) < makespan(slow) < makespan(free) + 16 * 0.25
    sends = [s for s in slow[0] if s.action.kind is Kind.SEND_FORWARD]
    assert all(s.end - s.start == pytest.approx(0.25) for s in sends)


def test_gathers_delay_the_first_computation_and_reductions_the_end() -> None:
    times = Times([1.0], [2.0], gather=[0.5], reduce=[3.0])
    assert makespan(simulate(build("1f1b", 1, 1, 2), times)) == pytest.approx(0.5 + 6 + 3)


def drop(schedule: Schedule, rank: int, kind: Kind) -> Schedule:
    """The schedule without the first action of a kind on a rank."""
    victim = next(a for a in schedule[rank] if a.kind is kind)
    return [[a for a in actions if a is not victim] for actions in schedule]


def swap(schedule: Schedule, rank: int, kind: Kind) -> Schedule:
    """The schedule with the first two actions of a kind on a rank exchanged."""
    i, j = [i for i, a in enumerate(schedule[rank]) if a.kind is kind][:2]
    changed = [list(actions) for actions in schedule]
    changed[rank][i], changed[rank][j] = changed[rank][j], changed[rank][i]
    return changed


@pytest.mark.parametrize("kind", [k for k in Kind if k not in (Kind.INPUT_GRAD, Kind.WEIGHT_GRAD)])
def test_a_missing_action_is_refused(kind: Kind) -> None:
    schedule = build("1f1b", 3, 1, 6)
    with pytest.raises(ValueError):
        validate(drop(schedule, 1, kind), 1, 6)


@pytest.mark.parametrize("kind", [Kind.INPUT_GRAD, Kind.WEIGHT_GRAD])
def test_half_a_backward_is_refused(kind: Kind) -> None:
    with pytest.raises(ScheduleError, match=kind.value):
        validate(drop(build("zero_bubble", 3, 1, 6), 1, kind), 1, 6)


def test_receives_in_another_order_than_the_sends_are_refused() -> None:
    with pytest.raises(ScheduleError, match="in that order"):
        validate(swap(build("gpipe", 2, 1, 4), 1, Kind.RECV_FORWARD), 1, 4)


def test_more_in_flight_than_allowed_is_refused() -> None:
    validate(build("1f1b", 4, 1, 8), 1, 8, most_in_flight=4)
    with pytest.raises(ScheduleError, match="holds 8 micro-batches at once, more than 4"):
        validate(build("gpipe", 4, 1, 8), 1, 8, most_in_flight=4)


def test_ranks_that_wait_for_each_other_are_a_deadlock_that_names_them() -> None:
    schedule = build("1f1b", 2, 1, 1)
    first = [a for a in schedule[0] if a.kind is not Kind.BACKWARD]
    backward = next(a for a in schedule[0] if a.kind is Kind.BACKWARD)
    with pytest.raises(Deadlock, match=r"rank 0 at 'backward 0.0', rank 1 at 'forward 0.0'"):
        simulate([[backward, *first], schedule[1]], Times.equal(2))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (("1f1b", 2, 2, 4), "layout.schedule=1f1b runs one chunk per rank, not 2; use layout.schedule=interleaved"),
        (
            ("1f2b", 2, 1, 4),
            "layout.schedule=1f2b is not one of gpipe, 1f1b, interleaved, zero_bubble or sliced_1f1b; did you mean '1f1b'?",
        ),
        (("gpipe", 0, 1, 4), "at least 1 stage"),
        (
            ("zero_bubble", 2, 1, 4, 2),
            "layout.schedule=zero_bubble runs whole sequences, not 2 slices of each; use layout.schedule=sliced_1f1b",
        ),
    ],
)
def test_impossible_schedules_are_refused_plainly(shape: tuple[str, int, int, int], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        build(*shape)
    assert message in str(error.value)
