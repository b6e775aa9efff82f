"""The policy finds the planted fastest layout with few trials, whatever fails, and stops when it should."""

from __future__ import annotations

import dataclasses
import math
from functools import cache

import numpy as np
import pytest

from launcher.config.search import SearchConfig
from launcher.search.policy import Policy, ScaledDownPlan, SearchTrial, Stop, TrialCost, TrialObservation
from launcher.search.steps import cannot_win
from launcher.search.surrogate import Candidates
from trainer.shared.records.outcome import Reason

pytestmark = pytest.mark.slow

SETTINGS = SearchConfig()


class Planted:
    """A cluster whose truth is known: step time = parts x hidden corrections x noise, memory = need x a hidden factor."""

    def __init__(self, seed: int, count: int = 200, layout_noise: float = 0.03, memory_factor: float = 1.0):
        draw = np.random.default_rng(seed)
        parts = np.exp(draw.normal(0, 0.5, (count, 4))) * np.array([1.0, 0.3, 0.2, 0.1])
        need = draw.uniform(30, 130, count)
        self.candidates = Candidates(parts, need, draw.uniform(0, 5, (count, 4)), 100.0)
        corrections = np.exp(draw.normal(0, 0.2, 4)) * 1.2
        self.seconds = parts @ corrections * np.exp(draw.normal(0, layout_noise, count))
        self.fits = need * memory_factor * np.exp(draw.normal(0, 0.04, count)) <= 100.0
        self.best = float(self.seconds[self.fits].min(initial=math.inf))

    def measure(self, trial: SearchTrial) -> TrialObservation:
        if not self.fits[trial.index]:
            return TrialObservation(reason=Reason.OUT_OF_MEMORY, gpu_hours=0.1)
        return TrialObservation(float(self.seconds[trial.index]), gpu_hours=1.0)


def search(
    planted: Planted, settings: SearchConfig = SETTINGS, measure: object = None, policy: Policy | None = None
) -> tuple[Policy, Stop]:
    policy = policy or Policy(planted.candidates, settings)
    while not isinstance(proposed := policy.ask(), Stop):
        (trial,) = proposed
        policy.tell(trial, (measure or planted.measure)(trial))  # type: ignore[operator]
    return policy, proposed


@pytest.mark.parametrize("count", [5, pytest.param(60, marks=pytest.mark.campaign("words"))])
def test_the_planted_best_is_found_with_a_small_part_of_the_trials(count: int) -> None:
    behind, trials = [], []
    for seed in range(count):
        planted = Planted(seed)
        policy, stop = search(planted)
        behind.append(policy.best_seconds() / planted.best - 1)  # type: ignore[operator]
        trials.append(policy.trials)
        assert "no untried layout is likely to be faster by 2 %" in stop.reason
    assert np.mean(behind) < 0.01 and np.mean([b <= 0.02 for b in behind]) >= 0.85
    assert np.mean(trials) < 0.08 * 200


@pytest.mark.parametrize("memory_factor", [0.85, 1.15])
@pytest.mark.parametrize("count", [2, pytest.param(30, marks=pytest.mark.campaign("words"))])
def test_a_memory_model_that_is_off_costs_few_trials(memory_factor: float, count: int) -> None:
    behind, trials = [], []
    for seed in range(count):
        planted = Planted(seed, memory_factor=memory_factor)
        policy, _ = search(planted)
        behind.append(policy.best_seconds() / planted.best - 1)  # type: ignore[operator]
        trials.append(policy.trials)
    assert np.mean(behind) < 0.02 and np.mean(trials) < 0.12 * 200


def test_a_borderline_layout_that_would_win_is_tried() -> None:
    """The fastest by far is predicted at 104 % of the memory: a hard limit would lose it."""
    parts = np.array([[1.0], [1.5], [1.6], [1.7]])
    some = Candidates(parts, np.array([104.0, 50.0, 50.0, 50.0]), np.arange(4.0)[:, None], 100.0)
    truth = {0: 1.0, 1: 1.5, 2: 1.6, 3: 1.7}
    policy = Policy(some, SETTINGS)
    while not isinstance(proposed := policy.ask(), Stop):
        policy.tell(proposed[0], TrialObservation(truth[proposed[0].index]))
    assert policy.ranking()[0] == 0 and policy.trials <= 2


