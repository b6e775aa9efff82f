"""How the cost model's constants were got, and how well they do on sources that they were not fitted to.

    python -m benchmarks.fit TABLE.csv              constants and sustained matrix rates that a refit would choose, and what it gains
    python -m benchmarks.fit TABLE.csv --leave-out  for each source: the error with constants fitted to all other sources

TABLE.csv is a canonical table of measured runs, as ``trireme validate`` reads it. The fitted numbers are those of conf/constants.yaml
that are not set by hand, and the ``sustained_tflops`` of conf/hardware, shared by devices of one chip; everything else in a prediction is
documented, not fitted. The fit is a Gauss-Newton step in the logarithms of the parameters over the logarithms of predicted / measured
step times. Sources weigh by the root of their rows, rows far off count linearly (Huber), and parameters that no row determines stay where
they are (ridge).
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from launcher.config.constants import constant_entries
from launcher.config.hardware import hardware_files
from launcher.cost.inputs.case import Case
from launcher.cost.inputs.constants import SHIPPED, Constants
from launcher.cost.inputs.device import Device
from launcher.cost.model import estimate
from launcher.tables.canonical import Unanswerable, read
from launcher.tables.cases import TableCase, table_case
from launcher.tables.predictions import grouped

NAMES = tuple(name for name, entry in constant_entries().items() if entry["kind"] != "set")
CHIPS = {
    "A100": ("A100", "A800"),
    "H100": ("H100-80", "H200"),
    "B200": ("B200",),
    "B300": ("B300",),
    "GB200": ("GB200",),
    "GB300": ("GB300",),
}
"""Names of devices that share a fitted rate; others run at 70 % of their peak."""
LARGEST = {
    "wave_weight": 1.0,
    "tensor_hidden": 0.95,
    "sends_hidden": 0.95,
    "data_hidden": 0.95,
    "bandwidth": 0.92,
    "link": 0.95,
    "network": 0.95,
}
HUBER, STIFFNESS, STEP = 0.08, 0.2, 0.02
FEWEST = 5
"""Rows of a source that is worth leaving out."""

Parameters = dict[str, float]
"""Factors on today's values by name: a constant, or the rate of a chip ("H100 fp8")."""


def chip(device: Device) -> str:
    """The chip whose sustained rates a device shares."""
    return next((name for name, starts in CHIPS.items() if device.name.startswith(starts)), device.name)


@dataclass(frozen=True)
class FitProblem:
    """Measured rows as few cases, with their sources."""

    cases: list[tuple[Case, list[int]]]
    measured: np.ndarray
    sources: list[str]

    @classmethod
    def of(cls, path: str) -> FitProblem:
        asked, measured = _asked(path)
        return cls(grouped(asked), np.array(measured), [case.row["source"] for case in asked])

    def errors(self, parameters: Parameters) -> np.ndarray:
        """Logarithm of predicted / measured of each row."""
        out = np.empty(len(self.measured))
        constants = _constants(parameters)
        for case, members in self.cases:
            changed = replace(case, constants=constants, device=_device(case.device, parameters))
            out[members] = np.log(np.broadcast_to(estimate(changed).step_time, len(members)))
        return out - np.log(self.measured)

    def names(self) -> list[str]:
        """All parameters."""
        rates = {f"{chip(case.device)} {_precision(case)}" for case, _ in self.cases if case.device.sustained}
        return [*NAMES, *sorted(rates)]

    def large(self) -> list[str]:
        """Sources with enough rows to be left out, in order of appearance."""
        return [source for source in dict.fromkeys(self.sources) if self.sources.count(source) >= FEWEST]

    def rows_of(self, source: str) -> np.ndarray:
        """Which rows (rows,) are of ``source``."""
        return np.array([one == source for one in self.sources])


def _precision(case: Case) -> str:
    """Formats of one width share a rate."""
    return {"bf16": "16 bit", "fp16": "16 bit"}.get(case.precision, case.precision)


def _asked(path: str) -> tuple[list[TableCase], list[float]]:
    files, asked, measured = hardware_files(), [], []
    for row in read(path):
        seconds = row.step_seconds
        try:
            found = table_case(row, files)
        except Unanswerable:
            continue
        if seconds:
            asked.append(found)
            measured.append(seconds)
    return asked, measured


def _constants(parameters: Parameters) -> Constants:
    return SHIPPED.on({name: getattr(SHIPPED, name) * parameters.get(name, 1.0) for name in NAMES})


