"""The report's charts of times, memory, losses and predictions, from plain numbers to SVG. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from markupsafe import Markup

from launcher import labels
from launcher.results.svg import WIDTH, Scale, Words, across_axis, element, figure, line, number, polyline, rectangle, text, up_axis

LEFT, ROW = 260, 26
"""Room for the trials' names, height of a trial's row."""
POINTS = 400
"""Points of a curve or strip at most: a chart has no more room."""
STATES = ("weights", "gradients", "optimizer", "activations")
PHASES = ("forward", "backward", "communication", "optimizer", "data", "other")


@dataclass(frozen=True)
class Series:
    """One trial's numbers. ``colour`` is its number in the palette, the same in every chart."""

    name: str
    colour: int
    times: Sequence[float] = ()  # step times after warm-up, s
    interval: tuple[float, float] | None = None  # where the median may be, s
    predicted: float | None = None  # step time, s
    losses: Mapping[int, float] = field(default_factory=dict)  # by step
    parts: Mapping[str, float] = field(default_factory=dict)  # what a stacked bar is made of
    mark: float | None = None  # a value marked on the stacked bar
    foreseen: float | None = None  # its prediction


def step_times(series: Sequence[Series]) -> Markup:
    """A row per trial: every measured step, the box from the first to the third quartile, the median, its interval, the prediction."""
    values = [t for s in series for t in (*s.times, *([s.predicted] if s.predicted else []))]
    scale = Scale.over(values, LEFT, WIDTH - 20, log=max(values) > 8 * min(values))
    rows = [part for index, one in enumerate(series) for part in _strip(one, scale, 4 + ROW * index)]
    return figure(ROW * len(series) + 26, "step times", [across_axis(scale, 4, 4 + ROW * len(series), labels.seconds), *rows])


def _strip(one: Series, scale: Scale, y: float) -> list[Markup]:
    middle, times = y + ROW / 2, sorted(one.times)
    low, median, high = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else [times[0]] * 3
    least, most = one.interval or (median, median)
    words = f"median {labels.seconds(median)}, from {labels.seconds(least)} to {labels.seconds(most)}"
    dots = [element("circle", cx=scale(t), cy=middle, r=2.2) for t in thin(list(one.times))]
    parts = [
        text(LEFT - 10, middle + 4, one.name, "label", "end"),
        rectangle(scale(low), y + 6, scale(high) - scale(low), ROW - 12, f"box c{one.colour}"),
        element("g", *dots, class_=f"dots c{one.colour}"),
        element("g", element("title", words), line(scale(median), y + 3, scale(median), y + ROW - 3, "median"),
                line(scale(least), middle, scale(most), middle, "median")),
    ]  # fmt: skip
    return parts + ([_diamond(scale(one.predicted), middle, f"predicted {labels.seconds(one.predicted)}")] if one.predicted else [])


def stacked(series: Sequence[Series], order: Sequence[str], words: Words) -> Markup:
    """A bar per trial made of its ``parts``, with ``mark`` as a line across and ``foreseen`` as a diamond."""
    values = [v for s in series for v in (sum(s.parts.values()), s.mark or 0.0, s.foreseen or 0.0)]
    scale = Scale.over(values, LEFT, WIDTH - 80, zero=True)
    bars = [part for index, one in enumerate(series) for part in _bar(one, order, words, scale, 4 + ROW * index)]
    return figure(ROW * len(series) + 26, "parts of each trial", [across_axis(scale, 4, 4 + ROW * len(series), words), *bars])


def _bar(one: Series, order: Sequence[str], words: Words, scale: Scale, y: float) -> list[Markup]:
    parts, at, middle = [text(LEFT - 10, y + ROW / 2 + 4, one.name, "label", "end")], 0.0, y + ROW / 2
    for part in order:
        value = one.parts.get(part, 0.0)
        if value > 0:
            parts.append(rectangle(scale(at), y + 4, scale(at + value) - scale(at), ROW - 8, part, f"{part} {words(value)}"))
            at += value
    if one.mark:
        title = element("title", f"measured {words(one.mark)}")
        parts.append(element("g", title, line(scale(one.mark), y + 1, scale(one.mark), y + ROW - 1, "median")))
    if one.foreseen:
        parts.append(_diamond(scale(one.foreseen), middle, f"predicted {words(one.foreseen)}"))
    reach = max(at, one.mark or 0.0, one.foreseen or 0.0)
    return [*parts, text(scale(reach) + 9, middle + 4, words(one.mark or at), "tick")]