@pytest.mark.parametrize("need, runs, tried", [(50.0, True, False), (50.0, False, True), (95.0, True, True)])
def test_a_layout_that_recomputes_is_tried_only_where_the_same_without_may_not_fit_or_did_not_run(
    need: float, runs: bool, tried: bool
) -> None:
    parts = np.array([[1.0], [1.001], [1.2]])  # the second one recomputes what the first one keeps; a third one is slower
    some = Candidates(parts, np.array([need, 40.0, 40.0]), np.arange(3.0)[:, None], 100.0, np.array([-1, 0, -1]))
    policy = Policy(some, dataclasses.replace(SETTINGS, doubt=1e-6))
    while not isinstance(proposed := policy.ask(), Stop):
        index = proposed[0].index
        policy.tell(proposed[0], TrialObservation(parts[index, 0]) if index or runs else TrialObservation(reason=Reason.ERROR))
    assert (1 in policy.tried) is tried


def test_failed_and_missing_trials_do_not_hide_the_best_nor_enter_the_ranking() -> None:
    planted = Planted(4)
    broken = {i for i in range(200) if i % 3 == 0 and planted.seconds[i] > planted.best}

    def measure(trial: SearchTrial) -> TrialObservation:
        return TrialObservation(reason=Reason.COMMUNICATION, gpu_hours=0.1) if trial.index in broken else planted.measure(trial)

    policy, _ = search(planted, measure=measure)
    left = [planted.seconds[i] for i in range(200) if planted.fits[i] and i not in broken]
    assert policy.best_seconds() <= 1.02 * min(left)  # type: ignore[operator]
    ranking = policy.ranking()
    assert not set(ranking) & broken and [planted.seconds[i] for i in ranking] == sorted(planted.seconds[i] for i in ranking)


def test_a_fault_of_the_place_teaches_nothing_about_memory() -> None:
    planted = Planted(1)
    policy = Policy(planted.candidates, SETTINGS)
    before = policy.memory.fits()
    trial = policy.ask()[0]  # type: ignore[index]
    policy.tell(trial, TrialObservation(reason=Reason.NODE))
    assert policy.memory.fits() == pytest.approx(before) and trial.index in policy.tried


def test_no_trial_is_proposed_twice_and_the_same_measurements_give_the_same_trials() -> None:
    planted = Planted(2)
    runs = []
    for _ in range(2):
        asked: list[int] = []

        def measure(trial: SearchTrial, asked: list[int] = asked) -> TrialObservation:
            asked.append(trial.index)
            return planted.measure(trial)

        search(planted, dataclasses.replace(SETTINGS, doubt=0.001), measure)
        runs.append(asked)
    assert runs[0] == runs[1] and len(set(runs[0])) == len(runs[0]) > 3


def test_more_doubt_means_more_trials() -> None:
    planted = Planted(3)
    counts = [search(planted, dataclasses.replace(SETTINGS, doubt=doubt))[0].trials for doubt in (0.5, 0.1, 0.001)]
    assert counts == sorted(counts) and counts[0] < counts[-1]


def test_trials_side_by_side_are_no_more_than_the_limit() -> None:
    planted, done = Planted(5), 0
    policy = Policy(planted.candidates, dataclasses.replace(SETTINGS, doubt=1e-9, max_trials=5))
    while not isinstance(proposed := policy.ask(3), Stop):
        done += len(proposed)
        for trial in proposed:
            policy.tell(trial, planted.measure(trial))
    assert done == policy.trials == 5


@pytest.mark.parametrize("limit, value, trials", [("max_trials", 3, 3), ("max_gpu_hours", 2.0, 2), ("max_hours", 0.5, 2)])
def test_limits_end_the_search_and_are_named(limit: str, value: float, trials: int) -> None:
    planted = Planted(5, memory_factor=0.1)
    settings = dataclasses.replace(SETTINGS, doubt=1e-9, **{limit: value})

    def measure(trial: SearchTrial) -> TrialObservation:
        return dataclasses.replace(planted.measure(trial), hours=0.25)

    policy, stop = search(planted, settings, measure)
    assert policy.trials == trials and stop.reason == f"search.{limit}={value:g} is reached"


def test_nothing_fits_is_said() -> None:
    some = Candidates(np.ones((3, 1)), np.full(3, 300.0), np.zeros((3, 1)), 100.0)
    assert Policy(some, SETTINGS).ask() == Stop("no layout is likely to fit into memory")


def test_when_everything_runs_out_of_memory_the_search_ends() -> None:
    planted = Planted(6, memory_factor=50.0)
    policy, stop = search(planted)
    assert stop.reason == "no layout that may fit is left" and policy.ranking() == [] and policy.trials < 60


def test_several_trials_at_once_are_different_and_lead_to_the_same_best() -> None:
    planted = Planted(7)
    policy = Policy(planted.candidates, SETTINGS)
    while not isinstance(proposed := policy.ask(4), Stop):
        assert len({trial.index for trial in proposed}) == len(proposed) <= 4
        for trial in proposed:
            policy.tell(trial, planted.measure(trial))
    assert policy.best_seconds() <= 1.03 * planted.best  # type: ignore[operator]


