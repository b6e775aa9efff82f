"""What measured trials teach: as much as they can, and no more."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest

from launcher.config.uncertainty import Widths
from launcher.cost.parts import HOST, MATRICES, WIDTH_OF_PART
from launcher.cost.uncertainty import (
    CONTENDERS,
    Observation,
    TimeSurrogate,
    Traits,
    fastest,
    fitting,
    most_telling,
    own_variance,
    sizes,
)
from launcher.search.surrogate import Candidates, MemorySurrogate

WIDTHS = Widths(
    *(0.3, 0.2, 0.5, 0.4, 0.3, 0.08, 0.02, 1.2, 0.4),
    chip=0.2, constant=0.2, seen=2.5, memory=0.1, memory_layout=0.06, noise=0.01, transfer=0.04,
)  # fmt: skip


def candidates(count: int = 40, seed: int = 0, capacity: float = 100.0) -> Candidates:
    draw = np.random.default_rng(seed)
    parts = draw.uniform(0.05, 1.0, (count, 4))
    return Candidates(parts, draw.uniform(20, 200, count), draw.uniform(0, 4, (count, 3)), capacity)


def belief_of(some: Candidates, widths: Widths = WIDTHS) -> TimeSurrogate:
    return TimeSurrogate(some.seconds, some.traits, widths)


def observe(belief: TimeSurrogate, some: Candidates, index: int, seconds: float) -> None:
    belief.observe(index, some.parts[index], seconds)


def test_without_trials_the_prediction_is_the_belief() -> None:
    some = candidates()
    believed = belief_of(some).posterior()
    assert np.exp(believed.mean) == pytest.approx(some.seconds) and (believed.spread > WIDTHS.common).all()


def test_one_trial_corrects_the_cluster_for_all() -> None:
    some = candidates()
    belief = belief_of(some)
    before = belief.posterior().spread
    observe(belief, some, 0, 1.5 * some.seconds[0])
    believed = belief.posterior()
    ratios = np.exp(believed.mean) / some.seconds
    assert ratios[0] == pytest.approx(1.5, rel=0.02) and (ratios > 1.2).all() and (ratios < 1.6).all()
    assert believed.spread.max() < before.min()


def test_trials_find_out_which_part_is_predicted_wrong() -> None:
    """The third part really takes 1.6 times as long: after eight trials the untried ones are predicted far better than before."""
    some = dataclasses.replace(candidates(60), features=np.zeros((60, 1)))
    true = some.parts @ np.array([1.0, 1.0, 1.6, 1.0])
    belief = belief_of(some)
    before = np.std(np.log(true) - belief.posterior().mean)
    for index in range(8):
        observe(belief, some, index, true[index])
    after = (np.log(true) - belief.posterior().mean)[8:]
    assert np.std(after) < 0.4 * before and abs(np.mean(after)) < 0.02


def test_similar_layouts_share_what_no_part_explains() -> None:
    parts = np.ones((3, 2))
    some = Candidates(parts, np.ones(3), np.array([[0.0], [0.1], [9.0]]), 1.0)
    belief = belief_of(some)
    for index, seconds in ((2, 2.0), (0, 2.3)):
        observe(belief, some, index, seconds)
    assert belief.posterior().mean[1] > np.log(2.2)


def test_trials_that_agree_say_nothing_of_a_part_that_they_do_not_have() -> None:
    """Three layouts without the second part take just what was predicted: of the second part it is known as little as before."""
    widths = dataclasses.replace(WIDTHS, part=0.1, scale=1.0)
    shares = np.array([[1.0, 0.0]] * 3 + [[0.0, 1.0]])
    belief = TimeSurrogate(np.ones(4), Traits(shares, np.diag([9.0] * 4)), widths)
    rest = dataclasses.replace(belief, widths=dataclasses.replace(widths, part=0.0), seen=[])
    for index in range(3):
        for one in (belief, rest):
            one.observe(index, shares[index], 1.0)
    spread, without = (one.posterior().spread[3] for one in (belief, rest))
    assert without < 0.1 and spread > np.hypot(0.1, 0.9 * without)


def test_a_trial_of_another_trainer_teaches_how_far_mechanisms_hold_and_nothing_else() -> None:
    widths = dataclasses.replace(WIDTHS, scale=0.0)
    some = dataclasses.replace(candidates(4), unit=np.array([0, 0, 1, 1]))
    belief, before = belief_of(some, widths), belief_of(some, widths).posterior()
    observe(belief, some, 0, 2.0 * some.seconds[0])
    after = belief.posterior()
    assert after.mean[2:] == pytest.approx(before.mean[2:]) and after.spread[2:] == pytest.approx(before.spread[2:])
    assert after.mean[1] > before.mean[1] + 0.3 and after.spread[1] < before.spread[1]
    drawn = belief.draws(np.arange(4), 20_000)
    assert abs(np.corrcoef(drawn[:, 1], drawn[:, 2])[0, 1]) < 0.03 < 0.5 < np.corrcoef(drawn[:, 2], drawn[:, 3])[0, 1]


def test_what_the_host_does_is_less_sure_than_what_the_device_computes() -> None:
    """Of a layout that only launches and one that only multiplies, with the widths of each."""
    widths = dataclasses.replace(WIDTHS, part=0.1, host=0.9, common=0.0, layout=0.0, rough=0.0, scale=0.0)
    shares = np.array([[1.0 * (name == chosen) for name in WIDTH_OF_PART] for chosen in (MATRICES, HOST)])
    believed = TimeSurrogate(np.ones(2), Traits(shares, np.zeros((2, 1))), widths).posterior()
    assert believed.spread == pytest.approx([0.1, 0.9])


def test_the_posterior_is_the_textbook_formula() -> None:
    """Of one size of s, scale = 0, where the mixture is one Gaussian process."""
    some, widths = candidates(6), dataclasses.replace(WIDTHS, scale=0.0)
    belief = belief_of(some, widths)
    measured = some.seconds[:2] * np.array([1.2, 0.9])
    for index in range(2):
        observe(belief, some, index, measured[index])
    distance = ((some.features[:, None] - some.features[None]) ** 2).sum(2)
    shares = some.parts / some.seconds[:, None]
    prior = widths.common**2 + widths.part**2 * shares @ shares.T + widths.layout**2 * np.exp(-distance / 2 / widths.reach**2)
    prior += widths.rough**2 * np.eye(6)
    gram = prior[:2, :2] + widths.noise**2 * np.eye(2)
    weights = prior[:, :2] @ np.linalg.inv(gram)
    believed = belief.posterior()
    assert believed.mean == pytest.approx(np.log(some.seconds) + weights @ np.log(measured / some.seconds[:2]))
    assert believed.spread**2 == pytest.approx(np.diag(prior - weights @ prior[:2]))


def test_the_belief_is_a_sum_over_both_sizes_of_errors_weighted_by_what_trials_leave_of_them() -> None:
    """Bayes' rule written out for every pair of sizes, unlikely ones too: that of the common error has a factor of its own."""
    some = candidates(6)
    belief = belief_of(some)
    ratios = np.array([0.6, 0.75, 0.5])
    for index, ratio in enumerate(ratios):
        observe(belief, some, index, some.seconds[index] * np.exp(ratio))
    distance = ((some.features[:, None] - some.features[None]) ** 2).sum(2)
    shares = some.parts / some.seconds[:, None]
    parts = WIDTHS.part**2 * shares @ shares.T
    rest = WIDTHS.layout**2 * np.exp(-distance / 2 / WIDTHS.reach**2) + WIDTHS.rough**2 * np.eye(6)
    nodes, weights = sizes()
    found = []
    for size, one in zip(np.exp(2 * WIDTHS.scale * nodes), weights, strict=True):
        for common, other in zip(np.exp(2 * WIDTHS.scale * nodes), weights, strict=True):
            prior = common * WIDTHS.common**2 + parts + size * rest
            gram = prior[:3, :3] + WIDTHS.noise**2 * np.eye(3)
            likely = one * other * np.exp(-0.5 * ratios @ np.linalg.inv(gram) @ ratios) / np.sqrt(np.linalg.det(gram))
            turn = prior[:, :3] @ np.linalg.inv(gram)
            found.append((likely, turn @ ratios, np.diag(prior - turn @ prior[:3])))
    share = np.array([likely for likely, *_ in found])
    share /= share.sum()
    mean = share @ np.array([each[1] for each in found])
    second = share @ np.array([each[2] + each[1] ** 2 for each in found])
    believed = belief.posterior()
    assert believed.weights.sum() == pytest.approx(1.0)
    assert believed.mean == pytest.approx(np.log(some.seconds) + mean, abs=0.002)
    assert believed.spread == pytest.approx(np.sqrt(second - mean**2), rel=0.01)


