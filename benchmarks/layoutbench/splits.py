"""What our own predictions were told of a run: its source among others, all but its source, or nothing of its kind.

Splits are frozen: ``splits.csv`` has the runs of each source by their hash, and the kinds that they are of. Where a source is missing there
or has other runs, its figures are of other rows than those that were printed before, and an error says so.
"""

from __future__ import annotations

import csv
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from benchmarks.fit import Fit, FitProblem, fit, left_out_parameters, solve
from benchmarks.spreads import LeftOut, Missed, known_cells, likeliest, predicted_without
from launcher.config.uncertainty import Widths, shipped_widths
from launcher.cost.known import MeasuredPoints
from launcher.tables.canonical import COLUMNS as COLUMNS_OF_RUNS
from launcher.tables.canonical import UNKNOWN
from launcher.tables.cases import TableCase
from launcher.tables.validation import short
from trainer.shared.run.errors import ConfigError

FROZEN = Path(__file__).parent / "splits.csv"
COLUMNS = ("source", "runs", "sha256", "kinds")

LATER = ("encoder_layers", "decoder_seq", "model_changes")
NEWER = {name: COLUMNS_OF_RUNS[name].read(COLUMNS_OF_RUNS[name].absent or UNKNOWN) for name in LATER}
"""Columns that tables got after splits were frozen, and what a table without them says: rows that say so are as they were."""
FEW = 12
"""Steps of the search for likelier widths."""


def _chip(*names: str) -> Callable[[TableCase], bool]:
    return lambda case: case.row["hardware"].startswith(names)


KINDS: dict[str, Callable[[TableCase], bool]] = {
    "AMD": _chip("mi"),
    "Blackwell": _chip("b200", "b300", "gb200", "gb300"),
    "GH200": _chip("gh200"),
    "mixtures of experts": lambda case: case.shape.experts is not None,
    "eager stacks": lambda case: case.trainer.kernels.pointwise == "eager",
}
"""Kinds of runs that are left out as a whole, with all that is known of them."""
FAMILIES: dict[str, Callable[[TableCase], bool]] = {
    "V100": _chip("v100"),
    "A100": _chip("a100", "a800", "a40"),
    "H100, H200": _chip("h100", "h800", "h200", "h20"),
    **{name: KINDS[name] for name in ("GH200", "Blackwell", "AMD")},
}
"""Chips whose figures stand apart."""


@dataclass(frozen=True)
class Told:
    """Predicted seconds (n,) of some rows, and whether each measured time lies in its 80 % interval."""

    seconds: np.ndarray
    inside: np.ndarray


