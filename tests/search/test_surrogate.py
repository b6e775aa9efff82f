"""What measured trials teach: as much as they can, and no more."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from launcher.search.surrogate import Candidates, MemorySurrogate, Prior, TimeSurrogate

PRIOR = Prior()


def candidates(count: int = 40, seed: int = 0, capacity: float = 100.0) -> Candidates:
    draw = np.random.default_rng(seed)
    parts = draw.uniform(0.05, 1.0, (count, 4))
    return Candidates(parts, draw.uniform(20, 200, count), draw.uniform(0, 4, (count, 3)), capacity)


def observe(belief: TimeSurrogate, index: int, seconds: float) -> None:
    belief.observe(belief.candidates.parts[index], belief.candidates.features[index], seconds)


def test_without_trials_the_prediction_is_the_belief() -> None:
    some = candidates()
    mean, spread = TimeSurrogate(some, PRIOR).posterior()
    assert np.exp(mean) == pytest.approx(some.seconds) and (spread > PRIOR.cluster).all()


def test_one_trial_corrects_the_cluster_for_all() -> None:
    some = candidates()
    belief = TimeSurrogate(some, PRIOR)
    observe(belief, 0, 1.5 * some.seconds[0])
    mean, spread = belief.posterior()
    ratios = np.exp(mean) / some.seconds
    assert ratios[0] == pytest.approx(1.5, rel=0.02) and (ratios > 1.2).all() and (ratios < 1.6).all()
    assert spread.max() < TimeSurrogate(some, PRIOR).posterior()[1].min()


def test_trials_find_out_which_part_is_predicted_wrong() -> None:
    """The third part really takes 1.6 times as long: after eight trials the untried ones are predicted far better than before."""
    some = dataclasses.replace(candidates(60), features=np.zeros((60, 1)))
    true = some.parts @ np.array([1.0, 1.0, 1.6, 1.0])
    belief = TimeSurrogate(some, PRIOR)
    before = np.std(np.log(true) - belief.posterior()[0])
    for index in range(8):
        observe(belief, index, true[index])
    after = (np.log(true) - belief.posterior()[0])[8:]
    assert np.std(after) < 0.4 * before and abs(np.mean(after)) < 0.02


def test_similar_layouts_share_what_no_part_explains() -> None:
    parts = np.ones((3, 2))
    some = Candidates(parts, np.ones(3), np.array([[0.0], [0.1], [9.0]]), 1.0)
    belief = TimeSurrogate(some, PRIOR)
    for index, seconds in ((2, 2.0), (0, 2.3)):
        observe(belief, index, seconds)
    mean, spread = belief.posterior()
    assert mean[1] > np.log(2.2) and spread[1] < spread[0] * 1.5


def test_the_posterior_is_the_textbook_formula() -> None:
    some = candidates(6)
    belief = TimeSurrogate(some, PRIOR)
    measured = some.seconds[:2] * np.array([1.2, 0.9])
    for index in range(2):
        observe(belief, index, measured[index])
    distance = ((some.features[:, None] - some.features[None]) ** 2).sum(2)
    prior = PRIOR.cluster**2 + PRIOR.part**2 * some.shares @ some.shares.T + PRIOR.layout**2 * np.exp(-distance / 2 / PRIOR.reach**2)
    gram = prior[:2, :2] + PRIOR.noise**2 * np.eye(2)
    weights = prior[:, :2] @ np.linalg.inv(gram)
    mean, spread = belief.posterior()
    ratios = np.log(measured / some.seconds[:2])
    surprise = (PRIOR.trust + ratios @ np.linalg.inv(gram) @ ratios) / (PRIOR.trust + 2)
    assert mean == pytest.approx(np.log(some.seconds) + weights @ ratios)
    assert spread**2 == pytest.approx(np.diag(prior - weights @ prior[:2]) * max(surprise, 1))


def test_a_noisy_trial_teaches_less() -> None:
    some = candidates()
    quiet, noisy = TimeSurrogate(some, PRIOR), TimeSurrogate(some, PRIOR)
    quiet.observe(some.parts[0], some.features[0], 2 * some.seconds[0])
    noisy.observe(some.parts[0], some.features[0], 2 * some.seconds[0], noise=0.5)
    assert noisy.posterior()[0][0] < quiet.posterior()[0][0] and noisy.posterior()[1][0] > quiet.posterior()[1][0]


def test_memory_is_a_probability_that_trials_sharpen() -> None:
    need = np.array([60.0, 95.0, 105.0, 160.0])
    some = Candidates(np.ones((4, 1)), need, np.zeros((4, 1)), 100.0)
    belief = MemorySurrogate(some, PRIOR)
    start = belief.fits()
    assert (np.diff(start) < 0).all() and start[0] > 0.99 and start[3] < 0.01 and 0.2 < start[2] < 0.5 < start[1] < 0.8
    belief.observe(105.0, ran=True)
    assert (belief.fits()[1:3] > start[1:3] + 0.1).all()
    for _ in range(2):
        belief.observe(95.0, ran=False)
    assert belief.fits()[2] < start[2]


def test_out_of_memory_of_the_smaller_makes_the_larger_hopeless() -> None:
    some = Candidates(np.ones((2, 1)), np.array([97.0, 125.0]), np.zeros((2, 1)), 100.0)
    belief = MemorySurrogate(some, PRIOR)
    belief.observe(97.0, ran=False)
    assert belief.fits()[1] < 0.02


def test_a_measured_peak_says_most() -> None:
    some = Candidates(np.ones((2, 1)), np.array([120.0, 120.0]), np.zeros((2, 1)), 100.0)
    belief = MemorySurrogate(some, PRIOR)
    for _ in range(3):
        belief.observe(80.0, ran=True, peak=60.0)
    assert belief.fits()[0] > 0.75


def test_unlimited_memory_always_fits() -> None:
    some = Candidates(np.ones((1, 1)), np.array([1e12]), np.zeros((1, 1)), np.inf)
    assert MemorySurrogate(some, PRIOR).fits() == pytest.approx(1.0)


def test_trials_unlike_the_model_widen_what_is_believed_of_the_rest() -> None:
    draw = np.random.default_rng(3)
    parts, features = draw.uniform(0.1, 1.0, (6, 2)), np.eye(6) * 10
    known = Candidates(parts, np.ones(6), features, np.inf)
    spreads = []
    for far in (0.1, 2.0):
        belief = TimeSurrogate(known, Prior())
        for i, sign in enumerate((1, -1, 1, -1)):
            belief.observe(parts[i], features[i], float(parts[i].sum() * np.exp(sign * far)))
        spreads.append(belief.posterior()[1][5])
    assert spreads[1] > 3 * spreads[0]
