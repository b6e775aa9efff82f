"""Arms on planted curves with known truth: who wins, when that cannot be told, and how often a winner is wrong."""

from __future__ import annotations

import math

import numpy as np
import pytest

from launcher.search.arms import Evidence, LogMean, Reach, StepTimes, crossing

DRAWS = 200
EXACT = 0.0


def times(arms: int, spread: float = EXACT, shared: float = EXACT) -> StepTimes:
    """Equal step times, known to ``spread``, and to ``shared`` that all arms have."""
    return StepTimes(np.zeros(arms), spread**2 * np.eye(arms) + shared**2)


def planted(
    random: np.random.Generator, needed: list[float], seeds: int, common: float = 0.03, own: float = 0.01
) -> list[dict[int, Reach | None]]:
    """Runs whose loss falls as a power of the steps and has the target after ``needed`` steps, but for what a seed shifts: each arm alike,
    and each on its own. Validated every 20 steps, with noise of the loss."""
    runs: list[dict[int, Reach | None]] = [{} for _ in needed]
    steps = np.arange(20, 1000, 20)
    for seed in range(seeds):
        both = random.normal(0, common)
        for arm, least in enumerate(needed):
            losses = 3.0 + 0.3 * (math.log(least) + both + random.normal(0, own) - np.log(steps)) + random.normal(0, 5e-4, len(steps))
            found = crossing(list(zip(steps.tolist(), losses.tolist(), strict=True)), 3.0)
            runs[arm][seed] = Reach(1000, True) if found is None else Reach(found)
    return runs


def looked_at(runs: list[dict[int, Reach | None]], seeds: int, step_times: StepTimes | None = None) -> Evidence:
    return Evidence(runs, step_times or times(len(runs)), seeds)


@pytest.mark.parametrize("needed", [[400.0, 420.0], [440.0, 400.0, 520.0], [300.0, 420.0, 330.0, 310.0]])
def test_the_right_arm_wins_on_planted_curves(needed: list[float]) -> None:
    """Differences of 3 to 10 %, where each run is off by 1 %."""
    random, best = np.random.default_rng(1), int(np.argmin(needed))
    found = [looked_at(planted(random, needed, 8), 8).winner for _ in range(DRAWS)]
    assert sum(winner not in (best, None) for winner in found) <= 0.05 * DRAWS
    assert sum(winner == best for winner in found) >= 0.95 * DRAWS


@pytest.mark.parametrize(("arms", "seeds"), [(2, 3), (2, 5), (4, 5)])
def test_a_tie_cannot_be_told(arms: int, seeds: int) -> None:
    """False winners, by whichever look, are at most one in twenty: 17 of 200 would be one in a thousand draws of such a rate."""
    random = np.random.default_rng(2)
    found = [looked_at(planted(random, [400.0] * arms, seeds), seeds) for _ in range(DRAWS)]
    assert sum(one.winner is not None for one in found) <= 17
    assert all(one.rivals for one in found if one.winner is None)


def test_a_small_difference_is_told_rightly_or_not_at_all() -> None:
    """Of 1 %, with as much noise."""
    random = np.random.default_rng(8)
    found = [looked_at(planted(random, [400.0, 404.0, 408.0], 5), 5).winner for _ in range(DRAWS)]
    assert sum(winner in (1, 2) for winner in found) <= 0.05 * DRAWS and None in found


def test_a_tie_in_time_whose_steps_differ_cannot_be_told() -> None:
    """The arm with fewer steps takes longer for each; what is not known of step times widens the interval."""
    random, step_times = np.random.default_rng(3), StepTimes(np.log([1.0, 1.25]), np.zeros((2, 2)))
    found = [looked_at(planted(random, [500.0, 400.0], 5), 5, step_times).winner for _ in range(DRAWS)]
    assert sum(winner is not None for winner in found) <= 17
    runs = planted(random, [400.0, 480.0], 8)
    assert looked_at(runs, 8).winner == 0
    assert looked_at(runs, 8, times(2, shared=0.5)).winner == 0, "an error that all arms share makes no difference"
    unsure = looked_at(runs, 8, times(2, spread=0.2))
    assert unsure.winner is None and unsure.seeds_wanted is None, "no number of seeds makes step times known"


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    """With what seeds scatter, and with what step times are off, of either size."""
    random = np.random.default_rng(4)
    for scatter, fixed in ((0.1, 0.0), (0.1, 0.05), (0.02, 0.1)):
        outside = 0
        for _ in range(2000):
            logs = random.normal(0, scatter, 5) + random.normal(0, fixed)
            low, high = LogMean(float(logs.mean()), float(logs.std(ddof=1)), 5, fixed**2).bounds(0.025)
            outside += not low < 0 < high
        assert outside / 2000 < 0.065


