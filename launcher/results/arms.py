"""Shows a search for a loss in report and MLflow: the curves of its arms with bands, and a table. Pure.

A sweep's file holds them as the search wrote them; missing or damaged parts are omitted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from markupsafe import Markup

from launcher import labels
from launcher.results.plots import thin
from launcher.results.svg import WIDTH, Scale, across_axis, element, figure, line, number, polyline, text, up_axis
from trainer.shared.records.trial_files import number as known_number
from trainer.shared.records.trial_files import positive

HEIGHT = 300
COLOURS = 8
"""Colours of the palette."""


@dataclass(frozen=True)
class ArmCurve:
    """An arm's validation losses by seconds: means over its seeds, between the lowest and the highest. ``time``: seconds to the loss, with
    the ends of their interval."""

    name: str
    colour: int
    told: str
    points: Sequence[tuple[float, float, float, float]]  # seconds, mean, lowest, highest
    time: float | None
    interval: tuple[float, float | None] | None

    @property
    def words(self) -> str:
        """Describes the arm in a line."""
        if self.time is None or self.interval is None:
            return f"{self.name}: {self.told}"
        high = "?" if self.interval[1] is None else labels.seconds(self.interval[1])
        return f"{self.name}: {labels.seconds(self.time)} ({labels.seconds(self.interval[0])} to {high}), {self.told}"


def curves_of(front: Mapping[str, Any]) -> list[ArmCurve]:
    """The arms that a sweep's file holds, in its order."""
    listed = front.get("arms")
    known = [one for one in (listed if isinstance(listed, list) else []) if isinstance(one, dict)]
    return [_curve(one, place % COLOURS) for place, one in enumerate(known)]


def _curve(one: Mapping[str, Any], colour: int) -> ArmCurve:
    runs = one.get("curves")
    step_s, by_step = positive(one.get("step_time_s")) or 0.0, dict[float, list[float]]()
    for run in runs.values() if isinstance(runs, dict) else ():
        for step, loss in [pair for pair in run if isinstance(pair, list) and len(pair) == 2] if isinstance(run, list) else ():
            if (at := positive(step)) and (value := known_number(loss)) is not None and math.isfinite(value):
                by_step.setdefault(at, []).append(value)
    points = [(at * step_s, fmean(losses), min(losses), max(losses)) for at, losses in sorted(by_step.items())] if step_s else []
    pair = one.get("time_interval_s")
    ends = (positive(pair[0]), positive(pair[1])) if isinstance(pair, list) and len(pair) == 2 else (None, None)
    interval = None if ends[0] is None else (ends[0], ends[1])
    return ArmCurve(str(one.get("arm")), colour, str(one.get("told") or ""), points, positive(one.get("time_s")), interval)


def picture(curves: Sequence[ArmCurve], target: Any) -> Markup | None:
    """Draws the losses over the seconds of the cluster whose time counts, with the loss to reach and the interval in which each arm reaches
    it. None without any point."""
    values = [value for one in curves for point in one.points for value in point[1:]]
    if not values:
        return None
    goal, bottom = positive(target), HEIGHT - 40
    across = Scale.over([point[0] for one in curves for point in one.points], 70, WIDTH - 20, zero=True)
    up = Scale.over([*values, *([goal] if goal else [])], bottom, 10)
    parts = [across_axis(across, 10, bottom, labels.seconds), up_axis(up, 70, WIDTH - 20, "{:.4g}".format)]
    parts.append(text(WIDTH - 20, HEIGHT - 4, "time on the cluster, validations left out", "tick", "end"))
    for one in curves:
        points = thin(one.points)
        outline = [(across(at), up(high)) for at, _, _, high in points] + [(across(at), up(low)) for at, _, low, _ in reversed(points)]
        path = "M" + "L".join(f"{number(x)} {number(y)}" for x, y in outline) + "z"
        parts.append(element("path", d=path, class_=f"band c{one.colour}"))
        parts.append(polyline([(across(at), up(mean)) for at, mean, _, _ in points], f"curve w1 c{one.colour}", one.words))
    if goal:
        parts.append(line(70, up(goal), WIDTH - 20, up(goal), "agree"))
        parts += [_reached(one, one.time, ends, across, up(goal)) for one in curves if one.time and (ends := _whole(one.interval))]
    return figure(HEIGHT, "validation loss over time", parts)


def _reached(one: ArmCurve, time: float, interval: tuple[float, float], across: Scale, y: float) -> Markup:
    """The interval of an arm's time, as a bar on the line of the loss."""
    low, middle, high = (across(min(max(at, across.low), across.high)) for at in (interval[0], time, interval[1]))
    bar = line(low, y, high, y, f"curve w2 c{one.colour}")
    return element("g", element("title", one.words), bar, element("circle", cx=middle, cy=y, r=5, class_=f"point c{one.colour}"))


def said(front: Mapping[str, Any]) -> list[str]:
    """Returns what the search told of its arms, in words."""
    words = front.get("words")
    return [str(line) for line in words] if isinstance(words, list) else []


def markdown(front: Mapping[str, Any]) -> str:
    """Returns a table of the arms, and the words; empty of another search."""
    if not (curves := curves_of(front)):
        return ""
    rows = [f"| {one.name} | {labels.seconds(one.time)} | {labels.interval(_whole(one.interval))} | {one.told} |" for one in curves]
    return "\n".join(
        ["| arm | time to the loss | between | told |", "|---|---|---|---|", *rows, "", *(f"- {words}" for words in said(front))]
    )


def _whole(interval: tuple[float, float | None] | None) -> tuple[float, float] | None:
    return None if interval is None or interval[1] is None else (interval[0], interval[1])
