"""Policies of other tuners on the sweeps of published tables, ours beside them.

    python -m benchmarks.layoutbench.tuners TABLE.csv ... [--doubt 0.1] [--write]

TABLE.csv are canonical tables. A tuner is what its repository says it measures, in which order, and what it leaves out because of a run
before; every trial that it makes runs to its end. Ours is ``benchmarks.replay``'s: constants and widths of all sources but the sweep's.
Printed for each: how often the layout it names is within the tolerance of the sweep's best, how far behind it is, trials, and GPU-hours
against the whole grid's. Minutes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.console import answered
from benchmarks.history.__main__ import ROOT
from benchmarks.layoutbench.page import PAGE, percent, table, told
from benchmarks.replay.__main__ import searches
from benchmarks.replay.trials import MIN_ROWS, MeasuredSweep, grid_gpu_hours, replay
from benchmarks.spreads import left_out
from launcher.config.search import SearchConfig
from launcher.cost.inputs.layouts import LAYOUT_DTYPE
from trainer.shared.run.errors import ConfigError

MARKS = ("<!-- figures: python -m benchmarks.layoutbench.tuners -->\n", "<!-- end of figures of tuners -->\n")
STEPS = 10
"""Steps of a trial, warm-up included."""
DRAWS = 20
"""Orders of a tuner that draws its trials; its figures are their means."""

Layout = dict[str, Any]
"""The fields of a layout that a tuner knows, and ``rest``: everything else that the rows of a sweep differ in."""


@dataclass(frozen=True)
class Rule:
    """Leaves a layout out because of a run, or of a layout left out, that differs from it in ``fields`` alone and is ``like`` this."""

    fields: tuple[str, ...]
    ran: bool  # the run ended well; False: it ran out of memory
    like: Callable[[Layout, Layout], bool]  # (the run's, the one in question)

    def holds(self, past: Layout, ran: bool, asked: Layout) -> bool:
        return ran == self.ran and all(past[name] == asked[name] for name in asked if name not in self.fields) and self.like(past, asked)


@dataclass(frozen=True)
class Tuner:
    """Measures all in ``order``, except for ``rules``, until ``patience`` trials in a row were no faster or ``most`` were made."""

    name: str
    order: Callable[[Layout], Any] | None  # None: drawn
    rules: tuple[Rule, ...] = ()
    patience: int | None = None
    most: int | None = None


def _larger(name: str) -> Callable[[Layout, Layout], bool]:
    return lambda past, asked: bool(past[name] > asked[name])


def _smaller(name: str) -> Callable[[Layout, Layout], bool]:
    return lambda past, asked: bool(past[name] < asked[name])


def _more_frugal(past: Layout, asked: Layout) -> bool:
    """No larger micro-batch, no less recomputed, as much cut along the sequence: if that did not fit, this does not."""
    same = past["tensor"] * past["pipeline"] == asked["tensor"] * asked["pipeline"] and past["tensor"] >= asked["tensor"]
    return bool(
        same
        and past["micro_batch"] <= asked["micro_batch"]
        and past["recompute"] >= asked["recompute"]
        and past["sequence_parallel"] >= asked["sequence_parallel"]
    )


FLAGSCALE = (
    Rule(("micro_batch",), True, _larger("micro_batch")),
    Rule(("recompute",), True, _smaller("recompute")),
    Rule(("sequence_parallel",), True, _larger("sequence_parallel")),
    Rule(("micro_batch", "recompute", "sequence_parallel", "tensor", "pipeline"), False, _more_frugal),
)
"""flagscale/runner/auto_tuner/prune/history.py, as of 03fc5a52: a run with a larger micro-batch, without recomputation or with sequence
parallelism is taken to be faster; a layout that needs at least the memory of a run that ran out of it is taken not to fit."""
PADDLE = (
    Rule(("micro_batch",), True, _larger("micro_batch")),
    Rule(("micro_batch",), False, _smaller("micro_batch")),
    Rule(("stage",), True, _smaller("stage")),
    Rule(("stage",), False, _larger("stage")),
    Rule(("recompute",), True, _smaller("recompute")),
    Rule(("recompute",), False, _larger("recompute")),
    Rule(("virtual_pipeline",), False, _larger("virtual_pipeline")),
)
"""python/paddle/distributed/auto_tuner/prune.py, as of 7551640c: much the same; a lower stage of ZeRO that runs is taken to be faster."""

TUNERS = (
    Tuner(
        "FlagScale",
        lambda one: (one["data"], one["tensor"], one["pipeline"], one["context"], one["expert"], -one["stage"], -one["sequence_parallel"],
                     one["micro_batch"], -one["virtual_pipeline"], -one["recompute"]),
        FLAGSCALE,
    ),
    Tuner(
        "PaddlePaddle",
        lambda one: (-one["tensor"], -one["pipeline"], -one["virtual_pipeline"], -one["stage"], one["micro_batch"], -one["recompute"]),
        PADDLE,
    ),
    Tuner("DeepSpeed, grid", lambda one: (one["stage"], one["micro_batch"]), patience=5, most=50),
    Tuner("DeepSpeed, random", None, patience=5, most=50),
)  # fmt: skip
"""Orders are those of their candidates: FlagScale's ``build_space``, Paddle's ``memory_sort``, DeepSpeed's stages of ZeRO one after
the other. DeepSpeed tunes no degree of parallelism: its tuner is given the sweep's layouts as experiments, with its defaults
(autotuning/constants.py), and its ``model_based`` kind, which trains a ranker of its own, is not here."""


@dataclass(frozen=True)
class Outcome:
    """The result of a tuner on a sweep."""

    behind: float | None  # how far its choice is behind the best; None: nothing ran
    trials: float
    share: float  # of the grid's GPU-hours


def layouts_of(sweep: MeasuredSweep) -> list[Layout]:
    """Returns the fields of each trial that a tuner sees."""
    rest = [(case.global_batch, repr((case.trainer, case.constants)), case.row["trainer"]) for case in sweep.cases]
    known = ("params", "grads", "optimizer")
    found = []
    for case, other in zip(sweep.cases, rest):
        fields = {name: case.layout[name].item() for name in LAYOUT_DTYPE.names or () if name not in known}
        stage = next((3 - i for i, name in enumerate(known) if case.layout[name] != 1), 0)
        found.append({**fields, "stage": stage, "rest": other})
    return found


def tuned(sweep: MeasuredSweep, tuner: Tuner, order: Sequence[int], hours: np.ndarray) -> Outcome:
    """Runs a tuner over the trials in ``order``; each costs ``hours`` (n,)."""
    layouts, ran = layouts_of(sweep), np.isfinite(sweep.seconds)
    past: list[tuple[Layout, bool]] = []
    tried: list[int] = []
    best, since = np.inf, 0
    for i in order:
        asked = layouts[i]
        reasons = (then for seen, then in past for rule in tuner.rules if rule.holds(seen, then, asked))
        inherited = next(reasons, None)
        if inherited is not None:
            past.append((asked, inherited))
            continue
        tried.append(i)
        if ran[i] or sweep.out_of_memory[i]:  # what failed for another reason says nothing of its neighbours
            past.append((asked, bool(ran[i])))
        since = 0 if sweep.cost[i] < best else since + 1
        best = min(best, float(sweep.cost[i]))
        if since == tuner.patience or len(tried) == tuner.most:
            break
    behind = best / float(sweep.cost.min()) - 1 if np.isfinite(best) else None
    return Outcome(behind, len(tried), float(hours[tried].sum() / hours.sum()))


def outcomes(sweep: MeasuredSweep, tuner: Tuner, settings: SearchConfig) -> list[Outcome]:
    """Returns one result, or ``DRAWS`` of them for a tuner that draws."""
    hours = grid_gpu_hours(sweep, settings, STEPS)
    if tuner.order is None:
        drawn = np.random.default_rng(1)
        return [tuned(sweep, tuner, drawn.permutation(len(sweep)).tolist(), hours) for _ in range(DRAWS)]
    layouts, order = layouts_of(sweep), tuner.order
    return [tuned(sweep, tuner, sorted(range(len(sweep)), key=lambda i: order(layouts[i])), hours)]


def ours(made: Sequence[tuple[MeasuredSweep, Any]], settings: SearchConfig) -> list[Outcome]:
    """Runs the search of ``launcher.search``, each sweep without its source."""
    found = [replay(sweep, settings, STEPS, widths=widths) for sweep, widths in made]
    return [Outcome(one.behind, len(one.steps), one.gpu_hours / one.grid_gpu_hours) for one in found]


def line(name: str, found: Sequence[Outcome], tolerance: float) -> list[str]:
    """Returns a row of means over sweeps."""
    behind = [one.behind for one in found if one.behind is not None]
    within = sum(gap <= tolerance for gap in behind) / len(found)
    regret = float(np.mean(behind)) if behind else None
    trials, share = (float(np.mean([getattr(one, name) for one in found])) for name in ("trials", "share"))
    return [name, percent(within), percent(regret), f"{trials:.1f}", percent(share)]


def compared(tables: Sequence[str], settings: SearchConfig) -> str:
    """Returns the tuners and our search on the sweeps of ``tables``, as a table. Raises ``ConfigError`` if they hold none."""
    made = searches(tables, left_out(tables))
    if not made:
        raise ConfigError(f"{' '.join(tables)} hold no sweep: {MIN_ROWS} measured rows of one question at least")
    rows = [line("ours", ours(made, settings), settings.tolerance)]
    for tuner in TUNERS:
        found = [one for sweep, _ in made for one in outcomes(sweep, tuner, settings)]
        rows.append(line(tuner.name, found, settings.tolerance))
    size = float(np.mean([len(sweep) for sweep, _ in made]))
    sources = len({sweep.cases[0].row["source"] for sweep, _ in made})
    heads = ["tuner", f"within {percent(settings.tolerance)} of the best", "regret", "trials", "of the grid's GPU-hours"]
    return f"{len(made)} sweeps of {sources} sources, {size:.1f} trials each.\n\n{table(heads, rows)}"


def main(argv: list[str] | None = None) -> int:
    """0, or 2 for tables without a sweep."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.layoutbench.tuners", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", nargs="+", metavar="TABLE.csv")
    parser.add_argument("--doubt", type=float, default=0.1, help="of our own search")
    parser.add_argument("--write", action="store_true", help=f"write the table into {PAGE.relative_to(ROOT)}")
    given = parser.parse_args(argv)
    return told(lambda: compared(given.tables, SearchConfig(doubt=given.doubt)), MARKS, given.write)


if __name__ == "__main__":
    sys.exit(answered(main))
