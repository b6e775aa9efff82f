"""Learns a machine's constants from measured runs: a Bayesian update of those in use. Pure.

log(measured / predicted) of run i = a + sum over parameters j of slope_ij d_j + error of its layout

``a`` is the common error of machine and trainer, ``d_j`` the logarithmic error of a constant (conf/constants.yaml) or of the rate of matrix
products. Priors are the shipped values with the widths of ``launcher.config.uncertainty``, or an earlier calibration's. Layouts' errors are
those of ``launcher.cost.uncertainty``, their size s a sum over quadrature nodes. The width of ``a`` is scaled by a factor of the same
distribution, but its own, so a uniformly slow machine does not look like one with scattered layouts. The model is linearised
(Gauss-Newton), several times; the posterior is a mixture of Gaussians, one per node (Laplace; MacKay 2003, chapter 27), of which mean and
variance are kept.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import numpy as np

from launcher.config.constants import constant_entries
from launcher.config.schema import HardwareConfig
from launcher.config.uncertainty import OF_PARTS, Widths, widened, widths_on
from launcher.cost.inputs import stages
from launcher.cost.inputs.case import Case
from launcher.cost.inputs.constants import SHIPPED
from launcher.cost.inputs.device import Device
from launcher.cost.known import distances, place_of
from launcher.cost.model import step
from launcher.cost.parts import WIDTH_OF_PART, total
from launcher.cost.prediction import CostModel
from launcher.cost.uncertainty import Traits, between, coordinates, near_sizes, sizes
from launcher.tables.canonical import MeasuredRun, written
from launcher.tables.cases import TableCase, asked_cells, machine_of
from launcher.tables.predictions import grouped, on_each, predict_rows
from launcher.tables.repeats import question
from trainer.shared.run.errors import ConfigError

ROUNDS = 5
TAILS = 4.0
"""Degrees of freedom of Student's t, which the errors of runs have: the customary number where runs are too few to tell it."""
STEP = 0.02
"""Change of a logarithm over which slopes are taken."""
RATE = "rate of matrix products"
MACHINE = ("gpus_per_node", "memory_gb", "memory_bandwidth_gbs", "link_gbs", "link_domain", "network_gbs", "network_latency_us")
"""Cells that make a machine of its own of a row."""
MATTERS = 1e-4
"""Parameters whose logarithm moves that of every step time by a smaller part than this have no part in the update."""
LARGEST = {"wave_weight": 1.0, "tensor_hidden": 0.95, "sends_hidden": 0.95, "data_hidden": 0.95}
"""Shares of something: none is above 1, and something always shows."""
DIGITS = 4
MOST = 4000
"""Runs at once: their covariances are a matrix of that size."""


@dataclass(frozen=True)
class CalibrationResult:
    """Result of a calibration. ``hardware`` predicts with it."""

    hardware: HardwareConfig
    before: np.ndarray  # (runs,) log(measured / predicted) with the hardware as it was
    after: np.ndarray  # after calibration, of the same runs
    different: int  # runs without repeats of one layout

    @property
    def counted(self) -> str:
        """``4 runs (2 without repeats)``."""
        runs = f"{len(self.before)} run" + ("" if len(self.before) == 1 else "s")
        return runs if self.different == len(self.before) else f"{runs} ({self.different} without repeats)"


