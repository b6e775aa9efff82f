"""How the constants of inference were got, and how well they do on models that they were not fitted to.

    python -m benchmarks.fit_inference TABLE.csv ...              constants that a refit would choose, and what it gains
    python -m benchmarks.fit_inference TABLE.csv ... --leave-out  for each model: the error with constants fitted to all other models;
                                                                  for each constant: how far it moves then (spread in conf/inference.yaml)

The tables are canonical ones of inference, as ``trireme validate`` reads them. A fit starts from the defaults of conf/inference.yaml (what
is known without any table) and is held near them; all models weigh the same, and rows far off count linearly (Huber). A row of served load
is judged by the time per token; a fit has the time of its whole requests beside it, half of its weight each: which part of the prompts is
waited for before the first token and which after it is the load generator's, but all of them are waited for.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from benchmarks.console import answered
from launcher.config.constants import constant_entries
from launcher.config.hardware import hardware_files
from launcher.cost.inference import InferenceCase, InferenceEstimate
from launcher.tables.canonical import MeasuredRun
from launcher.tables.inference import cases, estimated, measured_seconds, predicted_seconds, read, weighted_median

ENTRIES = constant_entries("inference")
NAMES = tuple(name for name, entry in ENTRIES.items() if entry["kind"] == "fitted")
LARGEST = {"weights_bandwidth": 0.95, "kv_bandwidth": 0.95, "flash": 0.75, "staggered": 1.0, "matrix": 1.15}
"""Shares that cannot be larger; the best measured products are 10-16 % faster than those of training."""
HUBER, NOISE, PRIOR, ROWS_OF_A_MODEL, STEP, STEPS, FIRM = 0.08, 0.05, 0.5, 9, 0.02, 8, 1e9
"""Where an error begins to count linearly; a row's and a default's standard error, in logarithms; rows that a model counts as;
the fit's difference and its steps."""

Values = dict[str, float]


@dataclass(frozen=True)
class RequestFit:
    """Measured rows as few cases, with their models."""

    cases: list[tuple[InferenceCase, list[int]]]
    rows: list[MeasuredRun]
    measured: np.ndarray

    @classmethod
    def of(cls, paths: Sequence[str]) -> RequestFit:
        rows = [row for path in paths for row in read(path) if measured_seconds(row)]
        known, reasons = cases(rows, hardware_files())
        left = [row for i, row in enumerate(rows) if i not in reasons]
        known, _ = cases(left, hardware_files())
        return cls(known, left, np.array([measured_seconds(row) for row in left]))

    @property
    def models(self) -> list[str]:
        return [row["model"] for row in self.rows]

    @cached_property
    def whole_seconds(self) -> np.ndarray:
        """Measured seconds of the whole requests of rows of served load, (rows,); nan where a row does not tell, or where requests wait for
        memory, which no fitted constant is about."""
        found = np.array([_whole(row) for row in self.rows]) / 1e3
        for case, members in self.cases:
            made = estimated(case, [self.rows[i] for i in members])
            found[members] = np.where(made.running < made.arriving, np.nan, found[members])
        return found

    def errors(self, values: Values) -> np.ndarray:
        """Logarithm of predicted / measured of each row."""
        return np.log(self._predicted(values, lambda made, row: predicted_seconds(row, made)) / self.measured)

    def observed(self, values: Values) -> np.ndarray:
        """That of what a fit is held to: what each row is judged by, and then its whole requests (2 rows,), 0 where they are not known."""
        told = self.whole_seconds
        whole = np.log(self._predicted(values, lambda made, _: made.latency) / told)
        return np.concatenate([self.errors(values), np.where(np.isnan(told), 0.0, whole)])

    def shares(self, without: Sequence[str]) -> np.ndarray:
        """What each of ``observed`` weighs in a fit to all models but ``without``."""
        counts, told = Counter(self.models), ~np.isnan(self.whole_seconds)
        shares = np.array([0.0 if m in without else min(1.0, ROWS_OF_A_MODEL / counts[m]) for m in self.models])
        return np.concatenate([shares * np.where(told, 0.5, 1.0), shares * np.where(told, 0.5, 0.0)])

    def _predicted(self, values: Values, what: Callable[[InferenceEstimate, MeasuredRun], np.ndarray]) -> np.ndarray:
        out = np.empty(len(self.rows))
        for case, members in self.cases:
            made = estimated(replace(case, constants=case.constants.on(values)), [self.rows[i] for i in members])
            out[members] = what(made, self.rows[members[0]])
        return out


