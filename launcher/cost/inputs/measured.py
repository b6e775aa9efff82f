"""Measured correction factors on top of the analytic model, by size; and what a machine's host takes for an operation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from launcher.cost.inputs.shape import Array


@dataclass(frozen=True)
class FactorTable:
    """Logarithms of factors of one collective: for each group size, over the payload."""

    sizes: np.ndarray  # log2 of group sizes, ascending
    rows: tuple[tuple[np.ndarray, np.ndarray], ...]  # (log2 of bytes, log of the factor)

    def factor(self, size: Array, payload: Array) -> Array:
        """Between measured sizes and payloads by straight lines, outside as at the edge."""
        place = np.clip(np.log2(np.maximum(size, 1)), self.sizes[0], self.sizes[-1])
        where = np.log2(np.maximum(payload, 1))
        value = np.zeros(np.broadcast(place, where).shape)
        for i, (payloads, factors) in enumerate(self.rows):
            weight = np.interp(place, self.sizes, np.eye(len(self.sizes))[i])
            value = value + weight * np.interp(where, payloads, factors)
        return np.exp(value)


@dataclass(frozen=True)
class Measured:
    """Factors on the mechanisms, and seconds of the host for a block's operations (both ways), a micro-batch's and a step's."""

    products: dict[str, tuple[np.ndarray, np.ndarray]]  # precision -> (log2 of m n k, log of the factor)
    collectives: dict[tuple[str, bool], FactorTable]  # (collective, crosses the network) -> factors
    block_s: float
    micro_batch_s: float
    step_s: float

    def product(self, precision: str, work: Array) -> Array:
        """Factor on the time of a matrix product with ``work`` = m n k."""
        known = self.products.get(precision)
        return 1.0 if known is None else np.exp(np.interp(np.log2(np.maximum(work, 1)), *known))

    def collective(self, operation: str, size: Array, far: Array, payload: Array) -> Array:
        """Factor on the time of a collective."""
        inside, between = (self.collectives.get((operation, crosses)) for crosses in (False, True))
        near = 1.0 if inside is None else inside.factor(size, payload)
        return near if between is None else np.where(far, between.factor(size, payload), near)