@dataclass(frozen=True)
class Splits:
    """Measured rows, and what is predicted of them under each split."""

    problem: FitProblem
    cases: list[TableCase]

    @classmethod
    def of(cls, cases: list[TableCase], measured: Sequence[float]) -> Splits:
        return cls(FitProblem.of_cases(cases, measured), cases)

    @property
    def measured(self) -> np.ndarray:
        return self.problem.measured

    @cached_property
    def known(self) -> np.ndarray:
        """(n,) seconds with the constants in use, which most of these sources had a part in."""
        return np.asarray(np.exp(self.problem.errors({})) * self.measured)

    @cached_property
    def whole(self) -> Fit:
        return fit(self.problem)

    @cached_property
    def apart(self) -> LeftOut:
        """Each row without its source."""
        fitted = left_out_parameters(self.problem, self.whole)
        return LeftOut(self.cases, *predicted_without(self.problem, fitted), self.measured, fitted)

    @cached_property
    def missed(self) -> list[Missed]:
        return self.apart.missed()

    @cached_property
    def widths(self) -> Widths:
        """Those of all rows, from which those without a source are a few steps away."""
        return likeliest(self.missed, shipped_widths())

    @cached_property
    def unseen(self) -> Told:
        """Every row without its source: constants, rates and widths of all others."""
        inside = np.zeros(len(self.cases), dtype=bool)
        for each in self.missed:
            widths = likeliest([other for other in self.missed if other is not each], self.widths, FEW)
            inside[self.apart.sources == each.source] = each.inside(widths)
        return Told(self.apart.time.sum(axis=1), inside)

    def without(self, kind: str) -> tuple[np.ndarray, Told]:
        """The rows of a kind (n,), and what is predicted of them where no row of it had a part in constants, rates and widths."""
        rows = self.rows(KINDS[kind])
        sources = [kind if own else source for own, source in zip(rows, self.problem.sources)]
        problem = replace(self.problem, sources=sources)
        parameters = {kind: solve(problem, self.whole, kind)}
        time, causes = predicted_without(problem, parameters)
        chosen = np.flatnonzero(rows)
        found = LeftOut([self.cases[i] for i in chosen], time[chosen], causes[chosen], self.measured[chosen], parameters)
        widths = likeliest([other for other in self._of_others(rows) if len(other.ratios)], self.widths)
        far = to_others(self.cases, rows)
        inside = np.zeros(len(chosen), dtype=bool)
        for each in found.missed():
            own = found.sources == each.source
            inside[own] = replace(each, assumed=each.assumed | (kind in FAMILIES), distance=far[own]).inside(widths)
        return rows, Told(time[chosen].sum(axis=1), inside)

    def _of_others(self, rows: np.ndarray) -> Iterator[Missed]:
        for each in self.missed:
            yield each.rows(np.flatnonzero(~rows[self.apart.sources == each.source]))

    def rows(self, chosen: Callable[[TableCase], bool]) -> np.ndarray:
        """(n,) which rows are of a kind."""
        return np.array([chosen(case) for case in self.cases])


def to_others(cases: Sequence[TableCase], rows: np.ndarray) -> np.ndarray:
    """Doublings from each of ``rows`` to the nearest of the other cases."""
    places = MeasuredPoints.of([known_cells(case) for case in cases])
    return np.asarray(places.rows(rows).apart(places.rows(~rows)).min(axis=1))


def frozen(cases: Sequence[TableCase]) -> list[tuple[str, str, str, str]]:
    """The lines of ``splits.csv`` for some cases."""
    runs, hashes, kinds = Counter[str](), dict[str, int](), dict[str, set[str]]()
    for case in cases:
        cells = case.row.cells.items()
        source, text = case.row["source"], repr(sorted((name, str(value)) for name, value in cells if NEWER.get(name, UNKNOWN) != value))
        runs[source] += 1  # in whatever order they come
        hashes[source] = hashes.get(source, 0) ^ int(hashlib.sha256(text.encode()).hexdigest()[:16], 16)
        kinds.setdefault(source, set()).update(name for name, chosen in KINDS.items() if chosen(case))
    return [(source, str(count), f"{hashes[source]:016x}", "; ".join(sorted(kinds[source]))) for source, count in sorted(runs.items())]


def check(cases: Sequence[TableCase], path: Path = FROZEN) -> None:
    """``ConfigError`` where a source is not as it was when the splits were frozen."""
    known = {line["source"]: line for line in csv.DictReader(path.open(newline=""))} if path.exists() else {}
    for source, *cells in frozen(cases):
        was = known.get(source)
        if was is None or [was[name] for name in COLUMNS[1:]] != cells:
            how = "is not in it" if was is None else f"has other runs ({was['runs']} then, {cells[0]} now)"
            raise ConfigError(
                f"splits are frozen in {path.name}, and the source {short(source)!r} {how}; give the tables that it was made of, or take "
                "new splits with --freeze, after which figures are no longer those of earlier ones"
            )


def freeze(cases: Sequence[TableCase], path: Path = FROZEN) -> None:
    """Writes the splits of ``cases``."""
    with path.open("w", newline="") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(COLUMNS)
        lines.writerows(frozen(cases))