def _device(device: Device, parameters: Parameters) -> Device:
    wide = parameters.get(f"{chip(device)} 16 bit", 1.0)
    rates = {
        name: rate * (wide if name in ("bf16", "fp16") else parameters.get(f"{chip(device)} {name}", 1.0))
        for name, rate in device.sustained.items()
    }
    return dataclasses.replace(device, sustained=rates)


def jacobian(problem: FitProblem, names: Sequence[str], base: np.ndarray) -> np.ndarray:
    """Change of each row's error with the logarithm of each parameter."""
    moved = [problem.errors({name: float(np.exp(STEP))}) - base for name in names]
    return np.stack(moved, axis=1) / STEP


def solve(problem: FitProblem, names: Sequence[str], base: np.ndarray, slopes: np.ndarray, without: str = "") -> Parameters:
    """The parameters of the least weighted error over all sources but ``without``, by reweighted least squares."""
    counts = {source: problem.sources.count(source) for source in set(problem.sources)}
    shares = np.array([0.0 if source == without else counts[source] ** -0.5 for source in problem.sources])
    change = np.zeros(len(names))
    for _ in range(20):
        left = base + slopes @ change
        weights = shares * np.minimum(1.0, HUBER / np.maximum(np.abs(left), 1e-9))
        normal = slopes.T @ (weights[:, None] * slopes) + STIFFNESS * np.eye(len(names))
        change = np.linalg.solve(normal, -slopes.T @ (weights * base))
    found = {name: float(np.exp(np.clip(move, -0.4, 0.4))) for name, move in zip(names, change)}
    return {name: min(factor, LARGEST[name] / getattr(SHIPPED, name)) if name in LARGEST else factor for name, factor in found.items()}


def median_error(errors: np.ndarray) -> float:
    """Median of |predicted / measured - 1|."""
    return statistics.median(abs(np.expm1(errors)).tolist())


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("table", metavar="TABLE.csv")
    arguments.add_argument("--leave-out", action="store_true", help="errors of sources left out of the fit")
    arguments.add_argument(
        "--spread", action="store_true", help="how far each constant moves when a source is left out: for conf/constants.yaml"
    )
    given = arguments.parse_args()
    problem = FitProblem.of(given.table)
    names, base = problem.names(), problem.errors({})
    slopes = jacobian(problem, names, base)
    if given.spread:
        _spread(problem, names, base, slopes)
    elif given.leave_out:
        _leave_out(problem, base)
    else:
        _refit(problem, names, base, slopes)


def _refit(problem: FitProblem, names: list[str], base: np.ndarray, slopes: np.ndarray) -> None:
    found = solve(problem, names, base, slopes)
    after = problem.errors(found)
    print(
        f"median error {median_error(base):.2%} -> {median_error(after):.2%}, mean |log| {abs(base).mean():.4f} -> {abs(after).mean():.4f}"
    )
    for name, factor in found.items():
        if abs(factor - 1) > 0.01:
            print(f"  {name:16s} x {factor:.3f}")


def _spread(problem: FitProblem, names: list[str], base: np.ndarray, slopes: np.ndarray) -> None:
    found = [solve(problem, names, base, slopes, source) for source in problem.large()]
    for name in names:
        print(f"{name:22s} {np.std([np.log(each[name]) for each in found]):.3f}")


def left_out(problem: FitProblem) -> dict[str, float]:
    """Median error of each source with enough rows, with the constants fitted to all other sources; under ``all`` that of all their rows."""
    names, base = problem.names(), problem.errors({})
    slopes = jacobian(problem, names, base)
    large = problem.large() if len(problem.large()) > 1 else []
    unseen = {source: problem.errors(solve(problem, names, base, slopes, source))[problem.rows_of(source)] for source in large}
    pooled = {"all": np.concatenate(list(unseen.values()))} if unseen else {}
    return {source: median_error(errors) for source, errors in (unseen | pooled).items()}


def _leave_out(problem: FitProblem, base: np.ndarray) -> None:
    print("rows  as fitted  left out  source")
    for source, error in left_out(problem).items():
        mine = np.isin(problem.sources, problem.large()) if source == "all" else problem.rows_of(source)
        print(f"{mine.sum():4d}  {median_error(base[mine]):9.1%}  {error:8.1%}  {source}")


if __name__ == "__main__":
    main()
