"""How far predictions are off on sources that nothing was fitted to: learns conf/uncertainty.yaml and conf/known_runs.csv.

    python -m benchmarks.spreads TABLE.csv ... [--check] [--write]

TABLE.csv are canonical tables. Each source in turn is left out of the fit of the constants (``benchmarks.fit``); what is then missed of its
step times, and of its peaks of memory, is what a new source may expect. The widths (``launcher.config.uncertainty``) are those under which
the misses of all sources are most likely, each source being one draw of a common error and of a size of the error between layouts, so that
a source counts once however many rows it has (type-II maximum likelihood; Rasmussen & Williams 2006, section 5.4.1). ``--check`` repeats
that without each source and prints how many of its rows lie inside of the 80 % interval.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import scipy  # each part of it at its first use

from benchmarks.console import answered
from benchmarks.fit import FitProblem, Parameters, fit, left_out_parameters, machine_of, rate_name, timed_cases, with_parameters
from launcher.config.folders import conf_dir
from launcher.config.hardware import hardware_files
from launcher.config.schema import HardwareConfig
from launcher.config.uncertainty import OF_PARTS, Widths, growth, shipped_widths, uncertainty_file
from launcher.cost.known import KNOWN, MeasuredPoints, rates_assumed
from launcher.cost.model import estimate
from launcher.cost.normal import normal_pdf
from launcher.cost.parts import WIDTH_OF_PART
from launcher.cost.uncertainty import HIGH, LOW, Traits, between, columns, coordinates, own_variance, rated, squared_distance
from launcher.tables.canonical import MeasuredRun, Unanswerable, read
from launcher.tables.cases import TableCase, asked_cells, table_case
from launcher.tables.predictions import predict_rows
from launcher.tables.validation import short
from trainer.shared.run.errors import ConfigError

LEARNT = ("common", *OF_PARTS, "layout", "rough", "reach", "scale")
"""Widths of step times, in the order of the search for the likeliest."""
HELD = ("common", *OF_PARTS)
USUAL, SURE = 0.2, 1.0
"""These widths where nothing is known, and the standard deviation of their logarithm: few sources say something of some parts, and 18 draws
of a common error are as likely under any width up to that of a part, of which the likeliest may then be none at all (Chung, Rabe-Hesketh,
Dorie, Gelman & Liu 2013, Psychometrika 78)."""
MOST_ROWS = 40
"""Rows of a source that enter the likelihood, evenly spread: they say of a size s all that can be known, and a covariance stays small."""
FINE = np.linspace(-5.0, 5.0, 201)
"""Standard normal numbers over which is summed: the rows of a source say more of s than few nodes can tell apart, which would make some
widths likelier because a node lies there. On equal steps the sum over a normal density is the integral to all digits."""
FARTHEST = 0.9
"""Quantile of the distances of sources from all others that counts as seen."""
NEAR = 1.5
"""A run within this distance of one that is kept is not kept itself."""
MEASURED_PART = 0.95
"""The largest share of a step that a part had is the quantile of known runs at which one odd run does not count."""


@dataclass(frozen=True)
class Missed:
    """What is missed of the rows of one source with constants fitted to all others."""

    source: str
    traits: Traits
    distance: np.ndarray  # (n,) to the nearest run of another source, in doublings
    ratios: np.ndarray  # (n,) log(measured / predicted)
    assumed: np.ndarray  # (n,) of chips to whose runs no rate was fitted then

    def rows(self, index: np.ndarray) -> Missed:
        return Missed(self.source, self.traits.rows(index), self.distance[index], self.ratios[index], self.assumed[index])

    @cached_property
    def some(self) -> Missed:
        """At most ``MOST_ROWS`` of them."""
        return self.rows(np.unique(np.linspace(0, len(self.ratios) - 1, MOST_ROWS).round().astype(int)))

    @cached_property
    def squares(self) -> np.ndarray:
        """(n, n) squared distances between layouts."""
        return squared_distance(self.traits, self.traits)

    def evidence(self, widths: Widths) -> float:
        """Log probability of the misses, over all sizes of s. In the coordinates in which both parts of the covariance are diagonal every
        size costs a sum (generalised eigenvalues; Golub & Van Loan 2013, section 8.7)."""
        nodes, weights = FINE, normal_pdf(FINE) / normal_pdf(FINE).sum()
        errors = between(widths, self.traits, self.traits, np.eye(len(self.ratios)), self.squares)
        sure, turned = scipy.linalg.eigh(errors.sure + widths.noise**2 * np.eye(len(self.ratios)), errors.rest)
        variances = sure[:, None] + np.exp(2 * widths.scale * nodes)
        found = -0.5 * ((turned.T @ self.ratios)[:, None] ** 2 / variances + np.log(variances)).sum(axis=0)
        return float(scipy.special.logsumexp(np.log(weights) + found) + np.linalg.slogdet(turned)[1])

    def levels(self, widths: Widths) -> np.ndarray:
        """(n,) probability that was given to a measurement below the one seen: uniform if the widths are right, which are those that are
        told so far away (``launcher.config.uncertainty.widened``)."""
        found = [self._levels(each) for each in (widths, replace(widths, rate=widths.chip))]
        return np.where(self.assumed, found[1], found[0])

    def inside(self, widths: Widths) -> np.ndarray:
        """(n,) which measurements lie in their 80 % interval."""
        levels = self.levels(widths)
        return np.asarray((levels > LOW) & (levels < HIGH))

    def _levels(self, widths: Widths) -> np.ndarray:
        nodes, weights = FINE, normal_pdf(FINE) / normal_pdf(FINE).sum()
        near = own_variance(replace(widths, rate=0.0), self.traits).at(np.exp(2 * widths.scale * nodes)[:, None])
        grown = np.array([growth(widths, distance) for distance in self.distance.tolist()])
        variance = near * grown**2 + (widths.rate * rated(self.traits)) ** 2
        return np.asarray(weights @ scipy.special.ndtr(self.ratios / np.sqrt(variance + widths.noise**2)))


def _log_normal(values: np.ndarray, covariance: np.ndarray, noise: float) -> float:
    root = np.linalg.cholesky(covariance + noise**2 * np.eye(len(values)))
    return float(-0.5 * (np.linalg.solve(root, values) ** 2).sum() - np.log(np.diag(root)).sum())


@dataclass(frozen=True)
class LeftOut:
    """All rows of some tables, each predicted without its source."""

    cases: list[TableCase]
    time: np.ndarray  # (n, k) seconds by part
    causes: np.ndarray  # (n, k) seconds by the part that they hang on
    measured: np.ndarray
    fitted: dict[str, Parameters]  # by source, without it

    @cached_property
    def sources(self) -> np.ndarray:
        return np.array([case.row["source"] for case in self.cases])

    @cached_property
    def ratios(self) -> np.ndarray:
        """(n,) log(measured / predicted)."""
        return np.asarray(np.log(self.measured / self.time.sum(axis=1)))

    def missed(self) -> list[Missed]:
        """The misses by source."""
        places = MeasuredPoints.of([known_cells(case) for case in self.cases])
        layouts = np.array([case.layout for case in self.cases], dtype=self.cases[0].layout.dtype)
        whole = np.concatenate([coordinates(layouts), places.machines], axis=1)
        keys = [machine_of(case) for case in self.cases]
        units = np.array([list(dict.fromkeys(keys)).index(key) for key in keys])
        traits = Traits(self.causes / self.causes.sum(axis=1, keepdims=True), whole, units)
        assumed, rates = np.array([self._assumed(case) for case in self.cases]), np.array([_rate(case) for case in self.cases])
        found = []
        for source in dict.fromkeys(self.sources):
            own = self.sources == source
            far = places.rows(own).apart(places.rows(~own)).min(axis=1, initial=np.inf)  # inf: there is no other source
            alone = (rates[own] != "") & ~np.isin(rates[own], rates[~own])
            found.append(Missed(source, traits.rows(np.flatnonzero(own)), far, self.ratios[own], assumed[own] | alone))
        return found

    @cached_property
    def _files(self) -> dict[str, HardwareConfig]:
        return hardware_files()

    def _assumed(self, case: TableCase) -> bool:
        return rates_assumed(self._files[case.row["hardware"]])


def _rate(case: TableCase) -> str:
    return rate_name(case.device, case.precision)


def runs_of(tables: Sequence[str]) -> list[MeasuredRun]:
    """The rows of some tables, as ``distinct`` has them."""
    return distinct([read(table) for table in tables])


def distinct(tables: Sequence[Sequence[MeasuredRun]]) -> list[MeasuredRun]:
    """The rows of some tables. What an earlier table has is left out of later ones: one may be a part of another, and its rows would count
    twice, or their source would be known when it is left out under one of its names."""
    found: list[MeasuredRun] = []
    for table in tables:
        had = {_cells(row) for row in found}
        found += [row for row in table if _cells(row) not in had]
    return found


def _cells(row: MeasuredRun) -> frozenset[tuple[str, Any]]:
    """What was measured, and of what: not who says so, nor what is assumed."""
    return frozenset((name, value) for name, value in row.cells.items() if name not in ("source", "assumed"))


def left_out(tables: Sequence[str]) -> LeftOut:
    """Fit the constants without each source, and predict it. ``ConfigError`` where there is none to leave out."""
    asked, measured = timed_cases(runs_of(tables))
    if len({case.row["source"] for case in asked}) < 2:
        raise ConfigError(f"{' '.join(tables)} have step times of fewer than two sources, so that none can be predicted without its own")
    problem = FitProblem.of_cases(asked, measured)
    fitted = left_out_parameters(problem, fit(problem))
    return LeftOut(asked, *predicted_without(problem, fitted), problem.measured, fitted)


def predicted_without(problem: FitProblem, fitted: Mapping[str, Parameters]) -> tuple[np.ndarray, np.ndarray]:
    """Predicts the rows of each source with the parameters that are given for it: (n, k) seconds by part, and by the part that they hang
    on. Zeros for rows of other sources."""
    time, causes = np.zeros((2, len(problem.measured), len(WIDTH_OF_PART)))
    for source, parameters in fitted.items():
        for case, members in problem.cases:
            mine = [place for place, row in enumerate(members) if problem.sources[row] == source]
            if not mine:
                continue
            device, constants = with_parameters(case.device, case.constants, parameters)
            found = estimate(replace(case, constants=constants, device=device))
            for seconds, by in ((time, found.time), (causes, found.causes)):
                seconds[np.array(members)[mine]] = columns(by, len(members))[mine]
    return time, causes


def likeliest(missed: Sequence[Missed], start: Widths, rounds: int = 60) -> Widths:
    """The widths of step times under which the misses are most likely, and how far away their sources are."""

    def widths(logarithms: np.ndarray) -> Widths:
        return replace(start, **dict(zip(LEARNT, np.exp(np.clip(logarithms, -7, 2)).tolist())))

    first = np.log([max(getattr(start, name), 0.02) for name in LEARNT])
    found = scipy.optimize.minimize(lambda found: unlikely(missed, widths(found)), first, method="L-BFGS-B", options={"maxiter": rounds}).x
    return replace(widths(found), seen=float(np.quantile([each.distance.mean() for each in missed], FARTHEST)))


def unlikely(missed: Sequence[Missed], widths: Widths) -> float:
    """Minus the log probability of ``widths``, up to a constant."""
    held = sum(0.5 * (np.log(getattr(widths, name) / USUAL) / SURE) ** 2 for name in HELD)
    return float(held - sum(each.some.evidence(widths) for each in missed))


def memory_widths(tables: Sequence[str], start: Widths) -> Widths:
    """The same for peaks of memory: one error of a machine and its trainer, and one of each layout."""
    cases = _peaks(runs_of(tables))
    if not cases:
        return start
    ratios = np.log([case.row.peak_bytes / one.reported_bytes for case, one in zip(cases, predict_rows(cases)) if case.row.peak_bytes])
    keys = np.array([hash(machine_of(case)) for case in cases])

    def cost(logarithms: np.ndarray) -> float:
        common, own = np.exp(np.clip(logarithms, -7, 1))
        groups = [ratios[keys == key] for key in set(keys.tolist())]
        return -sum(_log_normal(each, np.full((len(each), len(each)), common**2), own) for each in groups)

    common, own = np.exp(scipy.optimize.minimize(cost, np.log([0.1, 0.06]), method="L-BFGS-B").x)
    return replace(start, memory=float(common), memory_layout=float(own))


def _peaks(rows: Sequence[MeasuredRun]) -> list[TableCase]:
    files, found = hardware_files(), []
    for row in rows:
        try:
            found += [table_case(row, files)] if row.peak_bytes and not row["oom"] else []
        except Unanswerable:
            continue
    return found


def coverage(missed: Sequence[Missed], widths: Widths) -> None:
    """How many measurements lie inside of their 80 % interval, with widths learnt from all other sources."""
    inside, evidence = {}, 0.0
    for each in missed:
        unseen = likeliest([other for other in missed if other is not each], widths)
        inside[each.source], evidence = each.inside(unseen), evidence + each.some.evidence(unseen)
        print(
            f"{len(each.ratios):5d} rows  {inside[each.source].mean():6.1%} inside  {each.distance.mean():4.1f} doublings away  "
            f"{short(each.source)}"
        )
    rows = np.concatenate(list(inside.values()))
    print(
        f"inside of the 80 % interval: {rows.mean():.1%} of rows, {np.mean([i.mean() for i in inside.values()]):.1%} "
        f"with each source counted once; log probability of what is missed: {evidence:.1f}"
    )


def known_cells(case: TableCase) -> dict[str, Any]:
    """What distances are measured by, and what a reader wants to know of a run."""
    return {"source": short(case.row["source"]), "hardware": case.row["hardware"]} | asked_cells(case)


def written_known(cells: Sequence[Mapping[str, Any]], ratios: np.ndarray) -> Iterator[list[Any]]:
    """Lines of runs such that every run is ``NEAR`` one of them: each the first that none before is near."""
    places, kept = MeasuredPoints.of(cells), np.zeros(0, dtype=int)
    for i, (one, ratio) in enumerate(zip(cells, ratios, strict=True)):
        if not len(kept) or places.rows(np.array([i])).apart(places.rows(kept), with_layouts=True).min() > NEAR:
            kept = np.append(kept, i)
            yield [*(one[name] for name in KNOWN[:-1]), f"{np.expm1(ratio):.3f}"]


def document(widths: Widths, found: LeftOut) -> str:
    """conf/uncertainty.yaml."""
    shares = found.time / found.time.sum(axis=1, keepdims=True)
    largest = np.quantile(shares, MEASURED_PART, axis=0)
    lines = [
        "# How far predictions are off where nothing was measured before: standard deviations of log(measured / predicted). Written by",
        "# 'python -m benchmarks.spreads TABLE.csv ... --write' from runs whose source was left out of the fit of the constants;",
        "# launcher/config/uncertainty.py says what each means. kind: learnt, or set (by hand, from what is written behind it).",
        f"# {len(found.cases):,} runs of {len(found.fitted)} sources.",
        "widths:",
    ]
    reasons = {
        "noise": "repeats of one configuration differ by 0.1 to 1.2 %",
        "chip": "three owners' tables of large products on one chip, B200 in 16 bits: 0.78, 0.63 and 0.48 of its peak",
        "constant": "two tenths, as what is presumed of a part before anything is known",
        "transfer": "no table has the same layout on fewer nodes; twice the step of one doubling of replicas",
    }
    for name in uncertainty_file()["widths"]:
        value = getattr(widths, name)
        kind = f'kind: set, source: "{reasons[name]}"' if name in reasons else "kind: learnt"
        lines.append(f"  {name}: {{value: {value:.3g}, {kind}}}")
    lines.append(
        "# the largest share of a step that each part had in known runs (their 95 % quantile): beyond it a prediction "
        "rests on no measurement"
    )
    lines.append("parts:")
    lines += [f"  {name}: {value:.3f}" for name, value in zip(WIDTH_OF_PART, largest, strict=True)]
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    """0, or 2 for tables that say nothing."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("tables", metavar="TABLE.csv", nargs="+")
    arguments.add_argument(
        "--check", action="store_true", help="also the coverage of each source with widths learnt from the others (minutes)"
    )
    arguments.add_argument("--write", action="store_true", help="write conf/uncertainty.yaml and conf/known_runs.csv")
    given = arguments.parse_args(argv)
    try:
        found = left_out(given.tables)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return ConfigError.exit_code
    missed = found.missed()
    widths = memory_widths(given.tables, likeliest(missed, shipped_widths()))
    text = document(widths, found)
    if given.write:  # before anything is printed, whose reader may go away
        (conf_dir() / "uncertainty.yaml").write_text(text)
        with (conf_dir() / "known_runs.csv").open("w", newline="") as file:
            lines = csv.writer(file, lineterminator="\n")
            lines.writerow(KNOWN)
            lines.writerows(written_known([known_cells(case) for case in found.cases], found.ratios))
    print(text, end="")
    if given.check:
        coverage(missed, widths)
    return 0


if __name__ == "__main__":
    sys.exit(answered(main))
