"""Compares two sweeps: matched trials, ratios of their step times, differences of losses, and changes of the configuration. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.results.ranking import Measurement
from launcher.trials.store import Record
from trainer.shared.run.read import flatten

UNCOMPARED = ("tracking.", "command.", "cluster.env.", "cluster.hardware.", "layout.data", "run.checkpoint.dir", "data.path")
"""Keys that name places, follow from others, or are compared by a name (hardware)."""
WIDER = math.sqrt(2)
"""An interval that is compared by overlap (83.4 %) has 1.39 standard errors to a side, one of 95 % has 1.96: 1.41 times as many."""


@dataclass(frozen=True)
class MatchedTrial:
    """Trials of two sweeps with the same values of all keys that vary inside the sweeps. Ratios are the second's over the first's."""

    label: str
    first: Measurement
    second: Measurement
    ratio: float  # of median step times
    error: float  # of the logarithm of the ratio: the half width of its 95 % interval
    loss_difference: float | None  # of the last losses, where both made the same number of steps

    @property
    def interval(self) -> tuple[float, float]:
        return self.ratio * math.exp(-self.error), self.ratio * math.exp(self.error)


@dataclass(frozen=True)
class SweepComparison:
    """Matches and differences of two sweeps. ``changed``: key -> value in the first, value in the second."""

    matched: Sequence[MatchedTrial]
    changed: Mapping[str, tuple[str, str]]
    only_first: Sequence[str]
    only_second: Sequence[str]

    @property
    def overall(self) -> tuple[float, float, float] | None:
        """The geometric mean of all ratios, and its 95 % interval by the scatter of the measured steps; None without a match."""
        if not self.matched:
            return None
        mean = sum(math.log(each.ratio) for each in self.matched) / len(self.matched)
        error = math.sqrt(sum(each.error**2 for each in self.matched)) / len(self.matched)
        return math.exp(mean), math.exp(mean - error), math.exp(mean + error)


Trial = tuple[Record, Measurement, Mapping[str, Any]]
"""A trial's record, its measurement, and its ``result.json``."""


def compare(first: Sequence[Trial], second: Sequence[Trial], labels: Mapping[str, str]) -> SweepComparison:
    """Matches the trials of two sweeps. ``labels``: words for trials, by id. Trials without a step time match nothing."""
    described = [[settings(record, result) for record, _, result in trials] for trials in (first, second)]
    varying = sorted(set().union(*(_varying(rows) for rows in described)))
    found: list[dict[tuple[str, ...], Trial]] = []
    for trials, rows in zip((first, second), described, strict=True):
        keyed = {tuple(row.get(key, "") for key in varying): trial for row, trial in zip(rows, trials) if trial[1].step_time_s}
        found.append(keyed)
    one, two = found
    matched = [_matched(one[key], two[key], labels) for key in one if key in two]
    fixed = [{key: value for key, value in rows[0].items() if key not in varying} if rows else {} for rows in described]
    changed = {key: (a, b) for key in sorted({*fixed[0], *fixed[1]}) if (a := fixed[0].get(key, "-")) != (b := fixed[1].get(key, "-"))}
    used = {each.first.trial for each in matched}, {each.second.trial for each in matched}
    only = [[labels[record.id] for record, _, _ in trials if record.id not in ids] for trials, ids in zip((first, second), used)]
    return SweepComparison(sorted(matched, key=lambda each: each.first.step_time_s or 0.0), changed, *only)


def settings(record: Record, result: Mapping[str, Any]) -> dict[str, str]:
    """Returns everything that may change a step time or a loss, by dotted key, as text."""
    flat = flatten({**record.config, "cluster": record.cluster}) if record.config else {}
    found = {key: json.dumps(value) if not isinstance(value, str) else value for key, value in flat.items() if not _is_left_out(key)}
    versions = result.get("versions")
    about = {"code": record.commit, "hardware": (record.cluster.get("hardware") or {}).get("name"), "data": json.dumps(record.reads)}
    about |= {f"version of {name}": version for name, version in versions.items()} if isinstance(versions, dict) else {}
    return found | {name: str(value) for name, value in about.items() if value not in (None, "{}")}


def _is_left_out(key: str) -> bool:
    return key.startswith(UNCOMPARED)


def _varying(rows: Sequence[Mapping[str, str]]) -> set[str]:
    """Returns the keys that do not have one value in all rows; those of the place in which a trial ran do not set it apart."""
    keys = {key for row in rows for key in row if key not in ("code", "data") and not key.startswith("version of ")}
    return {key for key in keys if len({row.get(key) for row in rows}) > 1}


def _matched(first: Trial, second: Trial, labels: Mapping[str, str]) -> MatchedTrial:
    one, two = first[1], second[1]
    assert one.step_time_s is not None and two.step_time_s is not None, "trials without a step time are not matched"
    error = WIDER * math.hypot(_half_width(one), _half_width(two))
    losses = [result.get("losses") for _, _, result in (first, second)]
    last = [one[-1] for one in losses if isinstance(one, list) and one and isinstance(one[-1], (int, float))]
    same = len(last) == 2 and len(losses[0] or ()) == len(losses[1] or ())
    difference = last[1] - last[0] if same and all(map(math.isfinite, last)) else None
    return MatchedTrial(labels[one.trial], one, two, two.step_time_s / one.step_time_s, error, difference)


def _half_width(measured: Measurement) -> float:
    """Returns half the width of the interval of a median, on a scale of logarithms."""
    if measured.step_time_interval_s is None:
        return 0.0
    low, high = measured.step_time_interval_s
    return math.log(high / low) / 2