def test_trials_that_all_take_twice_as_long_tell_of_the_machine_and_not_of_its_layouts() -> None:
    """The others are believed to take twice as long too, and are hardly less sure than beside trials that are as predicted."""
    some, spreads = candidates(), []
    for factor in (1.0, 2.0):
        belief = belief_of(some, dataclasses.replace(WIDTHS, common=0.06, part=0.07, scale=0.9))
        for index in range(4):
            observe(belief, some, index, factor * some.seconds[index])
        believed = belief.posterior()
        assert np.exp(believed.mean) / some.seconds == pytest.approx(np.full(40, factor), rel=0.05)
        spreads.append(believed.spread[4:].mean())
    assert spreads[1] < 1.3 * spreads[0]


def test_joint_draws_have_the_moments_of_the_posterior() -> None:
    some = candidates(5)
    belief = belief_of(some)
    observe(belief, some, 0, 1.2 * some.seconds[0])
    believed, drawn = belief.posterior(), belief.draws(np.arange(5), 40_000)
    assert drawn.mean(axis=0) == pytest.approx(believed.mean, abs=0.01)
    assert drawn.std(axis=0)[1:] == pytest.approx(believed.spread[1:], rel=0.03)


def test_an_interval_holds_as_much_as_it_says() -> None:
    some = candidates(5)
    believed = belief_of(some).posterior()
    for probability in (0.1, 0.5, 0.9):
        assert believed.below(np.log(believed.quantile(probability))) == pytest.approx(np.full(5, probability), abs=1e-6)
    wide = belief_of(some, dataclasses.replace(WIDTHS, scale=1.0))
    for _ in range(2):  # before a trial, and after it
        believed = wide.posterior()
        for end, probability in zip(believed.interval, (0.1, 0.9), strict=True):
            assert believed.below(np.log(end)) == pytest.approx(np.full(5, probability), abs=1e-6)
        observe(wide, some, 0, 1.3 * some.seconds[0])


