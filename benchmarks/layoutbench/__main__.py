"""LayoutBench: predictors of step times side by side on published runs.

    python -m benchmarks.layoutbench [RAW.csv ...] [--peer NAME=FOLDER ...] [--freeze] [--write]

Predicts the runs of benchmarks/published/data and of the tables that are given, in the form in which they were published, and prints:
our own figures where a run's source had a part in the fit, where it had none, and where nothing of its kind had; those of the peers
whose folders are given (a clone of calculon, llm-analysis, simumax), on the runs that each can express and on those that all can; and
those of one line of arithmetic, the model's operations over a fixed share of the peak. --write puts the tables into
docs/layoutbench.md. Minutes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.console import answered
from benchmarks.fit import judges, timed_cases
from benchmarks.history.__main__ import ROOT, SHIPPED
from benchmarks.history.figures import rows_of
from benchmarks.layoutbench.page import PAGE, percent, table, told
from benchmarks.layoutbench.peers import PEERS, Predictor, Unsaid
from benchmarks.layoutbench.splits import FAMILIES, KINDS, Splits, Told, check, freeze
from benchmarks.spreads import distinct
from launcher.tables.canonical import MeasuredRun
from launcher.tables.cases import TableCase
from launcher.tables.predictions import predict_rows
from launcher.tables.validation import PredictedRun, sweeps
from trainer.shared.run.errors import ConfigError

MARKS = ("<!-- figures: python -m benchmarks.layoutbench -->\n", "<!-- end of figures -->\n")
OURS, SHARE = "ours", "fixed share of the peak"


@dataclass(frozen=True)
class Figures:
    """What a predictor makes of some runs."""

    runs: int
    sources: int
    median: float  # of all errors
    of_sources: float  # median of the sources' medians
    bias: float  # predicted over measured, the geometric mean
    correlation: float | None  # of ranks within a sweep, mean of sweeps
    regret: float | None

    def cells(self) -> list[str]:
        ranks = "" if self.correlation is None else f"{self.correlation:.2f}"
        return [str(self.runs), percent(self.of_sources), percent(self.median), f"{self.bias:.2f}", ranks, percent(self.regret)]


HEADS = ["runs", "median of sources", "median of runs", "bias", "correlation", "regret"]


@dataclass(frozen=True)
class Bench:
    """Runs, and seconds (n,) by predictor; NaN where it cannot say."""

    splits: Splits
    believed: Sequence[PredictedRun]
    seconds: Mapping[str, np.ndarray]

    @property
    def sources(self) -> np.ndarray:
        return np.array([case.row["source"] for case in self.splits.cases])

    def figures(self, seconds: np.ndarray, rows: np.ndarray) -> Figures | None:
        """Those of ``rows`` (n,) that have a prediction."""
        chosen = np.flatnonzero(rows & np.isfinite(seconds))
        if not len(chosen):
            return None
        ratios = seconds[chosen] / self.splits.measured[chosen]
        by = defaultdict(list)
        for source, error in zip(self.sources[chosen], np.abs(ratios - 1).tolist()):
            by[source].append(error)
        ranked = sweeps([_told(self.believed[i], float(seconds[i])) for i in chosen.tolist()])
        correlations = [one.correlation for one in ranked if one.correlation is not None]
        return Figures(
            len(chosen),
            len(by),
            statistics.median(np.abs(ratios - 1).tolist()),
            statistics.median(map(statistics.median, by.values())),
            float(np.exp(np.log(ratios).mean())),
            statistics.fmean(correlations) if correlations else None,
            statistics.fmean(one.regret for one in ranked) if ranked else None,
        )

    def predictors(self) -> Iterator[list[str]]:
        """Each predictor on what it can say, ourselves beside it on the same runs."""
        ours = self.seconds[OURS]
        for name, seconds in self.seconds.items():
            said = np.isfinite(seconds)
            mine, its = self.figures(ours, said), self.figures(seconds, said)
            if mine and its:
                yield [name, *its.cells(), *([] if name == OURS else [f"{percent(mine.of_sources)}, {percent(mine.median)}"])]

    def common(self) -> Iterator[list[str]]:
        """All on the runs that every one can say."""
        said = np.all([np.isfinite(seconds) for seconds in self.seconds.values()], axis=0)
        for name, seconds in self.seconds.items():
            if found := self.figures(seconds, said):
                yield [name, *found.cells()]

    def told(self) -> Iterator[list[str]]:
        """Ourselves, by what was known."""
        every = np.ones(len(self.sources), dtype=bool)
        known = self.figures(self.splits.known, every)
        assert known is not None
        yield ["its source and others", *known.cells(), "", ""]
        unseen, judge = self.splits.unseen, np.isin(self.sources, [*judges()])
        yield ["all but its source", *self._cells(every, unseen)]
        if judge.any():
            yield ["the same, of sources that judge", *self._cells(judge, Told(unseen.seconds[judge], unseen.inside[judge]))]
        for kind in KINDS:
            if self.splits.rows(KINDS[kind]).any():
                yield [f"nothing of {kind}", *self._cells(*self.splits.without(kind))]

    def _cells(self, rows: np.ndarray, told: Told) -> list[str]:
        seconds, inside = np.full(len(rows), np.nan), np.zeros(len(rows), dtype=bool)
        seconds[rows], inside[rows] = told.seconds, told.inside
        found = self.figures(seconds, rows)
        assert found is not None
        by = [inside[rows & (self.sources == source)].mean() for source in dict.fromkeys(self.sources[rows])]
        return [*found.cells(), percent(float(np.mean(by))), percent(float(inside[rows].mean()))]

    def chips(self) -> Iterator[list[str]]:
        """Chip by chip, ourselves and the fixed share, both without a run's source."""
        for family, chosen in FAMILIES.items():
            rows = self.splits.rows(chosen)
            pair = [self.figures(self.seconds[name], rows) for name in (OURS, SHARE)]
            if all(pair):
                cells = [f"{percent(one.of_sources)}, {percent(one.median)}" for one in pair if one]
                yield [family, str(int(rows.sum())), str(pair[0].sources if pair[0] else 0), *cells]


