"""How the cost model's constants were got, and how well they do on sources that they were not fitted to.

    python -m benchmarks.fit TABLE.csv              fit to all sources at once, from the documented defaults; what it changes
    python -m benchmarks.fit TABLE.csv --write      and write the values into conf/constants.yaml and conf/hardware
    python -m benchmarks.fit TABLE.csv --leave-out  for each source: the error with constants fitted to all other sources

TABLE.csv is a canonical table of measured runs, as ``trireme validate`` reads it. Fitted are the constants of conf/constants.yaml of kind
``fitted``, and what fraction of its peak a family of chips sustains; everything else in a prediction is documented. Every parameter has a
default with evidence (a document, a measurement of a single operation, or none: neutral), and a fit starts there: it minimises the squared
logarithms of predicted / measured step times plus the squared logarithms of parameter / default, in units of how far the evidence can be
wrong (``SPREADS``). The constants in use are not an input. Sources weigh by the root of their rows, rows far off count linearly (Huber).
Each machine with its trainer may be faster or slower as a whole, at the same kind of price (``OWN``).

Runs that judge the fit (``judges``) have no part in it, with one exception: rates of families of chips that no other run is of are fitted
to them afterwards, with everything else held.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, cached_property
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from benchmarks.console import answered
from launcher.config.constants import constant_entries
from launcher.config.folders import conf_dir
from launcher.config.hardware import hardware_files
from launcher.cost.inputs import stages
from launcher.cost.inputs.case import Case
from launcher.cost.inputs.constants import Constants
from launcher.cost.inputs.device import Device
from launcher.cost.model import step
from launcher.cost.parts import total
from launcher.tables.canonical import MeasuredRun, Unanswerable, read
from launcher.tables.cases import TableCase, table_case
from launcher.tables.predictions import grouped

NAMES = tuple(name for name, entry in constant_entries().items() if entry["kind"] == "fitted")
DEFAULTS = {name: float(constant_entries()[name]["default"]) for name in NAMES}
BEST = {
    "Ampere 16 bit": (0.869,),
    "Hopper 16 bit": (0.803,),
    "Hopper fp8": (0.709,),
    "Blackwell 16 bit": (0.776, 0.631, 0.484),
    "Blackwell fp8": (0.763,),
    "CDNA 3 16 bit": (0.514, 0.346),
    "CDNA 3 fp8": (0.514, 0.346),
    "CDNA 4 16 bit": (0.626,),
    "CDNA 4 fp8": (0.626,),
}
"""Fraction of the peak that large matrix products reach when they are measured alone, by owner: the best one (stas00/ml-engineering: A100,
H100, B200, MI355X); on B200 products of 8,192 at 1,000 W and at 750 W (below ``CHIPS``), as nobody says at which limit a B200 runs; on
MI300X the best one under ROCm 6.3, and under 6.1 (there: 668 and 450 of 1,300 TFLOP/s), as nobody says which kernels a run had. Products
of 8 bits on AMD's chips, which nobody measured for that list, are taken to reach the same."""
TRAINING = 0.9
"""What of that is left in training, where a device is warmer: neutral, a tenth."""
SPREADS = {"measured": 0.1, "document": 0.3, "neutral": 0.5}
"""How far a default may be off, as the standard deviation of its logarithm, by its evidence (``docs/cost-model.md``)."""
CHIPS: dict[str, dict[str, float]] = {
    "Ampere": {"A100": 1.0, "A800": 1.0},
    "Hopper": {"H100-80": 1.0, "H200": 1.0, "H800": 1.0, "GH200": 1.0, "H100-96": 500 / 700},
    "Blackwell": {
        "B200": 1.0,
        "B300": 1.0,
        "GB200": (1200 / 1000 * 2250 / 2500) ** (1 / 3),
        "GB300": (1400 / 1000 * 2250 / 2500) ** (1 / 3),
    },
    "CDNA 3": {"MI300X": 1.0, "MI325X": (1000 / 750) ** (1 / 3)},
    "CDNA 4": {"MI355X": 1.0},
}
"""Families of chips that share the fraction of the peak that they sustain, by the beginnings of their devices' names, with the fraction of
each relative to the first: products run into the power limit, power grows with the cube of the clock (frequency times voltage squared), so
the clock goes with the third root of watts per peak FLOP/s (data sheets); measured alone, GB300 sustains 1.11 times the fraction of B200,
and 1.08 by that. A chip that is held below the rating of its kind has no voltage left to lower: its products slow down as the watts do
(products of 8,192 in 16 bits under cuBLAS: B200 1,088 TFLOP/s at 750 W and 1,420 at 1,000 W; GB300 617 at 500 W and 1,600 to 2,174 at
1,400 W; facebookexperimental/triton, pull requests 854 and 2023, pytorch/ao 2427). Devices of no family have the default."""
LARGEST = {
    "wave_weight": 1.0,
    "unaligned": 1.0,
    "tensor_hidden": 0.95,
    "sends_hidden": 0.95,
    "data_hidden": 0.95,
    "bandwidth": 0.92,
    "streaming": 0.95,
}
LARGEST_RATE = 0.95
OWN = 0.1
"""Standard deviation of the error that all rows of a machine and its trainer share: neutral, a tenth."""
HUBER, NOISE, STEP, ROUNDS = 0.08, 0.1, 0.02, 3