def learn(cases: Sequence[TableCase], hardware: HardwareConfig, name: str) -> CalibrationResult:
    """Calibrates the hardware file ``name`` with ``cases``, all measured on ``hardware``. Raises ``ConfigError`` if none is left."""
    known = {as_id(each) for each in hardware.learnt.get("runs", [])}
    new = list({run_id(case): case for case in cases if case.row.step_seconds and run_id(case) not in known}.values())
    if not new:
        raise ConfigError(f"all runs with a step time are in {hardware.name} already; give others, or a hardware without them")
    asked, noise = without_repeats(new, widths_on(hardware.learnt).noise)
    if len(asked) > MOST:
        raise ConfigError(f"{len(asked):,} different runs are more than can be learnt from at once; give {MOST:,} of them at most")
    earlier, cells = hardware.learnt.get("places", []), [asked_cells(case) for case in asked]
    widths = widened(widths_on(hardware.learnt), float(np.median(distances(cells, earlier))))
    values = start(asked, hardware)
    found, here = values, np.zeros(len(values) + 1)
    prior = np.array([widths.common, *(float(hardware.learnt.get("spreads", {}).get(each, widths.constant)) for each in values)])
    errors = noise
    for _ in range(ROUNDS):
        ratios, slopes = linear(asked, hardware, found)
        problem = (np.column_stack([np.ones(len(asked)), slopes]), ratios + slopes @ here[1:], traits(asked), widths, prior)
        update = Posterior(*problem, errors)
        here, errors = update.mean, update.errors_given(noise)
        found = {each: value * float(np.exp(move)) for (each, value), move in zip(values.items(), here[1:], strict=True)}
    update = Posterior(*problem, noise)  # how sure it all is: runs that nothing explains are errors of layouts, and will be met again
    learnt = {
        "runs": sorted(known | {run_id(case) for case in new}),
        "places": distinct([*earlier, *map(place_of, cells)]),
        "widths": {each: rounded(value) for each, value in update.widths().items()},
        "spreads": {each: rounded(spread) for each, spread in zip(values, update.spreads[1:], strict=True)},
    }
    factor = rounded(hardware.time_factor * float(np.exp(here[0])))
    corrected = dataclasses.replace(with_values(hardware, found), name=name, time_factor=factor, learnt=learnt)
    return CalibrationResult(corrected, missed(new, hardware), missed(new, corrected), len(asked))


