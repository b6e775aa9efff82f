"""Time of matrix products by shape: tiles, waves, ramps, and the memory they must at least move.

A product is cut into output tiles that are dealt to the device's units. The last wave is rarely full (wave quantisation),
the last row and column of tiles neither (tile quantisation), a short inner dimension leaves the pipeline of a tile filling and
draining most of the time. Background: NVIDIA, "Matrix Multiplication Background User's Guide".
"""

from __future__ import annotations

import numpy as np

from launcher.cost.inputs.constants import Constants
from launcher.cost.inputs.device import BYTES, Device
from launcher.cost.inputs.shape import Array

TILES = ((256, 128, 0), (128, 256, 0), (128, 128, 1), (64, 128, 2), (128, 64, 2), (64, 64, 3))
"""Output tiles that a library chooses from: rows, columns, how often they are halved against the best."""


def aligned(n: Array) -> Array:
    """Factor by which a product of this inner or outer size is slower when rows do not start at 16-byte borders (8 elements of 2 bytes)."""
    return np.where(np.mod(np.ceil(n), 8) == 0, 1.0, 1.6)


LINE = 128
"""Bytes of a line of the second-level cache. Where a row begins elsewhere, what a tile reads of it touches one line more."""


def on_lines(device: Device, precision: str, constants: Constants, n: Array, k: Array) -> Array:
    """Factor by which a weight product is slower whose rows do not all begin at lines. Of weights, inputs, results and their gradients rows
    have ``n`` or ``k`` elements (NVIDIA, "Matrix Multiplication Background User's Guide": on A100 sizes are best multiples of 128
    bytes)."""
    if device.host:
        return np.ones(np.broadcast(n, k).shape)
    whole = (np.mod(n, per_line(precision)) == 0) & (np.mod(k, per_line(precision)) == 0)
    return np.where(whole, 1.0, 1 / constants.unaligned)


def per_line(precision: str) -> int:
    """Elements of a line."""
    return int(LINE / BYTES[precision])


def seconds(device: Device, precision: str, constants: Constants, m: Array, n: Array, k: Array, batch: Array = 1) -> Array:
    """Seconds of ``batch`` products (m x k) (k x n). All sizes may be arrays."""
    m, n, k = np.maximum(m, 1), np.maximum(n, 1), np.maximum(k, 1)
    size = BYTES[precision]
    rate = device.rate(precision) / device.units
    best = m * n * batch if device.host else np.inf  # a core of the host computes in tiles too small to matter
    for rows, columns, halvings in () if device.host else TILES:
        tiles = np.ceil(m / rows) * np.ceil(n / columns) * batch
        waves = tiles / device.units
        waves = np.maximum(waves + constants.wave_weight * (np.ceil(waves) - waves), 1.0)
        best = np.minimum(best, waves * (rows * columns / constants.small_tile**halvings))
    busy = best * 2 * (k + constants.ramp_k) / rate
    moved = batch * size * (m * k + k * n + m * n) / (device.bandwidth * constants.bandwidth)
    missed = 1.0 if device.measured is None else device.measured.product(precision, m * n * k)
    return (np.maximum(busy, moved) + constants.kernel) * missed