class TestOnFewerNodes:
    """Trials of half the size, whose times are 0.9 of the full ones, but for one layout that does not scale."""

    planted = Planted(8, count=60, memory_factor=0.1)
    small = ScaledDownPlan(planted.candidates.parts * 0.9, planted.candidates.memory)

    def measure(self, trial: SearchTrial) -> TrialObservation:
        seconds = float(self.planted.seconds[trial.index])
        return TrialObservation(seconds if trial.full else 0.9 * seconds, gpu_hours=2.0 if trial.full else 1.0)

    def test_the_best_are_measured_again_at_full_size_and_only_they(self) -> None:
        """And each of them only when it is settled that nothing untried is better."""
        full: list[int] = []
        policy = Policy(self.planted.candidates, SETTINGS, self.small)

        def measure(trial: SearchTrial) -> TrialObservation:
            if trial.full:
                full.append(trial.index)
                fits = policy.memory.fits()
                assert policy.doubt(policy.chances(policy.time.posterior(), fits), fits) < SETTINGS.doubt
            return self.measure(trial)

        search(self.planted, SETTINGS, measure, policy)
        assert len(full) == SETTINGS.verify and set(full) == set(policy.ranking()[: SETTINGS.verify])
        assert policy.best_seconds() == pytest.approx(self.planted.best, rel=0.03)

    def test_small_trials_are_scaled_by_what_the_model_predicts(self) -> None:
        policy = Policy(self.planted.candidates, SETTINGS, self.small)
        trial = policy.ask()[0]  # type: ignore[index]
        policy.tell(trial, self.measure(trial))
        assert policy.seconds_of(trial.index) == pytest.approx(self.planted.seconds[trial.index])

    def test_a_leader_that_does_not_scale_is_found_out(self) -> None:
        fastest = int(self.planted.seconds.argmin())

        def measure(trial: SearchTrial) -> TrialObservation:
            measured = self.measure(trial)
            return dataclasses.replace(measured, seconds=2 * measured.seconds) if trial.full and trial.index == fastest else measured

        policy, _ = search(self.planted, SETTINGS, measure, Policy(self.planted.candidates, SETTINGS, self.small))
        winner = policy.ranking()[0]
        assert winner != fastest and winner in policy.verified
        assert policy.seconds_of(winner) == min(policy.verified.values())


def test_the_cut_is_the_best_time_in_the_trials_own_scale() -> None:
    planted = Planted(9, memory_factor=0.1)
    policy = Policy(planted.candidates, SETTINGS, ScaledDownPlan(planted.candidates.parts * 0.5, planted.candidates.memory))
    first = policy.ask()[0]  # type: ignore[index]
    assert first.prune_above_s is None
    policy.tell(first, TrialObservation(1.0))
    second = policy.ask()
    assert not isinstance(second, Stop) and second[0].prune_above_s == pytest.approx(1.0 * 1.02)


@pytest.mark.parametrize(
    "steps, cut, hopeless",
    [
        ([1.2, 1.3, 1.25], 1.0, True),
        ([1.2, 0.99, 1.3], 1.0, False),  # its fastest step would win
        ([1.2, 1.3], 1.0, False),  # too few
        ([1.0001, 1.001, 1.002], 1.0, False),  # a tie
        ([5.0, 5.0, 5.0], None, False),  # nothing to beat
        ([], 1.0, False),
    ],
)
def test_a_trial_is_given_up_only_when_its_steps_show_that_it_cannot_win(steps: list[float], cut: float | None, hopeless: bool) -> None:
    assert cannot_win(steps, cut) is hopeless


@pytest.mark.parametrize(
    "steps, warm, scatter, hopeless",
    [
        ([1.2], [1.3], 0.01, True),
        ([1.2], [], 0.01, True),
        ([1.2], [1.3], None, False),  # nobody knows how much a step scatters
        ([1.2], [1.3], 0.1, False),  # it may have been chance
        ([1.2], [1.0], 0.01, False),  # its step before was as fast as the best
        ([1.2, 1.0], [1.3], 0.01, False),
        ([1.005], [1.005], 0.0, False),  # a tie
        ([], [1.3], 0.01, False),
    ],
)
def test_one_step_ends_a_trial_that_is_slower_by_more_than_steps_scatter(
    steps: list[float], warm: list[float], scatter: float | None, hopeless: bool
) -> None:
    assert cannot_win(steps, 1.0, scatter, warm) is hopeless