def distinct(places: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each once, in an order of their own: that of a table's rows says nothing."""
    found = {tuple(sorted(place.items())): dict(place) for place in places}
    return [found[key] for key in sorted(found)]


def run_id(case: TableCase) -> str:
    """A measured run, so that it counts once: a sweep, and the table that ``trireme rank --csv`` makes of it, have the same runs."""
    took = None if case.row.step_seconds is None else float(written(case.row.step_seconds))
    return as_id(f"{crc32(repr((case.layout.tolist(), case.global_batch, case.shape, case.precision, took)).encode()):08x}")


def as_id(text: object) -> str:
    """With a letter before it, since YAML readers take 1234e567 for a number. Files that were written before have none."""
    return f"r{str(text).removeprefix('r')}"


def without_repeats(cases: Sequence[TableCase], noise: float) -> tuple[list[TableCase], np.ndarray]:
    """Returns configurations once, with median step time and logarithmic error: ``noise``, or repeats' scatter over the root of their
    number."""
    groups: dict[object, list[TableCase]] = defaultdict(list)
    for case in cases:
        groups[question(case)].append(case)
    found, errors = [], []
    for members in groups.values():
        seconds = np.array([case.row.step_seconds for case in members])
        row = members[0].row
        found.append(dataclasses.replace(members[0], row=MeasuredRun(row.number, {**row.cells, "step_time_s": float(np.median(seconds))})))
        errors.append(max(noise, float(np.log(seconds).std() / np.sqrt(len(seconds)))))
    return found, np.array(errors)


def start(cases: Sequence[TableCase], hardware: HardwareConfig) -> dict[str, float]:
    """Parameters that the runs depend on, at their values in use."""
    constants = SHIPPED.on(hardware.constants)
    device = Device.of(hardware, 1)
    rates = {f"{RATE} in {case.precision}": device.rate(case.precision) / 1e12 for case in cases if case.precision in device.peaks}
    values = {name: float(getattr(constants, name)) for name in constant_entries()} | rates
    _, slopes = linear(cases, hardware, values)
    return {name: value for (name, value), slope in zip(values.items(), abs(slopes).max(axis=0), strict=True) if slope > MATTERS}


def with_values(hardware: HardwareConfig, values: Mapping[str, float]) -> HardwareConfig:
    """``hardware`` with other values of its parameters; those that are as shipped are not named."""
    rates = {name.removeprefix(f"{RATE} in "): rounded(value) for name, value in values.items() if name.startswith(RATE)}
    if not hardware.host:  # whose peaks are measured, and no more certain than this
        rates = {precision: min(rate, hardware.peak_tflops.get(precision, np.inf)) for precision, rate in rates.items()}
    values = {name: min(value, LARGEST.get(name, np.inf)) for name, value in values.items()}
    own = {name: rounded(value) for name, value in values.items() if not name.startswith(RATE) and moved(value, getattr(SHIPPED, name))}
    return dataclasses.replace(hardware, constants=hardware.constants | own, sustained_tflops=hardware.sustained_tflops | rates)


def moved(value: float, shipped: float) -> bool:
    return abs(np.log(value / shipped)) > 1e-3


def missed(cases: Sequence[TableCase], hardware: HardwareConfig) -> np.ndarray:
    """(n,) log(measured / predicted) of runs on ``hardware``."""
    return _logarithms(cases) - np.log(step_seconds(on(cases, hardware)))


def _logarithms(cases: Sequence[TableCase]) -> np.ndarray:
    """(n,) of the measured step times."""
    return np.log([case.row.step_seconds or np.nan for case in cases])


def step_seconds(cases: Sequence[TableCase]) -> np.ndarray:
    """(n,) predicted step times; memory is not asked for."""
    out = np.empty(len(cases))
    for case, members in grouped(cases):
        out[members] = _step_seconds(case)
    return out


def _step_seconds(case: Case) -> np.ndarray:
    return np.asarray(total(step(case, stages.held(case)))) * case.device.time_factor


def step_seconds_on_each(cases: Sequence[TableCase], machines: Sequence[HardwareConfig]) -> np.ndarray:
    """(machines, n) the same for one machine with several values of its constants and rates."""
    if machines[0].calibration:  # what it measured says how far the mechanisms are off with these constants
        return np.stack([step_seconds(on(cases, machine)) for machine in machines])
    out = np.empty((len(machines), len(cases)))
    for case, members in grouped(on(cases, machines[0])):
        row = cases[members[0]].row
        models = [machine_of(row, {row["hardware"]: machine}) for machine in machines]
        repeated = on_each(case, [(model.device, model.constants) for model in models])
        out[:, members] = _step_seconds(repeated).reshape(len(machines), -1)
    return out


def on(cases: Sequence[TableCase], hardware: HardwareConfig) -> list[TableCase]:
    """Predicts the same runs for ``hardware``."""
    machines: dict[tuple[Any, ...], CostModel] = {}
    for case in cases:
        key = tuple(case.row[cell] for cell in MACHINE)
        if key not in machines:
            machines[key] = machine_of(case.row, {case.row["hardware"]: hardware})
    found = [machines[tuple(case.row[cell] for cell in MACHINE)] for case in cases]
    return [dataclasses.replace(case, device=one.device, constants=one.constants) for case, one in zip(cases, found, strict=True)]


def linear(cases: Sequence[TableCase], hardware: HardwareConfig, values: Mapping[str, float]) -> tuple[np.ndarray, np.ndarray]:
    """log(measured / predicted) of each run, and by how much the logarithm of its prediction grows with that of each parameter."""
    moves = [values, *({**values, name: value * float(np.exp(STEP))} for name, value in values.items())]
    seconds = np.log(step_seconds_on_each(cases, [with_values(hardware, each) for each in moves]))
    return _logarithms(cases) - seconds[0], (seconds[1:] - seconds[0]).T / STEP


def traits(cases: Sequence[TableCase]) -> Traits:
    """Returns the inputs of the layouts' errors."""
    parts = np.array([each.causes for each in predict_rows(cases)])
    return Traits(
        parts / parts.sum(axis=1, keepdims=True), coordinates(np.array([case.layout for case in cases], dtype=cases[0].layout.dtype))
    )


class Posterior:
    """A linear Gaussian update: ``targets`` = ``slopes`` x parameters + errors of layouts, (runs,) and (runs, parameters). ``prior`` has
    the widths of the parameters, of which the first is the common error; ``noise`` (runs,) is that of the measurements."""

    def __init__(self, slopes: np.ndarray, targets: np.ndarray, kinds: Traits, before: Widths, prior: np.ndarray, noise: np.ndarray):
        self.slopes, self.targets, self.before, self.noise = slopes, targets, before, noise
        self.kinds = kinds
        self.errors = between(before, kinds, kinds, np.eye(len(targets))).rest  # constants are the reasons for errors of parts
        self.prior = np.diag(prior**2)
        nodes, weights = near_sizes(before.scale, len(targets))
        far, share = sizes()
        commons = prior[0] * np.exp(before.scale * far)  # how large the common error may be is known no better than that of layouts
        sure, turned = self._turned(targets)
        found = [self._at(1 / (sure + np.exp(2 * before.scale * node)), turned, commons) for node in nodes]
        evidence = np.log(np.multiply.outer(weights, share)) + np.stack([each[0] for each in found])
        shares = np.exp(evidence - np.logaddexp.reduce(evidence.ravel()))
        of_size = shares.sum(axis=1)
        self.size = float(np.exp(before.scale * of_size @ nodes))
        self.sureness = float(before.scale * np.sqrt(max(of_size @ nodes**2 - (of_size @ nodes) ** 2, 0.0)))
        # the posterior is a mixture over the sizes: its variance has the spread of their means, too
        means, covariances = (np.concatenate([each[place] for each in found]) for place in (1, 2))
        self.mean = shares.ravel() @ means
        self.covariance = np.tensordot(shares.ravel(), covariances, 1) + (means - self.mean).T * shares.ravel() @ (means - self.mean)

    @property
    def spreads(self) -> np.ndarray:
        """Returns (parameters,) current standard deviations."""
        return np.asarray(np.sqrt(np.diag(self.covariance)))

    def errors_given(self, noise: np.ndarray) -> np.ndarray:
        """Returns (runs,) ``noise``, widened for outliers by their error: the reweighting that maximises the likelihood with Student's t
        tails (Lange, Little & Taylor 1989), so that a few unexplained runs do not move all others."""
        variance = self.size**2 * np.diag(self.errors) + noise**2
        far = (TAILS + (self.targets - self.slopes @ self.mean) ** 2 / variance) / (TAILS + 1)
        return np.sqrt(noise**2 + variance * np.maximum(far - 1, 0.0))

    def widths(self) -> dict[str, float]:
        """Returns widths after calibration: the parameters' shared uncertainty is the common error, the rest an error of parts."""
        before, now = (self.slopes @ each @ self.slopes.T for each in (self.prior, self.covariance))
        count = len(now)
        apart = ~np.eye(count, dtype=bool) if count > 1 else np.ones((1, 1), dtype=bool)
        common, first = max(float(now[apart].mean()), 0.0), float(before[apart].mean())
        if count == 1:  # nothing tells apart what all runs share
            left = common / first
        else:
            left = max(float(np.diag(now).mean()) - common, 0.0) / max(float(np.diag(before).mean()) - first, 1e-9)
        least = float(np.sqrt(min(left, 1.0)))
        parts = {name: max(least, self._untouched(name)) * getattr(self.before, name) for name in OF_PARTS}
        sized = {name: self.size * getattr(self.before, name) for name in ("layout", "rough")}
        return {"common": float(np.sqrt(common)), "scale": self.sureness} | parts | sized

    def _untouched(self, name: str) -> float:
        """Returns the least remaining width ``name`` of time parts: with a small share of the runs' steps, layout errors hide theirs."""
        own = np.array([each == name for each in WIDTH_OF_PART.values()])
        said = ((self.kinds.shares[:, own] * getattr(self.before, name)) ** 2).sum(axis=1)
        hidden = self.size**2 * (self.before.layout**2 + self.before.rough**2) + self.noise**2
        return float(1 / np.sqrt(1 + (said / hidden).sum()))

    def _turned(self, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns coordinates in which layout errors are independent of variance s**2 and all other errors are independent, too
        (generalised eigenvalues; Golub & Van Loan 2013, section 8.7): (runs,) variances of the latter, and (runs, 2 + parameters)
        ``targets``, ones, and the parameters' effect on each run."""
        from scipy.linalg import eigh

        slopes = self.slopes[:, 1:]
        cross = slopes @ self.prior[1:, 1:]
        sure, turn = eigh(cross @ slopes.T + np.diag(self.noise**2), self.errors)
        return sure, turn.T @ np.column_stack([targets, np.ones(len(targets)), cross])

    def _at(self, weights: np.ndarray, turned: np.ndarray, commons: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns, for one s**2 as ``weights`` (runs,) of the turned runs and each width of the common error, log evidence (k,), mean (k,
        parameters) and covariance of the parameters."""
        solved = (turned * weights[:, None]).T @ turned  # of targets, ones and parameters with each other
        known, pull = solved[1, 1], solved[0, 1]
        variance = 1 / (1 / commons**2 + known)  # of the common error, all else summed over
        common = variance * pull
        evidence = -0.5 * (solved[0, 0] - pull * common - np.log(weights).sum() + np.log(commons**2 / variance))
        slope = solved[2:, 1]  # by how much the other parameters give way to it
        means = np.column_stack([common, solved[2:, 0] - np.multiply.outer(common, slope)])
        give = np.concatenate([[1.0], -slope])
        covariances = variance[:, None, None] * np.multiply.outer(give, give)
        covariances[:, 1:, 1:] += self.prior[1:, 1:] - solved[2:, 2:]
        return evidence, means, covariances


def rounded(value: float) -> float:
    """More digits are noise."""
    return float(f"{value:.{DIGITS}g}")
