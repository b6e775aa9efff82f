"""Turns the measurements of ``trainer.probe`` into a description of the machine, and the factors by which the mechanisms miss them.

Peaks and memory of a known device are kept, since the mechanisms are fitted to data sheets; measurements replace the rates that a machine
really reaches: those of large products, bandwidth of memory, links and network. Of an unknown device everything is measured. The remaining
ratio of a measurement to a mechanism, by the size of a product or by the collective, its group and its payload, is a factor that is
interpolated over logarithms and constant outside of the measured range.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from launcher.config.schema import HardwareConfig
from launcher.cost.inputs.constants import SHIPPED, Constants
from launcher.cost.inputs.device import Device
from launcher.cost.inputs.groups import PlacedGroup
from launcher.cost.inputs.measured import FactorTable, Measured
from launcher.cost.time import collectives, matmul
from trainer.shared.run.errors import ConfigError

COPY = 0.87
"""Part of the data sheet's memory bandwidth that a plain copy reaches on a GPU."""
SPANS = ((1e7, 2e12), (1e-7, 1e-2))
"""Where bandwidths (bytes/s) and latencies (s) are looked for."""
GRID = 60
Figures = dict[str, Any]


def hardware(name: str, figures: Figures, known: HardwareConfig | None = None, constants: Constants = SHIPPED) -> HardwareConfig:
    """The hardware file ``name`` for the figures of a probe. ``known``: the file of this device that ships."""
    host = bool(figures["host"])
    config = dataclasses.replace(known or HardwareConfig(), name=name, host=host, cores=figures.get("cores"), calibration={})
    if known is None:
        size = figures["memory_bytes"]
        config = dataclasses.replace(
            config,
            memory_gb=None if size is None else rounded(size / 1e9),
            units=None if host else figures["units"],
            peak_tflops={precision: rounded(best / 1e12) for precision, best in _best(figures["products"]).items()},
            link_domain=None if host else figures["per_node"],
        )
    bandwidth = rounded(2 * figures["copy"]["bytes"] / figures["copy"]["seconds"] / COPY / 1e9)
    config = dataclasses.replace(config, memory_bandwidth_gbs=bandwidth)
    config = dataclasses.replace(config, constants=config.constants | _of_host(figures))
    config = dataclasses.replace(config, sustained_tflops=_sustained(config, figures["products"], constants))
    exchanges = [{**one, "seconds": _unshared(one, figures)} for one in figures["exchanges"]]
    config = _links(config, exchanges, figures["per_node"], constants)
    kept = ("nodes", "per_node", "hosts", "device", "torch", "products", "copy", "block")
    of_requests = {key: figures[key] for key in ("turn", "waking") if key in figures}
    return dataclasses.replace(config, calibration={key: figures[key] for key in kept} | of_requests | {"exchanges": exchanges})


def _of_host(figures: Figures) -> dict[str, float]:
    """Rates of a copy to the host, and of updates by all ranks of one, by the names of their constants; none by probes of versions without
    them. Ranks that are CPU processes measure a core."""
    found = figures.get("host_memory")
    if found is None:
        return {}
    sharers = figures["cores"] if figures["host"] else figures["per_node"]
    return {
        "pinned_link": rounded(found["bytes"] / found["copy"]),
        "host_update": rounded(sharers * found["update_bytes"] / found["update"]),
    }


def measured(config: HardwareConfig, device: Device, constants: Constants = SHIPPED) -> Measured:
    """Returns the ratios of measured to predicted seconds on ``config``'s machine; ``device`` is that machine by its data sheet.

    ``ConfigError`` where parts are missing."""
    try:
        return _measured(config.calibration, device, constants)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"has no {error}" if isinstance(error, KeyError) else f"cannot be read ({error})"
        remedy = "it is what 'trireme doctor' measured, as a whole: run that again, or leave the key out"
        raise ConfigError(f"cluster.hardware.calibration {what}; {remedy}") from None


def _measured(figures: Figures, device: Device, constants: Constants) -> Measured:
    products = {
        precision: _by_size(device, precision, [p for p in figures["products"] if p["precision"] == precision], constants)
        for precision in {p["precision"]: None for p in figures["products"]}
    }
    kinds = {(one["operation"], one["near"] < one["size"]) for one in figures["exchanges"]}
    tables = {kind: _by_payload(device, [one for one in figures["exchanges"] if _kind(one) == kind], constants) for kind in kinds}
    return Measured(products, tables, **{f"{name}_s": float(figures["block"][name]) for name in ("block", "micro_batch", "step")})


def _unshared(one: Figures, figures: Figures) -> float:
    """Seconds of a collective for a rank with a core of its own: ranks that take turns on cores wait for each other in between."""
    crowded = figures["host"] and figures["per_node"] > figures["cores"]
    return float(f"{one['busy_s' if crowded else 'seconds']:.4g}")