def test_what_all_layouts_share_says_nothing_of_which_is_fastest() -> None:
    """A common error that is ten times as large moves all layouts alike."""
    some, fits = candidates(20), np.ones(20)
    wide = fastest(belief_of(some, dataclasses.replace(WIDTHS, common=3.0)), fits)
    assert fastest(belief_of(some), fits) == pytest.approx(wide, abs=0.03) and wide.sum() == pytest.approx(1.0)


def test_layouts_of_one_kind_are_not_independent_hopes() -> None:
    """Ten copies of a slower layout whose error is shared beat the fastest no more often than one of them."""
    parts = np.concatenate([np.ones((1, 2)), np.full((10, 2), 1.05)])
    place = np.concatenate([np.zeros((1, 1)), np.full((10, 1), 9.0)])
    traits = Traits(np.full((11, 2), 0.5), place)
    widths = dataclasses.replace(WIDTHS, part=0.0, rough=0.0)
    many = fastest(TimeSurrogate(parts.sum(axis=1), traits, widths), np.ones(11))
    few = fastest(TimeSurrogate(parts.sum(axis=1)[:2], traits.rows(np.arange(2)), widths), np.ones(2))
    assert many[1:].sum() == pytest.approx(few[1], abs=0.02)


def test_layouts_that_surely_fit_do_not_crowd_out_a_faster_one_that_may() -> None:
    """Ten per cent slower, and sure to fit: however much is unsure of all of them alike, many such are drawn after a faster one that may."""
    count = CONTENDERS + 100
    seconds = np.concatenate([[1.0], np.full(count, 1.1), [0.9]])
    traits = Traits(np.full((len(seconds), 2), 0.5), np.zeros((len(seconds), 1)))
    widths = dataclasses.replace(WIDTHS, common=1.0, layout=0.01, rough=0.001)
    fits = np.append(np.ones(count + 1), 0.2)
    assert fastest(TimeSurrogate(seconds, traits, widths), fits)[-1] == pytest.approx(0.2, abs=0.03)


@pytest.mark.parametrize("runs", [0, 3])
def test_how_far_layouts_are_apart_is_how_far_they_are_drawn_apart(runs: int) -> None:
    some = candidates(12)
    belief = belief_of(some)
    for index in range(runs):
        observe(belief, some, index, 1.2 * some.seconds[index])
    drawn = belief.draws(np.arange(12), 20_000)
    drawn -= drawn[:, 5:6]
    apart = belief.apart(np.arange(12), 5)
    assert apart.mean == pytest.approx(drawn.mean(axis=0), abs=0.02)
    assert apart.spread == pytest.approx(drawn.std(axis=0), rel=0.05, abs=0.001)


def test_layouts_run_out_of_memory_with_their_probability_and_together() -> None:
    drawn = fitting(np.array([0.3, 0.3, 1.0, 0.0]), WIDTHS, 20_000)
    assert drawn.mean(axis=0) == pytest.approx([0.3, 0.3, 1.0, 0.0], abs=0.02)
    assert np.corrcoef(drawn[:, 0], drawn[:, 1])[0, 1] > 0.3


