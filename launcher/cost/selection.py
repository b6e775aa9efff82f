"""How much too fast the prediction is that was picked for being the fastest. Pure numpy.

A predicted time is ``log x_i = log t_i + r_i``, with the true time t_i and the error r_i that layout i shares with no other (the width
``rough``, Gaussian). What layouts share picks none of them. The smallest of many x_i owes its place to its error, too: the expectation of
t over x there is ``exp E[-r]`` of whichever layout is the smallest (the winner's curse; Efron 2011, Tweedie's formula and selection bias,
JASA 106). It depends on how many true times lie how close, which nobody knows; the predicted ones lie further apart than those, by r.

The distribution of the true times is the one under which the predicted ones are likeliest (Kiefer & Wolfowitz 1956, Ann. Math. Stat. 27),
by expectation maximisation over a grid. Its quantiles stand for the true times, errors are drawn for them, and the mean of the error of
the smallest is what is looked for (the parametric bootstrap; Efron & Tibshirani 1993, chapter 6).
"""

from __future__ import annotations

import numpy as np

STEP = 0.2
"""Of the grid, in standard deviations of the error."""
REACH = 16.0
"""Standard deviations above the smallest beyond which no layout has a part in the choice."""
ROUNDS = 100
"""Of expectation maximisation: more follow the noise of the tail."""
DRAWS, RIVALS = 1000, 400
"""Draws of the errors, and how many of the smallest true times they are drawn for."""
SEED = 20260102


def selection_factor(seconds: np.ndarray, spread: float) -> float:
    """Returns the expectation of true over predicted time of the fastest of ``seconds`` (n,), whose own errors have the standard deviation
    ``spread`` of their logarithms: 1 or a little more."""
    if spread <= 0 or len(seconds) < 2:
        return 1.0
    true = true_times(np.log(seconds), spread)[:RIVALS]
    errors = spread * np.random.default_rng(SEED).standard_normal((DRAWS, len(true)))
    picked = errors[np.arange(DRAWS), (true + errors).argmin(axis=1)]
    return float(np.exp(-picked).mean())


def true_times(logs: np.ndarray, spread: float) -> np.ndarray:
    """Returns quantiles (m,) of the distribution of true values, of which ``logs`` (n,) are seen through a Gaussian error; as many as lie
    within reach of the smallest, in order."""
    near = np.sort(logs[logs <= logs.min() + REACH * spread])
    step = STEP * spread
    edges = np.arange(near[0] - step / 2, near[-1] + step, step)
    seen, centres = np.histogram(near, edges)[0] / len(near), (edges[:-1] + edges[1:]) / 2
    grid = np.arange(near[0] - 2 * spread, near[-1] + 2 * spread, step)
    likely = np.exp(-0.5 * ((centres[:, None] - grid) / spread) ** 2)
    weights = np.full(len(grid), 1 / len(grid))
    for _ in range(ROUNDS):
        weights = weights * (likely.T @ (seen / (likely @ weights)))
        weights /= weights.sum()
    return np.interp((np.arange(len(near)) + 0.5) / len(near), np.cumsum(weights) - weights / 2, grid)
