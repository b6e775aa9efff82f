"""Shows an inference search in report and MLflow: the front as a picture and a table, with the recommendations. Pure.

A sweep's file holds it as the search wrote it; missing or damaged parts are omitted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from launcher import labels
from launcher.results.svg import Scale, across_axis, element, figure, polyline, text, up_axis
from trainer.shared.records.trial_files import positive

WIDE, HIGH = 480, 380
"""Size of the picture in its own units: on a telephone they are hardly less than pixels."""


@dataclass(frozen=True)
class FrontPoint:
    """A way to serve: (seconds of a request, tokens per second and device), predicted and measured."""

    name: str
    predicted: tuple[float, float] | None
    measured: tuple[float, float] | None
    front: bool
    trial: str
    kind: str = "measured"  # what the measured times are

    @property
    def words(self) -> str:
        found = ((self.kind, self.measured), ("predicted", self.predicted))
        parts = [f"{how} {labels.seconds(at[0])} a request, {labels.amount(at[1])} tokens/s a device" for how, at in found if at]
        return f"{self.name}: {'; '.join(parts)}"


def points_of(front: Mapping[str, Any]) -> list[FrontPoint]:
    """The points that a sweep's file holds, the fastest first."""
    listed = front.get("points")
    points = [_point(one) for one in (listed if isinstance(listed, list) else []) if isinstance(one, dict)]
    return sorted((one for one in points if one.predicted or one.measured), key=lambda one: one.measured or one.predicted or (0.0, 0.0))


def _point(one: Mapping[str, Any]) -> FrontPoint:
    predicted, measured = _place(one.get("predicted")), _place(one.get("measured"))
    return FrontPoint(
        str(one.get("name")),
        predicted,
        measured,
        bool(one.get("front")) and measured is not None,
        str(one.get("trial") or ""),
        str(one.get("kind") or "measured"),
    )


def _place(figures: Any) -> tuple[float, float] | None:
    known = figures if isinstance(figures, dict) else {}
    latency, rate = positive(known.get("latency_ms")), positive(known.get("tokens_per_device"))
    return (latency / 1e3, rate) if latency and rate else None


def recommended(front: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    known = front.get("recommended")
    return [(str(goal), one) for goal, one in (known if isinstance(known, dict) else {}).items() if isinstance(one, dict) and "name" in one]


def picture(points: Sequence[FrontPoint]) -> Markup:
    """Draws tokens per second and device over seconds of a request: measured points filled, predicted ones hollow, the front a line."""
    places = [at for one in points for at in (one.predicted, one.measured) if at]
    seconds, rates = zip(*places)
    across = Scale.over(seconds, 62, WIDE - 12, log=max(seconds) > 4 * min(seconds))
    up = Scale.over(rates, HIGH - 44, 24, log=max(rates) > 4 * min(rates))
    parts = [across_axis(across, 24, HIGH - 44, labels.seconds, 4), up_axis(up, 62, WIDE - 12, labels.amount, 5)]
    parts += [text(WIDE - 12, HIGH - 6, "a request takes", "tick", "end"), text(4, 14, "tokens/s a device", "tick")]
    parts.append(polyline([(across(x), up(y)) for one in points if one.front and one.measured for x, y in [one.measured]], "curve w1 c0"))
    for how in ("predicted", "measured"):
        for one in points:
            if at := getattr(one, how):
                kind = "hollow" if how == "predicted" else "point c0" if one.front else "point c5"
                parts.append(element("circle", element("title", one.words), cx=across(at[0]), cy=up(at[1]), r=5, class_=kind))
    return figure(HIGH, "front of throughput over latency", parts, WIDE)


def markdown(front: Mapping[str, Any]) -> str:
    """Returns a table and a list of the same; empty of another search."""
    if not (points := points_of(front)):
        return ""
    lines = ["| on the front | layout | a request | that is | predicted | tokens/s a device | trial |", "|---|---|---|---|---|---|---|"]
    for one in points:
        at = one.measured or (None, None)
        expected = labels.seconds(one.predicted[0]) if one.predicted else ""
        cells = ["*" if one.front else "", one.name, labels.seconds(at[0]), one.kind if one.measured else "", expected]
        lines.append(f"| {' | '.join([*cells, labels.amount(at[1]), one.trial])} |")
    return "\n".join([*lines, "", *(f"- {goal}: {one['name']} `{one.get('command', '')}`" for goal, one in recommended(front))])