def test_a_noisy_trial_teaches_less() -> None:
    some = candidates()
    quiet, noisy = belief_of(some), belief_of(some)
    quiet.observe(0, some.parts[0], 2 * some.seconds[0])
    noisy.observe(0, some.parts[0], 2 * some.seconds[0], noise=0.5)
    assert noisy.posterior().mean[1] < quiet.posterior().mean[1] and noisy.posterior().spread[1] > quiet.posterior().spread[1]


def test_memory_is_a_probability_that_trials_sharpen() -> None:
    need = np.array([60.0, 95.0, 105.0, 160.0])
    some = Candidates(np.ones((4, 1)), need, np.zeros((4, 1)), 100.0)
    belief = MemorySurrogate(some, WIDTHS)
    start = belief.fits()
    assert (np.diff(start) < 0).all() and start[0] > 0.99 and start[3] < 0.01 and 0.2 < start[2] < 0.5 < start[1] < 0.8
    belief.observe(105.0, ran=True)
    assert (belief.fits()[1:3] > start[1:3] + 0.1).all()
    for _ in range(2):
        belief.observe(95.0, ran=False)
    assert belief.fits()[2] < start[2]


def test_out_of_memory_of_the_smaller_makes_the_larger_hopeless() -> None:
    some = Candidates(np.ones((2, 1)), np.array([97.0, 125.0]), np.zeros((2, 1)), 100.0)
    belief = MemorySurrogate(some, WIDTHS)
    belief.observe(97.0, ran=False)
    assert belief.fits()[1] < 0.02


def test_a_measured_peak_says_most() -> None:
    some = Candidates(np.ones((2, 1)), np.array([120.0, 120.0]), np.zeros((2, 1)), 100.0)
    belief = MemorySurrogate(some, WIDTHS)
    for _ in range(3):
        belief.observe(80.0, ran=True, peak=60.0)
    assert belief.fits()[0] > 0.75


def test_unlimited_memory_always_fits() -> None:
    some = Candidates(np.ones((1, 1)), np.array([1e12]), np.zeros((1, 1)), np.inf)
    assert MemorySurrogate(some, WIDTHS).fits() == pytest.approx(1.0)


def test_trials_unlike_the_model_widen_what_is_believed_of_the_rest() -> None:
    draw = np.random.default_rng(3)
    parts, features = draw.uniform(0.1, 1.0, (6, 2)), np.eye(6) * 10
    known = Candidates(parts, np.ones(6), features, np.inf)
    spreads = []
    for far in (0.02, 0.5):
        belief = belief_of(known)
        for i, sign in enumerate((1, -1, 1, -1)):
            belief.observe(i, parts[i], float(parts[i].sum() * np.exp(sign * far)))
        spreads.append(belief.posterior().spread[5])
    assert spreads[1] > 2 * spreads[0]


@pytest.mark.parametrize("seed", range(4))
def test_the_runs_that_tell_most_leave_least_open_and_as_much_as_is_said(seed: int) -> None:
    """With one size of errors (scale 0), what is said to be left is the posterior's spread; no other first run would leave less."""
    some = candidates(count=12, seed=seed)
    sure = dataclasses.replace(WIDTHS, scale=1e-6)
    chosen, left = most_telling(sure, some.traits, [np.arange(12)] * 3)
    assert len(set(chosen)) == 3 and left == sorted(set(left), reverse=True)

    def spreads(rows: Sequence[int]) -> np.ndarray:
        belief = belief_of(some, sure)
        belief.seen = [Observation(i, some.traits.shares[i], some.traits.place[i], 0.0, sure.noise) for i in rows]
        return belief._node((1.0, 1.0), belief._gram(), belief._cross(np.arange(12)), own_variance(sure, some.traits), np.zeros(len(rows)))[
            1
        ]

    for count in (1, 2, 3):
        assert left[count] == pytest.approx(spreads(chosen[:count]).mean(), rel=1e-3)
    assert (spreads(chosen[:1]) ** 2).sum() == pytest.approx(min((spreads([i]) ** 2).sum() for i in range(12)))


def test_no_run_is_chosen_twice_and_groups_are_kept_to() -> None:
    some = candidates(count=6)
    chosen, left = most_telling(WIDTHS, some.traits, [np.array([1, 2]), np.array([2, 4]), np.array([2, 4]), np.array([2, 4])])
    assert chosen[0] in (1, 2) and {2, 4} <= set(chosen) and len(chosen) == len(set(chosen)) == len(left) - 1