def test_arms_are_compared_seed_by_seed() -> None:
    """Seeds that shift all arms alike by 20 % do not hide a difference of 5 %."""
    random = np.random.default_rng(5)
    runs = planted(random, [400.0, 420.0], 5, common=0.2, own=0.002)
    assert looked_at(runs, 5).winner == 0
    shuffled = [runs[0], {seed: runs[1][(seed + 1) % 5] for seed in range(5)}]
    assert looked_at(shuffled, 5).winner is None


def test_an_arm_is_dropped_only_by_whole_rounds_that_surely_tell() -> None:
    random = np.random.default_rng(6)
    runs = planted(random, [200.0, 600.0, 210.0], 5)
    first = [{seed: arm[seed] for seed in range(3)} for arm in runs]
    assert looked_at(first, 5).dropped == {1: 3} and not looked_at(first, 5).complete
    assert looked_at([first[0], first[1], {seed: first[2][seed] for seed in range(2)}], 5).dropped == {}
    all_but_dropped = [runs[0], first[1], runs[2]]
    assert looked_at(all_but_dropped, 5).complete and looked_at(all_but_dropped, 5).winner == 0
    assert looked_at(first, 3).dropped == {}, "the last look is none before it"


def test_a_run_that_misses_counts_as_slow_and_never_as_fast() -> None:
    reached = {seed: Reach(400.0 + seed) for seed in range(5)}
    missed: dict[int, Reach | None] = {seed: Reach(600.0, missed=True) for seed in range(5)}
    assert looked_at([reached, missed], 5).winner == 0
    short: dict[int, Reach | None] = {seed: Reach(100.0, missed=True) for seed in range(5)}
    one = looked_at([reached, short], 5)
    assert one.winner is None and one.leader == 0, "runs that were too short to reach it say nothing"
    once = looked_at([{**reached, 0: Reach(500.0, missed=True)}, {seed: Reach(900.0 + seed) for seed in range(5)}], 5)
    assert once.winner is None
    assert looked_at([missed, short], 5).leader is None


def test_failed_runs_leave_their_pairs_out() -> None:
    runs: list[dict[int, Reach | None]] = [{0: Reach(400.0), 1: None, 2: Reach(410.0)}, {0: Reach(500.0), 1: Reach(1.0), 2: Reach(513.0)}]
    lead = looked_at(runs, 3).lead(1, 0)
    assert lead is not None and lead.seeds == 2 and lead.mean == pytest.approx(math.log(1.25), abs=1e-2)
    assert looked_at([{0: None}, {0: None}], 1).winner is None


def test_the_number_of_seeds_that_would_tell_does() -> None:
    """Of arms that differ by 2 % of the steps, as often as it says."""
    lead = LogMean(math.log(1.02), 0.03, 5)
    seeds = lead.seeds_to_tell(0.025)
    assert seeds is not None and seeds > 10
    random, told = np.random.default_rng(7), 0
    for _ in range(400):
        logs = random.normal(lead.mean, lead.scatter, seeds)
        told += LogMean(float(logs.mean()), float(logs.std(ddof=1)), seeds).bounds(0.025)[0] > 0
    assert 0.7 < told / 400 < 0.9


@pytest.mark.parametrize(
    ("losses", "steps"),
    [
        ([4, 3.5, 2.5, 2.4, 2.3], 25.0),  # half-way between the second and the third
        ([4, 2.9, 3.1, 2.9, 2.8, 2.7], 35.0),  # below once is not reached
        ([4, 3.5, 2.9, 2.8], None),  # two of the last are not three
        ([3.0, 2.9, 2.8], 10.0),  # before the first validation nobody looked
        ([math.nan, 2.5, 2.4, 2.3], 20.0),
        ([math.inf, 2.5, 2.4, 2.3], 20.0),
        ([2.5, 2.4, math.nan], None),
        ([], None),
    ],
)
def test_the_loss_is_reached_at_the_first_of_three_validations_below_it(losses: list[float], steps: float | None) -> None:
    assert crossing([(10 * (i + 1), loss) for i, loss in enumerate(losses)], 3.0) == (steps and pytest.approx(steps))