def loss_curves(series: Sequence[Series]) -> Markup:
    """All loss curves on one another: wide ones below, narrow ones above, so that curves that coincide can all be seen."""
    height = 260
    steps = [step for s in series for step in s.losses]
    across, up = Scale.over(steps, 70, WIDTH - 20), Scale.over([v for s in series for v in s.losses.values()], height - 34, 10)
    parts = [_step_axis(across, up), up_axis(up, 70, WIDTH - 20, "{:.4g}".format), text(WIDTH - 20, height - 4, "step", "tick", "end")]
    for index, one in enumerate(series):
        points = [(across(step), up(loss)) for step, loss in thin(sorted(one.losses.items())) if math.isfinite(loss)]
        parts.append(polyline(points, f"curve w{max(0, 3 - index)} c{one.colour}", one.name))
    return figure(height, "loss by step", parts)


def loss_differences(series: Sequence[Series]) -> Markup | None:
    """Returns each curve's relative distance from the first, by step. None if no step differs."""
    height, first = 150, series[0]
    curves = [(one, [(step, gap) for step, gap in relative_gaps(first, one) if gap > 0]) for one in series[1:]]
    gaps = [gap for _, curve in curves for _, gap in curve]
    if not gaps:
        return None
    across, up = Scale.over(first.losses, 70, WIDTH - 20), Scale.over(gaps, height - 34, 10, log=True)
    parts = [_step_axis(across, up), up_axis(up, 70, WIDTH - 20, "{:.0e}".format), text(WIDTH - 20, height - 4, "step", "tick", "end")]
    for one, curve in curves:
        dots = [element("circle", cx=across(step), cy=up(gap), r=2) for step, gap in thin(curve)]
        parts.append(element("g", element("title", one.name), *dots, class_=f"dots c{one.colour}"))
    return figure(height, "relative difference of losses by step", parts)


def relative_gaps(one: Series, other: Series) -> list[tuple[int, float]]:
    """``|a - b| / max(|a|, |b|)`` of two loss curves at every step that both have; a step where only one is a number counts as 1."""
    gaps = []
    for step in sorted(one.losses.keys() & other.losses.keys()):
        a, b = one.losses[step], other.losses[step]
        if math.isfinite(a) and math.isfinite(b):
            gaps.append((step, abs(a - b) / max(abs(a), abs(b), 1e-300)))
        else:
            gaps.append((step, 0.0 if math.isfinite(a) == math.isfinite(b) else 1.0))
    return gaps


def widest_gap(series: Sequence[Series]) -> tuple[float, int, str, str] | None:
    """The largest relative difference between any two curves: how much, at which step, between whom. None for fewer than two."""
    found = [
        (gap, step, one.name, other.name)
        for index, one in enumerate(series)
        for other in series[index + 1 :]
        for step, gap in relative_gaps(one, other)
    ]
    return max(found, default=None)


def predictions(series: Sequence[Series]) -> Markup:
    """Predicted against measured step time; on the line they agree."""
    known = [(one, statistics.median(one.times), one.predicted) for one in series if one.predicted and one.times]
    values = [value for _, *pair in known for value in pair if value]
    height, log = 300, max(values) > 8 * min(values)
    across, up = Scale.over(values, 80, WIDTH - 20, log=log), Scale.over(values, height - 40, 10, log=log)
    parts = [
        across_axis(across, 10, height - 40, labels.seconds), up_axis(up, 80, WIDTH - 20, labels.seconds),
        line(across(across.low), up(up.low), across(across.high), up(up.high), "agree"),
        text(WIDTH - 20, height - 4, "measured", "tick", "end"), text(84, 14, "predicted", "tick"),
    ]  # fmt: skip
    for one, measured, predicted in known:
        words = f"{one.name}: measured {labels.seconds(measured)}, predicted {labels.seconds(predicted)}"
        dot = element("circle", element("title", words), cx=across(measured), cy=up(predicted or 0.0), r=5, class_=f"point c{one.colour}")
        parts.append(dot)
    return figure(height, "predicted against measured step time", parts)


def thin(values: Sequence) -> Sequence:  # type: ignore[type-arg]
    """At most ``POINTS`` of the values, evenly, the last one included."""
    if len(values) <= POINTS:
        return values
    stride = (len(values) - 1) / (POINTS - 1)
    return [values[round(index * stride)] for index in range(POINTS)]


def _step_axis(across: Scale, up: Scale) -> Markup:
    whole_steps = max(1, min(8, int(across.high - across.low)))  # no ticks between steps
    return across_axis(across, up.start, up.start, "{:g}".format, whole_steps)


def _diamond(x: float, y: float, title: str) -> Markup:
    path = f"M{number(x)} {number(y - 5)}l5 5l-5 5l-5-5z"
    return element("path", element("title", title), d=path, class_="predicted")