JUDGES = Path(__file__).parent / "judges.txt"

Parameters = dict[str, float]
"""Values by name: a constant, or the fraction of the peak that a family of chips sustains ("Hopper fp8")."""


@cache
def judges() -> frozenset[str]:
    """Reads the sources that no constant is fitted to, so that they say how far off predictions are where nothing was fitted."""
    return frozenset(JUDGES.read_text().splitlines())


def chip(device: Device) -> tuple[str, float]:
    """The family whose sustained fractions a device shares, and its own relative to that; an empty name for none."""
    known = ((family, share) for family, members in CHIPS.items() for start, share in members.items() if device.name.startswith(start))
    return next(known, ("", 1.0))


def width(precision: str) -> str:
    """Formats of one width share a rate."""
    return {"bf16": "16 bit", "fp16": "16 bit"}.get(precision, precision)


def rate_name(device: Device, precision: str) -> str:
    """Returns the name of the rate of a device's chips in a format; empty where they are of no family."""
    family, _ = chip(device)
    return f"{family} {width(precision)}" if family else ""


def rate_spread(name: str) -> float:
    """How far the rate of a family of chips may be off before any run of it, as the standard deviation of its logarithm."""
    return max(SPREADS["measured"], float(np.std(np.log(BEST[name]))))


def with_parameters(device: Device, constants: Constants, values: Parameters) -> tuple[Device, Constants]:
    """A device and constants with ``values`` in place of their own."""
    rates = device.sustained | sustained(device, values)
    own = {name: value for name, value in values.items() if name in NAMES}
    return dataclasses.replace(device, sustained=rates), constants.on(own)


def sustained(device: Device, values: Parameters) -> dict[str, float]:
    """FLOP/s that ``values`` say a device sustains, by precision."""
    _, share = chip(device)
    keys = {precision: rate_name(device, precision) for precision in device.peaks}
    return {precision: share * values[key] * device.peaks[precision] for precision, key in keys.items() if key in values}


@dataclass(frozen=True)
class FitProblem:
    """Measured rows as few cases, with their sources, and with the machine and trainer that each is of."""

    cases: list[tuple[Case, list[int]]]
    measured: np.ndarray
    sources: list[str]
    machines: list[tuple[str, str, str]]
    judging: np.ndarray  # (rows,) those that no constant is fitted to: of judges, and of networks with an encoder
    rates: list[str]  # of each row, the name of the rate of its chip in its format

    @classmethod
    def of(cls, path: str) -> FitProblem:
        return cls.of_rows(read(path))

    @classmethod
    def of_rows(cls, rows: Sequence[MeasuredRun]) -> FitProblem:
        return cls.of_cases(*timed_cases(rows))

    @classmethod
    def of_cases(cls, asked: list[TableCase], measured: Sequence[float]) -> FitProblem:
        machines = [machine_of(case) for case in asked]
        judging = np.array([case.row["source"] in judges() or case.shape.encoder_layers > 0 for case in asked])
        rates = [rate_name(case.device, case.precision) for case in asked]
        return cls(grouped(asked), np.array(measured), [source for source, _, _ in machines], machines, judging, rates)

    def errors(self, values: Parameters) -> np.ndarray:
        """Logarithm of predicted / measured of each row; without ``values`` as shipped."""
        out = np.empty(len(self.measured))
        for case, members in self.cases:
            device, constants = with_parameters(case.device, case.constants, values)
            changed = replace(case, constants=constants, device=device)
            out[members] = np.log(np.broadcast_to(total(step(changed, stages.held(changed))), len(members)))
        return out - np.log(self.measured)

    @cached_property
    def defaults(self) -> Parameters:
        """All parameters at what is documented of them."""
        return DEFAULTS | {name: TRAINING * float(np.exp(np.mean(np.log(found)))) for name, found in BEST.items() if name in self.rates}

    @cached_property
    def spreads(self) -> np.ndarray:
        """How far each default may be off: a rate no less than its owners differ."""
        entries = constant_entries()
        return np.array([SPREADS[entries[name]["evidence"]] if name in entries else rate_spread(name) for name in self.defaults])

    def rows_of(self, source: str) -> np.ndarray:
        """Which rows (rows,) are of ``source``."""
        return np.array([one == source for one in self.sources])


