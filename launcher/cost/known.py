"""The runs that the cost model was checked against, as few lines that lie near all of them (conf/known_runs.csv), and which are nearest to
a prediction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from launcher.config.schema import HardwareConfig
from launcher.config.uncertainty import PLACE, SIZES, Widths, known_runs, shipped_widths, uncertainty_file, widened, widest, widths_on
from launcher.cost.inputs.case import Case
from launcher.cost.inputs.device import Device
from launcher.cost.inputs.shape import Shape
from launcher.cost.uncertainty import KIND
from trainer.shared.run.schema import RECOMPUTE

KNOWN = (
    *("source", "hardware", "tflops", "precision", "trainer", "kind", "layers", "hidden", "seq", "gpus"),
    *("tensor", "pipeline", "micro_batch", "recompute", "missed"),
)
"""Columns: ``tflops`` is the device's 16-bit peak, ``missed`` is measured / predicted - 1 with the source left out of the fit."""
DEGREES = ("tensor", "pipeline", "micro_batch")
OTHER = 2.0
"""Distance between two number formats, trainers or kinds of model, in doublings of a size."""
LARGE = 0.02
"""Parts below this share of a step are not worth a warning."""
WIDTHS = {"fp16": "bf16"}
"""Number formats of one width are one."""
DENSE, MIXTURE, PAIR = "dense", "mixture of experts", "encoder and decoder"
"""Kinds of model."""


@dataclass(frozen=True)
class KnownRun:
    """A row of a table, and its distance from the question, in doublings."""

    cells: Mapping[str, Any]
    distance: float


def asked_cells(case: Case, place: int) -> dict[str, Any]:
    """Returns the cells by which distances are measured, of layout ``place`` of a question."""
    layout, shape = case.table[place], case.shape
    ranks = int(layout["tensor"]) * int(layout["pipeline"]) * int(layout["data"]) * int(layout["context"])
    words = {"precision": case.precision, "trainer": case.trainer.name}
    return words | cells_of(case.device, shape, layout, ranks)


def cells_of(device: Device, shape: Shape, layout: Any, gpus: int) -> dict[str, Any]:
    """Sizes of device and model, and the degrees of a layout."""
    sizes: dict[str, Any] = {"layers": int(shape.layers), "hidden": int(shape.hidden), "seq": int(shape.seq), "gpus": gpus}
    sizes |= {"tflops": round(device.peak("bf16") / 1e12, 2), "kind": kind_of(shape)}
    return sizes | {name: int(layout[name]) for name in DEGREES} | {"recompute": RECOMPUTE[int(layout["recompute"])]}


def kind_of(shape: Shape) -> str:
    """Returns the kind of a model, by its blocks."""
    if shape.experts is not None:
        return MIXTURE
    return PAIR if np.any(np.asarray(shape.encoder_layers) > 0) else DENSE


@dataclass(frozen=True)
class MeasuredPoints:
    """Where runs lie."""

    machines: np.ndarray  # (n, f) sizes of device and model, in doublings
    layouts: np.ndarray  # (n, g) degrees, in doublings
    words: np.ndarray  # (n, 3) number format, trainer and kind of model

    @classmethod
    def of(cls, runs: Sequence[Mapping[str, Any]]) -> MeasuredPoints:
        """The places of cells."""
        machines = np.log2([[float(run[name]) for name in SIZES] for run in runs])
        degrees = np.log2([[float(run[name]) for name in DEGREES] for run in runs])
        kinds = np.array([[KIND * RECOMPUTE.index(str(run["recompute"])) / 2] for run in runs])
        words = np.array([(*_words(run), run.get("kind", DENSE)) for run in runs])
        return cls(machines, np.concatenate([degrees, kinds], axis=1), words)

    def rows(self, index: np.ndarray) -> MeasuredPoints:
        return MeasuredPoints(self.machines[index], self.layouts[index], self.words[index])

    def apart(self, other: MeasuredPoints, with_layouts: bool = False) -> np.ndarray:
        """(n, m) distances in doublings; without layouts those of machine, trainer and model alone."""
        squares = _squares(self.machines, other.machines)
        squares += OTHER**2 * (self.words[:, None, :] != other.words[None, :, :]).sum(axis=2)
        return np.sqrt(squares + (_squares(self.layouts, other.layouts) if with_layouts else 0.0))


def _squares(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """(n, m) squared distances between places (n, f) and (m, f)."""
    return np.asarray(((one[:, None, :] - other[None, :, :]) ** 2).sum(axis=2))


def distances(cells: Sequence[Mapping[str, Any]], own: Sequence[Mapping[str, Any]] = ()) -> np.ndarray:
    """(n,) doublings from the machine, trainer, number format and model of questions, as cells, to those of the nearest known run; ``own``
    are runs that were measured here (``place_of``)."""
    far = MeasuredPoints.of(cells).apart(_known_places()).min(axis=1)
    return np.minimum(far, distances_from(own, cells)) if own else np.asarray(far)


def distances_from(own: Sequence[Mapping[str, Any]], cells: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """(n,) doublings from questions to the nearest of ``own``."""
    any_layout = dict.fromkeys(DEGREES, 1) | {"recompute": RECOMPUTE[0]}
    return np.asarray(MeasuredPoints.of(cells).apart(MeasuredPoints.of([any_layout | dict(each) for each in own])).min(axis=1))


def place_of(cells: Mapping[str, Any]) -> dict[str, Any]:
    """Those of ``cells`` that say how far questions are from a run."""
    return {name: cells[name] for name in PLACE}


def widths_at(hardware: HardwareConfig, cells: Sequence[Mapping[str, Any]]) -> list[Widths]:
    """How far predictions of questions, as cells, may be off: as learnt of their machine, wider where they are unlike all known runs and
    all that it was learnt from, or where the rates of the chip are assumed. Under another trainer, or in another number format, than ran
    here, no less than before."""
    own, widths = hardware.learnt.get("places", ()), widths_on(hardware.learnt)
    if rates_assumed(hardware):
        widths = replace(widths, rate=widths.chip)
    elsewhere = widest(widths, shipped_widths()) if own else widths
    ran = {_words(each) for each in own}
    far = distances(cells, own)
    return [widened(widths if _words(each) in ran else elsewhere, one) for each, one in zip(cells, far.tolist(), strict=True)]


def rates_assumed(hardware: HardwareConfig) -> bool:
    """True if the rates of a device were neither fitted to runs of such chips, nor measured here, nor corrected by runs here."""
    return hardware.rates_assumed and not hardware.calibration and not hardware.learnt.get("places")


def _words(cells: Mapping[str, Any]) -> tuple[str, str]:
    return WIDTHS.get(cells["precision"], cells["precision"]), cells["trainer"]


def nearest_runs(case: Case, place: int, count: int = 3) -> list[KnownRun]:
    """The known runs nearest to layout ``place`` of a question, the layout included."""
    far = MeasuredPoints.of([asked_cells(case, place)]).apart(_known_places(), with_layouts=True)[0]
    return [KnownRun(known_runs()[i], float(far[i])) for i in np.argsort(far, kind="stable")[:count]]


def unmeasured(time: Mapping[str, float]) -> dict[str, float]:
    """Parts of a step, with their share, that have a larger share than in known runs: no measurement supports their prediction."""
    whole, largest = sum(time.values()), uncertainty_file()["parts"]
    shares = {name: seconds / whole for name, seconds in time.items()}
    return {name: share for name, share in shares.items() if share > max(LARGE, largest.get(name, 0.0))}


@cache
def _known_places() -> MeasuredPoints:
    return MeasuredPoints.of(known_runs())