def _best(products: Sequence[Figures]) -> dict[str, float]:
    """The highest rate of each precision, in FLOP/s."""
    best: dict[str, float] = {}
    for p in products:
        best[p["precision"]] = max(best.get(p["precision"], 0.0), 2 * p["m"] * p["n"] * p["k"] / p["seconds"])
    return best


def _sustained(config: HardwareConfig, products: Sequence[Figures], constants: Constants) -> dict[str, float]:
    """The rate at which the model of a product takes as long as measured: the median over the larger shapes of each precision."""
    found = {}
    for precision in {p["precision"]: None for p in products}:
        shapes = sorted((p for p in products if p["precision"] == precision), key=_work)
        device = dataclasses.replace(Device.of(config, 1), bandwidth=np.inf, sustained={precision: 1e12})
        ratios = [(_product(device, precision, p, constants) - constants.kernel) / p["seconds"] for p in shapes[len(shapes) // 2 :]]
        found[precision] = rounded(float(np.median(ratios)))
    return found


def _work(p: Figures) -> float:
    return float(p["m"]) * p["n"] * p["k"]


def _product(device: Device, precision: str, p: Figures, constants: Constants) -> float:
    return float(matmul.seconds(device, precision, constants, p["m"], p["n"], p["k"]))


def _by_size(device: Device, precision: str, products: Sequence[Figures], constants: Constants) -> tuple[np.ndarray, np.ndarray]:
    """(log2 of m n k, log of measured / mechanism), one point for each size: shapes of about the same size are averaged."""
    points: dict[int, list[tuple[float, float]]] = {}
    for p in products:
        place = float(np.log2(_work(p)))
        points.setdefault(round(place / 2), []).append((place, float(np.log(p["seconds"] / _product(device, precision, p, constants)))))
    means = [np.mean(points[place], axis=0) for place in sorted(points)]
    return np.array([mean[0] for mean in means]), np.array([mean[1] for mean in means])


def _links(config: HardwareConfig, exchanges: Sequence[Figures], per_node: int, constants: Constants) -> HardwareConfig:
    """Bandwidth and latency of links, then of the network, with which the model of collectives is nearest to the measurements."""
    for name, far in (("link", False), ("network", True)):
        some = [one for one in exchanges if (one["near"] < one["size"]) == far]
        if some:
            rate, delay = _nearest(Device.of(config, per_node), name, some, constants)
            changes: dict[str, Any] = {f"{name}_gbs": rounded(rate / 1e9), f"{name}_latency_us": rounded(delay * 1e6)}
            config = dataclasses.replace(config, **changes)
    return config


def _nearest(device: Device, name: str, some: Sequence[Figures], constants: Constants) -> tuple[float, float]:
    """Bytes/s and seconds of the links, or of the network, that fit best: the smallest mean error over a grid, refined once."""
    rates, delays = (np.geomspace(*span, GRID) for span in SPANS)
    for _ in range(2):
        grid: dict[str, Any] = {name: rates[:, None], f"{name}_latency": delays[None, :]}
        tried = dataclasses.replace(device, **grid)
        errors = np.stack([np.abs(np.log(_exchange(tried, one, constants) / one["seconds"])) for one in some])
        place = np.unravel_index(np.argmin(errors.mean(axis=0)), (GRID, GRID))
        rate, delay = float(rates[place[0]]), float(delays[place[1]])
        rates, delays = rate * np.geomspace(0.7, 1.4, GRID), delay * np.geomspace(0.7, 1.4, GRID)
    return rate, delay


def _exchange(device: Device, one: Figures, constants: Constants) -> np.ndarray:
    """Predicted seconds of a measured collective."""
    size, near, payload = (np.float64(one[key]) for key in ("size", "near", "bytes"))
    if one["operation"] == "send":
        return np.asarray(collectives.send(device, constants, np.asarray(near < size), payload))
    return np.asarray(getattr(collectives, one["operation"])(device, constants, PlacedGroup(size, near, near), payload))


def _kind(one: Figures) -> tuple[str, bool]:
    """The collective, and whether it crosses the network."""
    return one["operation"], one["near"] < one["size"]


def _by_payload(device: Device, some: Sequence[Figures], constants: Constants) -> FactorTable:
    """measured / mechanism of one collective, by group size and payload."""
    rows: dict[int, list[tuple[float, float]]] = {}
    for one in some:
        missed = float(np.log(one["seconds"] / _exchange(device, one, constants)))
        rows.setdefault(one["size"], []).append((float(np.log2(one["bytes"])), missed))
    sizes = sorted(rows)
    return FactorTable(
        np.log2(sizes), tuple((np.array([p[0] for p in sorted(rows[s])]), np.array([p[1] for p in sorted(rows[s])])) for s in sizes)
    )


def rounded(value: float) -> float:
    """Three digits: more are noise."""
    return float(f"{value:.3g}")
