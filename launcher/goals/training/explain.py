"""One predicted layout: seconds and bytes by part, measured runs nearby, and a picture of the simulated pipeline."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from launcher import results
from launcher.config import Config
from launcher.config.command import check_layout
from launcher.config.hardware import typed
from launcher.config.rules import settle
from launcher.cost.inputs.case import Case
from launcher.cost.inputs.layouts import to_table
from launcher.cost.known import KnownRun, asked_cells, distances_from, nearest_runs, rates_assumed, unmeasured
from launcher.cost.time.matmul import per_line
from launcher.cost.time.products import off_lines
from launcher.goals.views import Answer, Entry, Grid, Line, View, shares_of
from launcher.labels import interval, percent, plural, shown
from launcher.named_files import write_named
from launcher.planning.layout_names import layout_of, name_of
from launcher.planning.plan import Plan
from launcher.planning.space import REDUNDANT, RULES, redundancies
from launcher.results.predicted_timeline import simulated
from launcher.results.timeline import picture as drawing
from trainer.shared.run.derived import resolve_model, world_size_of
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.schema import LayoutConfig

DRAWN = 160
"""The most computations of a rank that a picture shows: more would be stripes."""


def explained(
    config: Config, planned: Plan, what: str, entry: Callable[[int], dict[str, Any]], heading: str, picture: Path | None
) -> Answer:
    """Returns the whole prediction of the layout ``what``, and draws its timeline into a file, if one is named."""
    row = chosen(config, planned, what)
    case = dataclasses.replace(planned.case, table=planned.space.table[row : row + 1])
    if picture is not None:
        draw(case, planned.layout(row), heading, picture)
    known, learnt = nearest_runs(planned.case, row), config.cluster.hardware.learnt
    one = entry(row) | {
        "timeline": None if picture is None else str(picture),
        "known": [{"distance": run.distance, **run.cells} for run in known],
        "unmeasured": unmeasured(planned.prediction(row).time),
        "learnt_distance": distances_from(learnt["places"], [asked_cells(planned.case, row)])[0].item() if learnt.get("places") else None,
        "off_lines": off_lines(case),
    }
    said = "" if picture is None else f"the simulated pipeline (its first micro-batches, if there are many) is drawn in {picture}"
    return Answer(one, _shown(config, case, one, planned.prediction(row).why, known), said)


def _rates(case: Case) -> str:
    """The rate of a case's products in words."""
    return f"{case.device.rate(case.precision) / 1e12:,.0f} TFLOP/s of {case.device.peak(case.precision) / 1e12:,.0f} in {case.precision}"


def _shown(config: Config, case: Case, one: Entry, why: str, known: Sequence[KnownRun]) -> Iterator[View]:
    yield Line(why, one["name"], wraps=True)
    yield Line(
        f"80 % of such steps take {interval(one['interval_s'])}; it is the fastest of all with a probability of {percent(one['fastest'])}"
    )
    yield shares_of("time of a step", one["time"], "{:.4g} s".format)
    yield shares_of("memory of the fullest rank", one["memory"], lambda size: f"{size / 1e9:.2f} GB")
    if one["host_bytes"]:
        yield shares_of("host memory of a rank", one["host"], lambda size: f"{size / 1e9:.2f} GB")
    if broken := one["off_lines"]:
        yield Line(
            f"on a rank, {per_line(case.precision)} does not divide {', '.join(f'{size:,}' for size in broken)}: weight products with "
            f"{'this size' if len(broken) == 1 else 'these sizes'} take {1 / case.constants.unaligned:.2f} times as long as others"
        )
    yield Grid(("closest known runs", "model", "layout", "precision", "doublings away", "measured"), [closest(run) for run in known])
    if (own := one["learnt_distance"]) is not None:
        hardware = config.cluster.hardware
        runs = plural(len(hardware.learnt.get("runs", [])), "run")
        yield Line(f"{typed(hardware.name)} has learnt from {runs} here, the nearest of them {own:.1f} doublings away")
    if rates_assumed(config.cluster.hardware):
        yield Line(
            f"nobody fitted the rates of {typed(config.cluster.hardware.name)} to runs: {_rates(case)} are assumed; "
            "'trireme doctor' measures them, and one run given to 'trireme calibrate' corrects them"
        )
    for name, share in one["unmeasured"].items():
        yield Line(f"{name} is {percent(share, digits=0)} of the step, more than in known runs: this rests on no measurement")


def closest(run: KnownRun) -> tuple[str, ...]:
    """Returns a known run near a prediction, and the error of its own prediction."""
    cells = run.cells
    return (
        f"{cells['source']}: {cells['gpus']} x {cells['hardware']}",
        f"{cells['layers']} layers of {cells['hidden']}, seq {cells['seq']}",
        f"t{cells['tensor']} p{cells['pipeline']} mb{cells['micro_batch']} recompute {cells['recompute']}",
        cells["precision"],
        f"{run.distance:.1f}",
        f"{percent(float(cells['missed']), signed=True)} of predicted",
    )


def mostly(one: Entry) -> str:
    """Returns the three largest losses of a layout: parts of its step other than matrix products and attention."""
    useful = ("matrix products", "attention")
    shares = {name: seconds / one["step_time_s"] for name, seconds in one["time"].items() if name not in useful}
    largest = sorted(shares.items(), key=lambda item: -item[1])[:3]
    return ", ".join(f"{name} {percent(share, digits=0)}" for name, share in largest if share >= 0.005)


def draw(case: Case, layout: LayoutConfig, heading: str, path: Path) -> None:
    """Draws the simulated pipeline into a file, in the colours of the report."""
    drawn = simulated(case, layout, DRAWN)
    assert drawn is not None, "a step has computations"
    style = Path(results.__file__).with_name("report.css").read_text()
    title = shown(f"{heading}: {name_of(layout)}")
    write_named(path, str(drawing(drawn, title)).replace(">", f"><style>{style}</style>", 1), "--svg")


def chosen(config: Config, planned: Plan, what: str) -> int:
    """Returns the row of ``what``: a place in the list, or a layout's name."""
    if what.isdecimal():
        if not 1 <= int(what) <= len(planned.order):
            raise ConfigError(f"--explain={what} is not a place of the list; it has {len(planned.order)}")
        return int(planned.order[int(what) - 1])
    layout = layout_of(what)
    row = planned.find(layout)
    if row is None:
        check_layout(config.trainer, settle(dataclasses.replace(config, layout=layout)).layout)  # a broken rule makes the best message
        raise ConfigError(f"layout {what!r} {why_absent(config, layout)}")
    return row


def why_absent(config: Config, layout: LayoutConfig) -> str:
    """Returns the reason why a plan does not contain a layout that obeys the rules."""
    used, world = world_size_of(layout), config.cluster.world_size
    if used != world:
        return f"uses {used} of {world} ranks, and a plan is of layouts that use all; change its degrees, or cluster.nodes"
    code = redundancies(to_table([layout]), resolve_model(config.model), config.cluster.gpus_per_node, config.search.space)[0]
    if code >= 0:
        return f"is left out ({(RULES + REDUNDANT)[code]}); --top=N lists more of those that are in"
    return "is outside of search.space, or of the values given to layout keys; widen them, as with search.space.sharding=all"
