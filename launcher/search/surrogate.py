"""The candidates of a search, and a belief of their memory from the cost model and the trials so far. Pure numpy.

Step times are ``launcher.cost.uncertainty``'s. Needed memory is wrong by one factor for the cluster and noise per layout. A trial that ran
bounds its need from above by the capacity, one that ran out from below; a measured peak gives it. The factor's distribution is kept on a
grid.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from launcher.config.uncertainty import Widths
from launcher.cost.normal import ndtr
from launcher.cost.uncertainty import Traits


@dataclass(frozen=True)
class Candidates:
    """The cost model's predictions of the candidates; arrays over candidates."""

    parts: np.ndarray  # (n, k) seconds by time part; their sum is the predicted step time
    memory: np.ndarray  # (n,) predicted peak in bytes
    features: np.ndarray  # (n, f) coordinates of the layout
    capacity: float  # bytes of the device
    plain: np.ndarray | None = None  # (n,) which one is the same layout without recomputation; -1: none is, or it is that itself
    unit: np.ndarray | None = None  # (n,) number of its machine and trainer, if they are several

    def __post_init__(self) -> None:
        n = len(self.parts)
        assert self.memory.shape == (n,) and len(self.features) == n, "one entry per candidate"

    def __len__(self) -> int:
        return len(self.parts)

    @property
    def seconds(self) -> np.ndarray:
        return self.parts.sum(axis=1)

    @property
    def traits(self) -> Traits:
        return Traits(self.parts / self.seconds[:, None], self.features, self.unit)


@dataclass
class MemorySurrogate:
    """Distribution of the log factor between needed and predicted memory, on a grid."""

    candidates: Candidates
    widths: Widths

    def __post_init__(self) -> None:
        self.grid = np.linspace(-10, 10, 81) * self.widths.memory
        self.log_weight = -0.5 * (self.grid / self.widths.memory) ** 2

    def observe(self, predicted: float, ran: bool, peak: float = 0.0) -> None:
        """Updates with a trial predicted to need ``predicted`` bytes that ran or ran out of memory; ``peak``: measured bytes, if any."""
        if peak:
            self.log_weight += -0.5 * ((np.log(peak / predicted) - self.grid) / self.widths.memory_layout) ** 2
            return
        fits = ndtr(self._margin(np.array([predicted]))[0])
        self.log_weight += np.log(np.maximum(fits if ran else 1 - fits, 1e-12))

    def fits(self) -> np.ndarray:
        """Probability that each candidate fits into memory."""
        weight = np.exp(self.log_weight - self.log_weight.max())
        return ndtr(self._margin(self.candidates.memory)) @ (weight / weight.sum())

    def _margin(self, predicted: np.ndarray) -> np.ndarray:
        """(candidates, grid): distance of the need from the capacity in standard deviations."""
        with np.errstate(divide="ignore"):
            need = np.log(predicted / self.candidates.capacity)
        return -(need[:, None] + self.grid[None, :]) / self.widths.memory_layout