def _whole(row: MeasuredRun) -> float:
    """Milliseconds of a request of served load."""
    if row["mode"] == "static" or row["ttft_ms"] is None or row["tpot_ms"] is None:
        return np.nan
    return float(row["ttft_ms"] + (row["output"] - 1) * row["tpot_ms"])


def slopes(problem: RequestFit, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each observation's error with the constants at ``at`` (logarithms over the defaults), and its change with each of them."""
    base = problem.observed(_values(at))
    moved = [problem.observed(_values(at + STEP * np.eye(len(NAMES))[i])) - base for i in range(len(NAMES))]
    return base, np.stack(moved, axis=1) / STEP


def _values(moves: np.ndarray) -> Values:
    return {name: ENTRIES[name]["default"] * float(np.exp(move)) for name, move in zip(NAMES, moves)}


def solve(problem: RequestFit, without: Sequence[str] = (), near: Values | None = None) -> Values:
    """The constants of the least weighted error over all models but ``without``: Gauss-Newton steps, from ``near`` a single one."""
    shares, upper = problem.shares(without), np.array([_largest(name) for name in NAMES])
    at = np.zeros(len(NAMES)) if near is None else np.log([near[name] / ENTRIES[name]["default"] for name in NAMES])
    for _ in range(STEPS if near is None else 1):
        base, change = slopes(problem, at)
        target = at
        for _ in range(20):
            left = base + change @ (target - at)
            weights = shares * np.minimum(1.0, HUBER / np.maximum(np.abs(left), 1e-9)) / NOISE**2
            normal = change.T @ (weights[:, None] * change) + np.eye(len(NAMES)) / PRIOR**2
            wanted = change.T @ (weights * (change @ at - base))
            free = np.linalg.solve(normal, wanted)
            held = np.diag(np.where(free > upper, FIRM, 0.0))  # what would pass its bound stays there, and the others are solved again
            target = np.minimum(np.linalg.solve(normal + held, wanted + held @ np.minimum(upper, 9.0)), upper)
        at = at + np.clip(target - at, -0.5, 0.5)
    return _values(at)


def _largest(name: str) -> float:
    return float(np.log(LARGEST[name] / ENTRIES[name]["default"])) if name in LARGEST else 2.0


def median_error(errors: np.ndarray, models: Sequence[str]) -> float:
    """Median of |predicted / measured - 1|, every model with the same weight."""
    return weighted_median(np.abs(np.expm1(errors)).tolist(), models)


def without_each(problem: RequestFit) -> dict[str, Values]:
    """The constants fitted to all models but one, by that model; from the fit to all on."""
    near = solve(problem)
    return {model: solve(problem, [model], near) for model in dict.fromkeys(problem.models)}


def left_out(problem: RequestFit, fits: dict[str, Values], only: Sequence[str] = ()) -> dict[str, float]:
    """Median error of each model, or of those of ``only``, with the constants fitted to all others; under ``all`` that of these, weighing
    the same."""
    unseen, models = np.empty(len(problem.rows)), np.array(problem.models)
    for model, values in fits.items():
        unseen[models == model] = problem.errors(values)[models == model]
    asked = np.isin(models, list(only or fits))
    found = {model: float(np.median(np.abs(np.expm1(unseen[models == model])))) for model in fits if model in (only or fits)}
    return found | {"all": median_error(unseen[asked], models[asked].tolist())}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("tables", nargs="+", metavar="TABLE.csv")
    arguments.add_argument("--leave-out", action="store_true", help="errors of models left out of the fit, and what moves then")
    given = arguments.parse_args()
    problem = RequestFit.of(given.tables)
    if given.leave_out:
        fits = without_each(problem)
        for model, error in left_out(problem, fits).items():
            print(f"{error:8.1%}  {model}")
        for name in NAMES:
            print(f"  {name:20s} {np.std([np.log(each[name]) for each in fits.values()]):.3f}")
    else:
        found = solve(problem)
        before, after = (median_error(problem.errors(values), problem.models) for values in ({}, found))
        print(f"median error {before:.2%} -> {after:.2%}, every model with the same weight")
        for name, value in found.items():
            print(f"  {name:20s} {value:.3g}")


if __name__ == "__main__":
    sys.exit(answered(main))