def machine_of(case: TableCase) -> tuple[str, str, str]:
    """The source of a row, its device and its trainer: what its rows have in common besides what is predicted of them."""
    return case.row["source"], case.row["hardware"], case.row["trainer"]


def timed_cases(rows: Sequence[MeasuredRun]) -> tuple[list[TableCase], list[float]]:
    """The rows that can be predicted and have a step time, and those times in seconds."""
    files, asked, measured = hardware_files(), [], []
    for row in rows:
        seconds = row.step_seconds
        try:
            found = table_case(row, files)
        except Unanswerable:
            continue
        if seconds:
            asked.append(found)
            measured.append(seconds)
    return asked, measured


@dataclass(frozen=True)
class Fit:
    """Parameters of the least error, and the errors and slopes of all rows there."""

    values: Parameters
    errors: np.ndarray  # (rows,)
    slopes: np.ndarray  # (rows, parameters), by the logarithm of each


def jacobian(problem: FitProblem, values: Parameters) -> tuple[np.ndarray, np.ndarray]:
    """Errors of all rows, and their change with the logarithm of each parameter."""
    moved = [values, *({**values, name: value * float(np.exp(STEP))} for name, value in values.items())]
    with ProcessPoolExecutor(2, get_context("fork"), initializer=_remember, initargs=(problem,)) as pool:
        found = list(pool.map(_errors, moved, chunksize=8))
    return found[0], np.stack([(errors - found[0]) / STEP for errors in found[1:]], axis=1)


_problem: FitProblem
"""That of a worker process."""


def _remember(problem: FitProblem) -> None:
    global _problem
    _problem = problem


def _errors(values: Parameters) -> np.ndarray:
    return _problem.errors(values)


def fit(problem: FitProblem, without: str = "") -> Fit:
    """The fit to all sources but ``without``, from the defaults."""
    values = problem.defaults
    for _ in range(ROUNDS):
        errors, slopes = jacobian(problem, values)
        values = solve(problem, Fit(values, errors, slopes), without)
    errors, slopes = jacobian(problem, values)
    return Fit(values, errors, slopes)


def solve(problem: FitProblem, at: Fit, without: str = "") -> Parameters:
    """The parameters of the least error over all sources but ``without`` and those that judge, where errors are straight lines through
    ``at``; then rates of chips that only judges have runs of, with all else held."""
    kept = np.array([source != without for source in problem.sources])
    fitted, judging = kept & ~problem.judging, kept & problem.judging
    found = _solved(problem, at, fitted, list(problem.defaults))
    rates = np.array(problem.rates)
    late = [name for name in problem.defaults if name in rates[judging] and name not in rates[fitted]]
    if not late:
        return found
    moved = at.slopes @ np.array([np.log(found[name] / at.values[name]) for name in problem.defaults])
    return found | _solved(problem, replace(at, values=found, errors=at.errors + moved), judging & np.isin(rates, late), late)


def _solved(problem: FitProblem, at: Fit, rows: np.ndarray, names: list[str]) -> Parameters:
    """Returns the parameters ``names`` of the least error over ``rows`` (n,).

    All rows of a machine and its trainer share an error of their own (``OWN``): a cluster that is a tenth slower than its data sheet says
    little of how fast a kernel is, and how its rows differ from each other says more (a linear mixed model; Laird & Ware 1982,
    Biometrics 38, pages 963-974).
    """
    counts = {source: problem.sources.count(source) for source in set(problem.sources)}
    shares = np.array([counts[source] ** -0.5 * row for source, row in zip(problem.sources, rows)])
    free = [name in names for name in problem.defaults]
    now, prior = (np.log([values[name] for name in names]) for values in (at.values, problem.defaults))
    own = np.array([[one == machine for machine in dict.fromkeys(problem.machines)] for one in problem.machines], dtype=float)
    slopes = np.concatenate([at.slopes[:, free], own], axis=1)
    apart = np.concatenate([now - prior, np.zeros(own.shape[1])])
    stiffness = (NOISE / np.concatenate([problem.spreads[free], np.full(own.shape[1], OWN)])) ** 2
    change = np.zeros(slopes.shape[1])
    for _ in range(20):
        left = at.errors + slopes @ change
        weights = shares * np.minimum(1.0, HUBER / np.maximum(np.abs(left), 1e-9))
        normal = slopes.T @ (weights[:, None] * slopes) + np.diag(stiffness)
        change = np.linalg.solve(normal, -slopes.T @ (weights * at.errors) - stiffness * apart)
    found = np.exp(now + np.clip(change[: len(names)], -0.5, 0.5))
    return {name: min(float(value), LARGEST.get(name, LARGEST_RATE if " " in name else np.inf)) for name, value in zip(names, found)}


