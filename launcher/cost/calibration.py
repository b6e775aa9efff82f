"""From what ``trainer.probe`` measured to a description of the machine that makes the cost model's mechanisms agree with it.

Data-sheet figures of a known device are kept, since the mechanisms are fitted to them; what was measured replaces what a machine really
reaches: rates of large products, links and network. Of an unknown device (a CPU) everything is measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from launcher.config.schema import HardwareConfig
from launcher.cost import collectives, matmul
from launcher.cost.collectives import Group
from launcher.cost.constants import FITTED, Constants
from launcher.cost.device import Device

COPY = 0.87
"""Part of the data sheet's memory bandwidth that a plain copy reaches on a GPU."""
GRID = 60


def hardware(name: str, figures: dict[str, Any], known: HardwareConfig | None = None, constants: Constants = FITTED) -> HardwareConfig:
    """The hardware file ``name`` for the figures of a probe. ``known``: the file of this device that ships."""
    config = dataclasses.replace(known or HardwareConfig(), name=name, host=figures["device"]["memory"] is None)
    if known is None:
        size = figures["device"]["memory"]
        config = dataclasses.replace(
            config,
            memory_gb=None if size is None else _rounded(size / 1e9),
            units=figures["device"]["units"],
            memory_bandwidth_gbs=_rounded(2 * figures["copy"]["bytes"] / figures["copy"]["seconds"] / COPY / 1e9),
            peak_tflops={precision: _rounded(best / 1e12) for precision, best in _best(figures["matmuls"]).items()},
        )
    config = dataclasses.replace(config, reached_tflops=_reached(config, figures["matmuls"], constants), calibration=figures)
    return _links(config, figures, constants)


def _best(products: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The highest rate of each precision, in FLOP/s."""
    best: dict[str, float] = {}
    for p in products:
        best[p["precision"]] = max(best.get(p["precision"], 0.0), 2 * p["m"] * p["n"] * p["k"] / p["seconds"])
    return best


def _reached(config: HardwareConfig, products: Sequence[dict[str, Any]], constants: Constants) -> dict[str, float]:
    """The rate at which the model of a product takes as long as measured: the median over the larger shapes of each precision."""
    found = {}
    for precision in {p["precision"]: None for p in products}:
        shapes = sorted((p for p in products if p["precision"] == precision), key=lambda p: -p["m"] * p["n"] * p["k"])
        device = dataclasses.replace(Device.of(config, 1), bandwidth=np.inf, reached={precision: 1e12})
        seconds = [
            (matmul.seconds(device, precision, constants, p["m"], p["n"], p["k"]) - constants.kernel) / p["seconds"]
            for p in shapes[: max(3, len(shapes) // 2)]
        ]
        found[precision] = _rounded(float(np.median(seconds)))
    return found


def _links(config: HardwareConfig, figures: dict[str, Any], constants: Constants) -> HardwareConfig:
    """Bandwidth and latency of links, then of the network, with which the model of collectives is nearest to what was measured."""
    inside = [c for c in figures["collectives"] if c["near"] == c["size"]]
    between = [c for c in figures["collectives"] if c["near"] < c["size"]]
    config = dataclasses.replace(config, link_domain=figures["per_node"] if config.link_domain is None and not config.host else config.link_domain)
    if inside:
        rate, delay = _nearest(Device.of(config, figures["per_node"]), "link", inside, constants)
        config = dataclasses.replace(config, link_gbs=_rounded(rate / 1e9), link_latency_us=_rounded(delay * 1e6))
    if between:
        rate, delay = _nearest(Device.of(config, figures["per_node"]), "network", between, constants)
        config = dataclasses.replace(config, network_gbs=_rounded(rate / 1e9), network_latency_us=_rounded(delay * 1e6))
    return config


def _nearest(device: Device, name: str, measured: Sequence[dict[str, Any]], constants: Constants) -> tuple[float, float]:
    """Bytes/s and seconds of the links, or of the network, that fit best: the smallest median error over a grid, refined once."""
    rates, delays = np.geomspace(1e7, 2e12, GRID), np.geomspace(1e-6, 1e-2, GRID)
    for _ in range(2):
        tried = dataclasses.replace(device, **{name: rates[:, None], f"{name}_latency": delays[None, :]})
        errors = np.stack([np.abs(np.log(_seconds(tried, one, constants) / one["seconds"])) for one in measured])
        place = np.unravel_index(np.argmin(errors.mean(axis=0)), (GRID, GRID))
        rate, delay = float(rates[place[0]]), float(delays[place[1]])
        rates, delays = rate * np.geomspace(0.7, 1.4, GRID), delay * np.geomspace(0.7, 1.4, GRID)
    return rate, delay


def _seconds(device: Device, one: dict[str, Any], constants: Constants) -> np.ndarray:
    """Predicted time of a measured collective on a device whose links or network are grids of numbers."""
    size, near, payload = (np.float64(one[key]) for key in ("size", "near", "bytes"))
    if one["collective"] == "send":
        return collectives.send(device, constants, near < size, payload)
    group = Group(size, near, near)
    return (collectives.all_reduce if one["collective"] == "all_reduce" else collectives.all_gather)(device, constants, group, payload)


def _rounded(value: float) -> float:
    """Three digits: more are noise."""
    return float(f"{value:.3g}")