def _told(believed: PredictedRun, seconds: float) -> PredictedRun:
    assert believed.prediction is not None
    return replace(believed, prediction=replace(believed.prediction, step_time_s=seconds))


def fixed_share(cases: Sequence[TableCase], measured: np.ndarray) -> np.ndarray:
    """(n,) seconds of the model's operations at one share of the peak: the median of the other sources' medians."""
    ideal = np.array(
        [case.global_batch * float(case.shape.model_flops()) / (case.device.peak(case.precision) * case.row["gpus"]) for case in cases]
    )
    sources = np.array([case.row["source"] for case in cases])
    shares = {source: float(np.median((ideal / measured)[sources == source])) for source in dict.fromkeys(sources)}
    others = [statistics.median(share for other, share in shares.items() if other != source) for source in sources]
    return np.asarray(ideal / np.array(others))


def asked(predictor: Predictor, cases: Sequence[TableCase]) -> np.ndarray:
    """(n,) seconds of a peer; NaN where it cannot say, for reasons that stderr has."""
    found, why = np.full(len(cases), np.nan), defaultdict[str, int](int)
    for i, case in enumerate(cases):
        try:
            found[i] = predictor.seconds(case)
        except Unsaid as reason:
            why[str(reason)] += 1
    for text, count in sorted(why.items(), key=lambda item: -item[1])[:8]:
        print(f"  {count:5d} runs: {text}", file=sys.stderr)
    return found


def bench_of(rows: Sequence[MeasuredRun], peers: Mapping[str, Path]) -> Bench:
    """All predictions. ``ConfigError`` for a folder without the peer."""
    cases, measured = timed_cases(rows)
    splits = Splits.of(cases, measured)
    believed = [PredictedRun(case.row, case, found, "") for case, found in zip(cases, predict_rows(cases))]
    seconds = {OURS: splits.unseen.seconds, SHARE: fixed_share(cases, splits.measured)}
    for name, folder in peers.items():
        print(f"{name}:", file=sys.stderr)
        try:
            peer = PEERS[name](folder)
        except ImportError as error:
            raise ConfigError(
                f"--peer {name}={folder} cannot be used: {error}; give a clone of its repository, with what it needs"
            ) from None
        seconds[name] = asked(peer, cases)
    return Bench(splits, believed, seconds)


def block(bench: Bench) -> str:
    """The tables of the page."""
    interval = ["in the interval: sources", "in the interval: runs"]
    tables = {
        "What was known": (["known", *HEADS, *interval], bench.told()),
        "On what each can express": (["predictor", *HEADS, "ours on the same runs"], bench.predictors()),
        "On what all can express": (["predictor", *HEADS], bench.common()),
        "Chip by chip": (["chips", "runs", "sources", OURS, SHARE], bench.chips()),
    }
    return "\n".join(f"## {title}\n\n{table(heads, list(rows))}" for title, (heads, rows) in tables.items())


def peer_of(text: str) -> tuple[str, Path]:
    """NAME=FOLDER of the command line."""
    name, _, folder = text.partition("=")
    if name not in PEERS or not folder:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=FOLDER with a name of {', '.join(PEERS)}")
    return name, Path(folder)


def main(argv: list[str] | None = None) -> int:
    """0, or 2 for tables that cannot be read, splits that have changed or a peer that is not there."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.layoutbench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", nargs="*", metavar="RAW.csv", type=Path)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=FOLDER", type=peer_of, help=f"one of {', '.join(PEERS)}")
    parser.add_argument("--freeze", action="store_true", help="take the sources of these tables for the splits from now on")
    parser.add_argument("--write", action="store_true", help=f"write the tables into {PAGE.relative_to(ROOT)}")
    given = parser.parse_args(argv)

    def make() -> str:
        rows = distinct([rows_of(path) for path in [*sorted(SHIPPED.glob("*.csv")), *given.tables]])
        cases, _ = timed_cases(rows)
        if given.freeze:
            freeze(cases)
        check(cases)
        return block(bench_of(rows, dict(given.peer)))

    return told(make, MARKS, given.write)


if __name__ == "__main__":
    sys.exit(answered(main))