@pytest.mark.parametrize("first", [1, 3])
@pytest.mark.parametrize("count", [3, pytest.param(30, marks=pytest.mark.campaign("words"))])
def test_giving_up_hopeless_trials_does_not_change_the_winner(first: int, count: int) -> None:
    """Steps scatter by 2 %; a trial given up is known by its first step, or its first three, only."""
    draw = np.random.default_rng(0)
    for seed in range(count):
        planted = Planted(seed, count=80)

        def measure(trial: SearchTrial, planted: Planted = planted) -> TrialObservation:
            whole = planted.measure(trial)
            if not whole.ran:
                return whole
            steps = list(whole.seconds * np.exp(draw.normal(0, 0.02, 10)))
            given_up = cannot_win(steps[:first], trial.prune_above_s, 0.02, warm=whole.seconds * np.exp(draw.normal(0, 0.02, 1)))
            return TrialObservation(
                float(np.median(steps[:first] if given_up else steps)), noise=0.02 / math.sqrt(first) if given_up else 0.01
            )

        policy, _ = search(planted, measure=measure)
        assert planted.seconds[policy.ranking()[0]] <= 1.06 * planted.best
        assert math.isfinite(policy.seconds_of(policy.ranking()[0]))


def test_of_two_equal_hopes_the_one_whose_failure_is_cheap_is_tried_first() -> None:
    """Both would win as much in expectation; one is surer, the other ends in its first step if it does not fit."""
    parts = np.array([[1.0], [0.9], [0.88]])
    some = Candidates(parts, np.array([50.0, 50.0, 104.0]), np.zeros((3, 1)), 100.0)
    dear, cheap = np.ones(3), np.full(3, 0.01)
    asked = []
    for failed in (dear, cheap):
        policy = Policy(some, SETTINGS, price=TrialCost(np.ones(3), failed))
        policy.tell(SearchTrial(0, False, None), TrialObservation(1.0))
        asked.append(policy.ask()[0].index)  # type: ignore[index]
    assert asked == [1, 2]


class TestNoisyMeasurements:
    """Once the runner-up's first trial is lucky: 4 % faster than the fastest layout."""

    planted = Planted(12, memory_factor=0.1)

    @classmethod
    @cache
    def exact(cls) -> list[int]:
        """The order without noise."""
        return search(cls.planted, SETTINGS)[0].ranking()

    def lucky(self, noise: float) -> tuple[Policy, list[SearchTrial], int, int]:
        fastest, second = self.exact()[:2]
        asked: list[SearchTrial] = []

        def measure(trial: SearchTrial) -> TrialObservation:
            asked.append(trial)
            seconds = float(self.planted.seconds[trial.index])
            if trial.index == second and not trial.repeats:
                seconds = 0.96 * float(self.planted.seconds[fastest])
            return TrialObservation(seconds, noise=noise)

        policy, _ = search(self.planted, SETTINGS, measure)
        return policy, asked, fastest, second

    def test_those_that_noise_leaves_open_are_measured_once_more_and_the_mean_decides(self) -> None:
        policy, asked, fastest, second = self.lucky(0.05)
        assert {trial.index for trial in asked if trial.repeats} == {fastest, second}
        assert [trial.repeats for trial in asked].count(1) == 2 and all(trial.prune_above_s is None for trial in asked if trial.repeats)
        both = [0.96 * self.planted.seconds[fastest], self.planted.seconds[second]]
        assert policy.seconds_of(second) == pytest.approx(np.sqrt(np.prod(both)))

    @pytest.mark.parametrize("noise", [0.0, 0.002])
    def test_what_is_known_exactly_enough_is_measured_once(self, noise: float) -> None:
        _, asked, _, _ = self.lucky(noise)
        assert not any(trial.repeats for trial in asked)

    def test_a_repetition_that_fails_leaves_what_was_known(self) -> None:
        policy, _, fastest, _ = self.lucky(0.05)
        known = policy.seconds_of(fastest)
        policy.tell(SearchTrial(fastest, True, None, 1), TrialObservation(reason=Reason.ERROR))
        assert policy.seconds_of(fastest) == known


def test_the_grid_starts_as_its_measured_trials_did() -> None:
    """What was spent is measured, so what it is compared with is no assumption either."""
    planted = Planted(0)
    policy = Policy(planted.candidates, dataclasses.replace(SETTINGS, start_s=60.0))
    assert policy.grid_gpu_hours(0, 2) == pytest.approx(200 * 60 * 2 / 3600)
    for start, index in ((1.0, 0), (math.nan, 1), (3.0, 2), (2.0, 3)):
        policy.tell(SearchTrial(index, True, None), TrialObservation(1.0, start_s=start))
    assert policy.grid_gpu_hours(0, 2) == pytest.approx(200 * 2 * 2 / 3600)