def left_out_parameters(problem: FitProblem, whole: Fit) -> dict[str, Parameters]:
    """By source: the parameters fitted to all others, one Gauss-Newton step from those of ``whole``, under the same priors."""
    return {source: solve(problem, whole, source) for source in dict.fromkeys(problem.sources)}


def median_error(errors: np.ndarray) -> float:
    """Median of |predicted / measured - 1|."""
    return statistics.median(abs(np.expm1(errors)).tolist())


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("table", metavar="TABLE.csv")
    arguments.add_argument("--leave-out", action="store_true", help="errors of sources left out of the fit")
    arguments.add_argument("--write", action="store_true", help="write values and their spreads into conf/")
    given = arguments.parse_args()
    problem = FitProblem.of(given.table)
    whole = fit(problem)
    apart = left_out_parameters(problem, whole)
    if given.write:  # before anything is printed, whose reader may go away
        write(whole.values, {name: float(np.std([np.log(found[name]) for found in apart.values()])) for name in whole.values})
    _print(problem, whole)
    if given.leave_out:
        _leave_out(problem, whole, apart)


def _print(problem: FitProblem, whole: Fit) -> None:
    before = problem.errors(problem.defaults)
    print(
        f"median error: defaults {median_error(before):.2%}, shipped {median_error(problem.errors({})):.2%}, fit "
        f"{median_error(whole.errors):.2%}"
    )
    for name, value in whole.values.items():
        print(f"  {name:22s} {problem.defaults[name]:10.3g} -> {value:10.3g}")


def _leave_out(problem: FitProblem, whole: Fit, apart: dict[str, Parameters]) -> None:
    print("rows  in sample  left out  source")
    unseen = np.empty(len(problem.measured))
    for source, values in apart.items():
        mine = problem.rows_of(source)
        unseen[mine] = problem.errors(values)[mine]
        print(f"{mine.sum():4d}  {median_error(whole.errors[mine]):9.1%}  {median_error(unseen[mine]):8.1%}  {source}")
    print(f"{len(unseen):4d}  {median_error(whole.errors):9.1%}  {median_error(unseen):8.1%}  all")


def write(values: Parameters, spreads: Parameters) -> None:
    """Write ``values`` and ``spreads`` into conf/constants.yaml, and the sustained rates into the files of conf/hardware."""
    path = conf_dir() / "constants.yaml"
    text = path.read_text()
    for name in NAMES:
        new = rf"\g<1>{rounded(values[name])}\g<2>{spreads[name]:.3f}"
        text = re.sub(rf"(?m)^({name}: \{{value: )[^,]+(.*?spread: )[^,]+", new, text)
    path.write_text(text)
    for name, config in hardware_files().items():
        file = conf_dir() / "hardware" / f"{name}.yaml"
        if config.peak_tflops and file.is_file() and chip(Device.of(config, 8))[0]:
            _write_rates(file, Device.of(config, 8), values)


def _write_rates(file: Path, device: Device, values: Parameters) -> None:
    words = ", ".join(f"{precision}: {rounded(rate / 1e12)}" for precision, rate in sustained(device, values).items())
    file.write_text(re.sub(r"(?m)^sustained_tflops: .*$", f"sustained_tflops: {{{words}}}", file.read_text()))


def rounded(value: float) -> str:
    """Three digits, as YAML reads them."""
    number = float(f"{value:.3g}")
    text = f"{number:.10g}" if 1e-3 < number < 1e5 else f"{number:.3g}"
    return text if "e" not in text or "." in text else text.replace("e", ".0e")


if __name__ == "__main__":
    sys.exit(answered(main))
