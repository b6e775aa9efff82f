"""Searches by replay over every sweep of some tables, each predicted without its source: does the search keep its word?

    python -m benchmarks.replay TABLE.csv ... [--doubt 0.1 0.03 ...] [--least 2] [--logs] [--svg FILE]

TABLE.csv are canonical tables. Constants are fitted, and widths learnt, to all other sources (``benchmarks.spreads``); then the search of
``launcher.search`` runs on the measured times. Printed for each doubt: how many searches end within the tolerance of the best, how many
stopped wrongly (the search said that nothing better was left, and there was), trials, and GPU-hours against the grid's. ``--least``: rows
that ran which a sweep needs, 5 by default; with 2, all sweeps in which there is a choice. ``--logs`` repeats the search with the first
doubt for each published log that prints every step (``benchmarks.step_scatter``), with steps that scatter as that log's do: tables tell
one time of a run, and a search runs as many steps of a trial as it takes to know that. ``--svg`` draws the reliability: what was promised
against how often it was wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.console import answered
from benchmarks.fit import with_parameters
from benchmarks.replay.trials import LAYOUTS, MIN_ROWS, MeasuredSweep, Replay, replay, tables
from benchmarks.spreads import LeftOut, left_out, likeliest, runs_of
from benchmarks.step_scatter import Drawn, logs
from launcher.config.hardware import hardware_files
from launcher.config.search import SearchConfig
from launcher.config.uncertainty import Widths, shipped_widths
from launcher.named_files import check_file, write_named
from launcher.search.steps import OWN_STEPS
from trainer.shared.run.errors import ConfigError

PROMISES = (0.3, 0.2, 0.1, 0.05, 0.03, 0.01)
SEED = 1


def searches(paths: Sequence[str], found: LeftOut, least: int = MIN_ROWS) -> list[tuple[MeasuredSweep, Widths]]:
    """Every sweep with what is known without its source."""
    missed = found.missed()
    whole = likeliest(missed, shipped_widths())
    made, widths = [], dict[str, Widths]()
    for sweep in tables(runs_of(paths), hardware_files(), least=least):
        source = sweep.cases[0].row["source"]
        if source not in widths:
            widths[source] = likeliest([one for one in missed if one.source != source], whole)
        cases = []
        for case in sweep.cases:
            device, constants = with_parameters(case.device, case.constants, found.fitted.get(source, {}))
            cases.append(dataclasses.replace(case, device=device, constants=constants))
        made.append((dataclasses.replace(sweep, cases=cases), widths[source]))
    return made


def stopped_wrongly(one: Replay) -> bool:
    """Whether a layout was left that is faster by more than the tolerance."""
    return one.behind is None or 1 / (1 + one.behind) < 1 - one.tolerance


def figures(replays: Sequence[Replay], sources: Sequence[str]) -> dict[str, float]:
    """What the searches of sweeps of ``sources`` came to."""
    wrong = np.array([stopped_wrongly(each) for each in replays])
    by_source = [wrong[np.array(sources) == source].mean() for source in dict.fromkeys(sources)]
    shares = [each.gpu_hours / each.grid_gpu_hours for each in replays]
    spent, grid = sum(each.gpu_hours for each in replays), sum(each.grid_gpu_hours for each in replays)
    return {
        "within": float(np.mean([each.behind is not None and each.behind <= each.tolerance for each in replays])),
        "wrong": float(wrong.mean()),
        "by source": float(np.mean(by_source)),
        "believed": float(np.mean([each.doubt or 0.0 for each in replays])),
        "trials": float(np.mean([len(each.steps) for each in replays])),
        "of the grid": spent / grid,
        "mean share": float(np.mean(shares)),
    }


def drawing(points: Sequence[tuple[float, float]], count: int) -> str:
    """Promised doubt against the share of searches that were wrong, on logarithmic axes, with the range that chance allows."""
    left, top, side, low = 70, 20, 360, np.log10(0.005)

    def across(value: float) -> float:
        return left + side * (np.log10(max(value, 0.005)) - low) / -low

    def up(value: float) -> float:
        return top + side - (across(value) - left)

    lines = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 460 450" font-family="sans-serif" font-size="12" fill="none" stroke="#888">'
    ]
    lines.append(f'<path d="M{left},{top}V{top + side}H{left + side}M{left},{top + side}L{left + side},{top}" stroke-dasharray="4 3"/>')
    for tick in (0.01, 0.03, 0.1, 0.3, 1.0):
        words = f"{100 * tick:g} %"
        lines.append(f'<g fill="#444" stroke="none"><text x="{across(tick):.0f}" y="{top + side + 18}" text-anchor="middle">{words}</text>')
        lines.append(f'<text x="{left - 8}" y="{up(tick) + 4:.0f}" text-anchor="end">{words}</text></g>')
    for promised, wrong in points:
        chance = np.sqrt(max(wrong * (1 - wrong), 1 / count) / count)
        x, ends = across(promised), (up(max(wrong - chance, 0.0)), up(wrong + chance))
        lines.append(f'<path d="M{x:.0f},{ends[0]:.0f}V{ends[1]:.0f}" stroke="#1f6fb2"/>')
        lines.append(
            f'<circle cx="{x:.0f}" cy="{up(wrong):.0f}" r="4" fill="#1f6fb2" stroke="none"><title>{promised:g}: '
            f"{wrong:.1%}</title></circle>"
        )
    lines.append(
        f'<g fill="#444" stroke="none"><text x="{left + side / 2}" y="{top + side + 42}" text-anchor="middle">promised: search.doubt</text>'
    )
    lines.append(
        f'<text x="16" y="{top + side / 2}" text-anchor="middle" transform="rotate(-90 16 {top + side / 2})">searches '
        f"that stopped wrongly</text></g>"
    )
    return "\n".join([*lines, "</svg>"]) + "\n"


def _line(doubt: float, found: dict[str, float]) -> str:
    return (
        f"{doubt:5.2f}  {found['within']:10.1%} {found['wrong']:6.1%} {found['by source']:17.1%} {found['believed']:9.1%} "
        f"{found['trials']:7.1f} {found['of the grid']:24.1%} {found['mean share']:11.1%}"
    )


def main(argv: list[str] | None = None) -> int:
    """0, or 2 for tables that hold no search."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", metavar="TABLE.csv", nargs="+")
    parser.add_argument("--doubt", type=float, nargs="+", default=PROMISES)
    parser.add_argument("--least", type=int, default=MIN_ROWS, help="rows that ran which a sweep needs, 2 at least")
    parser.add_argument("--logs", action="store_true", help="also with steps that scatter as in each published log")
    parser.add_argument("--svg", metavar="FILE", type=Path, help="draw the reliability")
    given = parser.parse_args(argv)
    try:
        if given.svg is not None:
            check_file(given.svg, "--svg")
        if not all(0 <= doubt <= 1 for doubt in given.doubt):
            raise ConfigError(f"--doubt={max(given.doubt, key=abs):g} is no probability; give numbers from 0 to 1")
        if given.least < 2:
            raise ConfigError(f"--least={given.least} leaves nothing to choose; give 2 or more")
        made = searches(given.tables, left_out(given.tables), given.least)
        if not made:
            few = f"at least {given.least} measured rows of one question, of {min(given.least, LAYOUTS)} layouts"
            raise ConfigError(f"{' '.join(given.tables)} hold no sweep to search: {few}")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return ConfigError.exit_code
    points, sources = [], [str(sweep.cases[0].row["source"]) for sweep, _ in made]
    print(f"{len(made)} sweeps of {len(set(sources))} sources, each predicted without its source")
    print("doubt  within 2 %  wrong  each source once  believed  trials  of the grid's GPU-hours  mean share")
    for doubt in given.doubt:
        found = figures([replay(sweep, SearchConfig(doubt=doubt), widths=widths) for sweep, widths in made], sources)
        points.append((doubt, found["wrong"]))
        print(_line(doubt, found))
    for log in logs() if given.logs else []:
        if len(log.factors) >= OWN_STEPS:
            drawn = Drawn(log.factors, np.random.default_rng(SEED))
            settings = SearchConfig(doubt=given.doubt[0])
            found = figures([replay(sweep, settings, widths=widths, scatter=drawn) for sweep, widths in made], sources)
            print(f"{_line(given.doubt[0], found)}  {log.name}")
    if given.svg:
        write_named(given.svg, drawing(points, len(made)), "--svg")
    return 0


if __name__ == "__main__":
    sys.exit(answered(main))
