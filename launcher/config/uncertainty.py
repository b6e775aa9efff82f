"""Errors of predictions, as they were learnt: conf/uncertainty.yaml."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from launcher.config.folders import conf_dir, shipped
from trainer.shared.run.errors import ConfigError


@dataclass(frozen=True)
class Widths:
    """Standard deviations of log(measured / predicted) where nothing was measured before, and the distances over which they hold."""

    common: float  # one error for all layouts of a machine and its trainer
    part: float  # one error for each time part (matrix products, attention, optimizer ...) that has no width of its own below
    host: float  # the same for work of the host: launching, the fixed cost of a step
    communication: float  # for each part that is communication
    bubble: float  # and for the pipeline's bubble
    layout: float  # the rest that no part explains and similar layouts share
    rough: float  # the rest that no other layout shares
    reach: float  # distance over which layouts are similar, in doublings of a degree or a size
    scale: float  # machines differ in how large layout and rough are: standard deviation of the logarithm of their common factor
    seen: float  # doublings from the nearest other known run within which these widths were learnt: beyond, they grow in proportion
    memory: float  # one error of the predicted memory for all layouts of a machine and its trainer
    memory_layout: float  # and one for each layout
    noise: float  # of a measured step time
    chip: float  # of the rate of matrix units on a chip to whose runs none was fitted
    constant: float  # of a constant of the cost model on a machine of which nothing was measured (trireme calibrate)
    transfer: float  # of a step time on fewer nodes as one of the full size
    rate: float = 0.0  # of all that runs on matrix units here, beside ``part``: that of such a chip


NEAREST = 1e-3
"""Lower bound of a distance that widths grow by, in doublings."""
LARGEST = 100.0
"""Upper bound of a width, beyond the logarithm of any ratio that was measured."""
SIZES = ("tflops", "layers", "hidden", "seq", "gpus")
PLACE = (*SIZES, "precision", "trainer", "kind")
"""Values of a run that are kept, so that distances from it are known (``launcher.cost.known``). Older files tell no kind of model."""
OF_PARTS = ("part", "host", "communication", "bubble")
"""Widths of time parts."""


def uncertainty_file() -> dict[str, Any]:
    """Reads conf/uncertainty.yaml: ``widths``, and ``parts``: the largest share of a step that each time part had in known runs."""
    return shipped("uncertainty")


@cache
def shipped_widths() -> Widths:
    """Returns the widths of conf/uncertainty.yaml."""
    return Widths(**{name: float(entry["value"]) for name, entry in uncertainty_file()["widths"].items()})


def widths_on(learnt: Mapping[str, Any]) -> Widths:
    """Returns the shipped widths with those learnt on a machine in their place (``HardwareConfig.learnt``). Raises ``ConfigError`` if
    anything in ``learnt`` is malformed."""
    own = learnt.get("widths", {})
    known = [each.name for each in dataclasses.fields(Widths)]
    if not isinstance(own, Mapping) or any(name not in known or not _is_width(value) for name, value in own.items()):
        raise _mangled("widths", f"numbers from 0 to {LARGEST:g} for some of {', '.join(known)}")
    if not isinstance(learnt.get("runs", []), list):
        raise _mangled("runs", "a list")
    if not isinstance(learnt.get("places", []), list) or not all(map(_is_place, learnt.get("places", []))):
        raise _mangled("places", f"a list of mappings with {', '.join(PLACE)}")
    spreads = learnt.get("spreads", {})
    if not isinstance(spreads, Mapping) or not all(map(_is_width, spreads.values())):
        raise _mangled("spreads", f"numbers from 0 to {LARGEST:g} by constant")
    return dataclasses.replace(shipped_widths(), **{name: float(value) for name, value in own.items()})


def _is_width(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= LARGEST


def _is_place(place: object) -> bool:
    if not isinstance(place, Mapping) or not set(PLACE) - {"kind"} <= set(place) <= set(PLACE):
        return False
    return all(isinstance(value, (int, float)) and value > 0 if name in SIZES else isinstance(value, str) for name, value in place.items())


def _mangled(key: str, allowed: str) -> ConfigError:
    remedy = "it is what 'trireme calibrate' learnt, as a whole: run that again, or leave learnt out"
    return ConfigError(f"cluster.hardware.learnt.{key} is not {allowed}; {remedy}")


def widest(one: Widths, other: Widths) -> Widths:
    """Returns the larger of each pair of widths."""
    return Widths(*map(max, dataclasses.astuple(one), dataclasses.astuple(other)))


def growth(widths: Widths, distance: float) -> float:
    """Returns what the widths for a question ``distance`` doublings away from all known runs are multiplied by."""
    return 1.0 if distance <= widths.seen else distance / max(widths.seen, NEAREST)


def widened(widths: Widths, distance: float) -> Widths:
    """Returns the widths for a question ``distance`` doublings away from all known runs: beyond ``seen``, errors grow in proportion."""
    factor = growth(widths, distance)
    wider = {name: factor * getattr(widths, name) for name in ("common", *OF_PARTS, "layout", "rough")}
    return dataclasses.replace(widths, **wider)


@cache
def known_runs() -> tuple[dict[str, str], ...]:
    """Reads conf/known_runs.csv: some of the runs that the widths were learnt from."""
    with (conf_dir() / "known_runs.csv").open(newline="") as file:
        return tuple(csv.DictReader(file))
