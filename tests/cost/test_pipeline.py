"""The closed forms of the schedules against the simulation of the trainer's own action lists."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.cost.inputs.stages import _by_cost
from launcher.cost.time.pipeline import StageTimes, run, turns
from tests.draws import draws
from trainer.shared.parallel.actions import Kind
from trainer.shared.parallel.balance import by_cost
from trainer.shared.parallel.schedule import build, compute_order
from trainer.shared.parallel.simulate import Times, makespan, simulate

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")
FEW = draws(gate=25, campaign=300)
RANKS, BATCHES = st.integers(1, 8), st.integers(1, 24)


def simulated(name: str, p: int, v: int, m: int, forward: list[float], backward: list[float], send: float) -> float:
    halves = [b / 2 for b in backward]
    return makespan(simulate(build(name, p, v, m), Times(forward, backward, halves, halves, [send] * (p * v))))


def closed(name: str, p: int, v: int, m: int, forward: list[float], backward: list[float], send: float) -> float:
    """The closed form, from seconds per chunk in model order."""
    ranks = [(sum(forward[r::p]), sum(backward[r::p])) for r in range(p)]
    middle = ranks[1:-1] or [(0.0, 0.0)]
    slowest, typical = max(middle, key=sum), tuple(np.mean(middle, axis=0))
    stages = StageTimes(ranks[0], slowest, typical, ranks[-1], send)  # type: ignore[arg-type]
    one = [np.array([float(x)]) for x in (p, v, m)]
    return float(run(stages, *one, np.array([name == "gpipe"]), np.array([name == "zero_bubble"])).total[0])


@pytest.mark.parametrize("name", SCHEDULES)
@FEW
@given(p=RANKS, groups=st.integers(1, 4), rest=st.integers(0, 7), v=st.integers(2, 4), backward=st.floats(1, 3))
def test_equal_stages_without_transfers_take_exactly_the_simulated_time(
    name: str, p: int, groups: int, rest: int, v: int, backward: float
) -> None:
    chunks = v if name == "interleaved" else 1
    m = p * groups if name == "interleaved" else groups + rest
    if name == "interleaved" and p == 1:
        return
    times = [1.0] * (p * chunks), [backward] * (p * chunks)
    assert closed(name, p, chunks, m, *times, 0.0) == pytest.approx(simulated(name, p, chunks, m, *times, 0.0), rel=1e-9)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@FEW
@given(p=RANKS, m=BATCHES, head=st.floats(0, 1), send=st.floats(0, 0.2))
def test_a_slow_last_stage_and_transfers_take_exactly_the_simulated_time(name: str, p: int, m: int, head: float, send: float) -> None:
    forward, backward = [1.0] * p, [2.0] * p
    forward[-1] += head
    backward[-1] += 2 * head
    assert closed(name, p, 1, m, forward, backward, send) == pytest.approx(simulated(name, p, 1, m, forward, backward, send), rel=1e-9)


@FEW
@given(p=st.integers(2, 8), m=st.integers(1, 8), k=st.integers(2, 8), head=st.floats(0, 1), send=st.floats(0, 0.1))
def test_slices_are_as_many_micro_batches_and_never_slower(p: int, m: int, k: int, head: float, send: float) -> None:
    """Ranks run ahead by k - 1 slices more than by micro-batches, which hides transfers and a slow last rank that 1F1B waits for."""
    forward, backward = [1.0] * p, [2.0] * p
    forward[-1] += head
    backward[-1] += 2 * head
    found = closed("1f1b", p, 1, m * k, forward, backward, send)
    halves = [b / 2 for b in backward]
    sliced = makespan(simulate(build("sliced_1f1b", p, 1, m, k), Times(forward, backward, halves, halves, [send] * p)))
    assert sliced <= found * (1 + 1e-9) and sliced == pytest.approx(found, rel=0.12 if send else 0.01)


@FEW
@given(p=RANKS, m=BATCHES, first=st.floats(0, 0.3), last=st.floats(0, 1), send=st.floats(0, 0.2), extra=st.integers(0, 7))
def test_uneven_1f1b_is_within_six_per_cent(p: int, m: int, first: float, last: float, send: float, extra: int) -> None:
    forward = [1.0 + (0.2 if 0 < r <= extra else 0.0) for r in range(p)]
    backward = [2 * f for f in forward]
    forward[0] += first
    forward[-1] += last
    backward[-1] += 2 * last
    assert closed("1f1b", p, 1, m, forward, backward, send) == pytest.approx(simulated("1f1b", p, 1, m, forward, backward, send), rel=0.06)


@FEW
@given(p=st.integers(2, 8), groups=st.integers(1, 4), v=st.integers(2, 4), head=st.floats(0, 0.5), send=st.floats(0, 0.05))
def test_interleaving_with_a_head_and_short_transfers_is_within_ten_per_cent(p: int, groups: int, v: int, head: float, send: float) -> None:
    forward, backward = [1.0] * (p * v), [2.0] * (p * v)
    forward[-1] += head
    backward[-1] += 2 * head
    arguments = ("interleaved", p, v, p * groups, forward, backward, send)
    assert closed(*arguments) == pytest.approx(simulated(*arguments), rel=0.1)


@FEW
@given(p=st.integers(2, 16), m=st.integers(1, 40), v=st.integers(2, 4), backward=st.floats(1, 3))
def test_interleaving_that_stages_do_not_divide_is_within_four_per_cent(p: int, m: int, v: int, backward: float) -> None:
    """3.2 at most in all of these with a backward as long as the forward; 2.1 with one of twice its length."""
    arguments = ("interleaved", p, v, m, [1.0] * (p * v), [backward] * (p * v), 0.0)
    assert closed(*arguments) == pytest.approx(simulated(*arguments), rel=0.04)


@FEW
@given(p=RANKS, v=st.integers(1, 4), m=BATCHES, rank=st.integers(0, 7))
def test_chunks_take_as_many_turns_beside_gathers_and_reductions_as_in_the_trainers_actions(p: int, v: int, m: int, rank: int) -> None:
    chunks = v if p > 1 else 1
    actions = compute_order("interleaved" if chunks > 1 else "1f1b", p, chunks, m)[rank % p]
    forward, backward = ([one.chunk for one in actions if one.kind is kind] for kind in (Kind.FORWARD, Kind.BACKWARD))
    before_last = 1 + max(forward.index(chunk) for chunk in range(chunks))
    after_first = 1 + max(backward[::-1].index(chunk) for chunk in range(chunks))
    assert [chunks * float(passes) for passes in turns(*np.array([p, chunks, m]))] == pytest.approx([before_last, after_first])


@FEW
@given(p=st.integers(1, 8), m=BATCHES, first=st.floats(0.1, 3), middle=st.floats(0.1, 3), last=st.floats(0.1, 3))
def test_no_schedule_is_shorter_than_the_work_of_its_busiest_rank(p: int, m: int, first: float, middle: float, last: float) -> None:
    forward = [first, *[middle] * (p - 2), last][:p] if p > 1 else [last]
    backward = [2 * f for f in forward]
    for name in ("gpipe", "1f1b", "zero_bubble"):
        assert closed(name, p, 1, m, forward, backward, 0.0) >= 3 * m * max(forward) * (1 - 1e-9)


@FEW
@given(p=st.integers(2, 8), m=BATCHES, send=st.floats(0, 0.1))
def test_zero_bubble_is_never_slower_than_1f1b_and_within_five_per_cent_of_the_simulation(p: int, m: int, send: float) -> None:
    times = [1.0] * p, [2.0] * p
    total = closed("zero_bubble", p, 1, m, *times, send)
    assert total <= closed("1f1b", p, 1, m, *times, send)
    assert total == pytest.approx(simulated("zero_bubble", p, 1, m, *times, send), rel=0.05)


@pytest.mark.parametrize("head", [0.6, 3.0])
@pytest.mark.parametrize(("p", "m"), [(2, 2), (4, 16), (8, 8)])
def test_a_zero_bubble_step_takes_as_long_wherever_the_last_rank_has_the_weight_gradient_of_the_head(p: int, m: int, head: float) -> None:
    backward = [*[2.0] * (p - 1), 2.0 + head]
    total = closed("zero_bubble", p, 1, m, [1.0] * p, backward, 0.0)
    for late in (backward[-1] / 2, 1.0):  # of the head's half, or of none of it
        weight = [*[1.0] * (p - 1), late]
        rest = [whole - part for whole, part in zip(backward, weight)]
        times = Times([1.0] * p, backward, rest, weight, [0.0] * p)
        assert makespan(simulate(build("zero_bubble", p, 1, m), times)) == pytest.approx(total)


@FEW
@given(p=RANKS, more=st.integers(0, 9), forward=st.floats(1, 3))
def test_zero_bubble_with_twice_the_micro_batches_in_flight_leaves_the_bubble_of_the_paper(p: int, more: int, forward: float) -> None:
    """Qi et al. 2023, table 2: (p - 1)(F + B - 2 W), B and W being the halves of backward."""
    m, backward = 2 * p - 1 + more, 2.0
    ways = forward, backward
    stages = StageTimes(ways, ways, ways, ways, 0.0)
    one = [np.array([float(x)]) for x in (p, 1, m)]
    found = run(stages, *one, np.array([False]), np.array([True]), further=1.0).total[0]
    assert found == pytest.approx(m * (forward + backward) + (p - 1) * (forward + backward / 2 - backward))


def test_transfers_are_what_they_add() -> None:
    stages = StageTimes((1.0, 2.0), (1.0, 2.0), (1.0, 2.0), (1.0, 2.0), 0.1)
    p, v, m, no = (np.array([x]) for x in (4.0, 1.0, 8.0, False))
    found = run(stages, p, v, m, no, no)
    assert found.total[0] - found.transfers[0] == pytest.approx((8 + 3) * 3.0)
    assert found.transfers[0] > 0


@FEW
@given(layers=st.integers(2, 130), p=st.integers(2, 40), v=st.integers(1, 4), head=st.floats(0.01, 20))
def test_balanced_splits_are_those_that_the_trainer_makes(layers: int, p: int, v: int, head: float) -> None:
    if p * v > layers:
        return
    chunks = by_cost(layers, p * v, head)
    ranks = [sum(chunks[rank::p]) for rank in range(p)]
    first, middle, last = _by_cost(np.array([float(p)]), np.array([float(v)]), layers, head)
    assert (first[0], last[0]) == (ranks[0], ranks[-1])
    assert p == 2 or middle[0] == max(ranks[1:-1])
