"""Layouts that recompute what fits: they only add work. Pure numpy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from launcher.cost.thresholds import SURELY_FITS
from trainer.shared.run.schema import RECOMPUTE


def plain(table: np.ndarray, *others: np.ndarray) -> np.ndarray:
    """(n,) row of the same layout without recomputation; -1: there is none, or it is that itself. ``others``: (n,) columns beside the
    layout that must be the same too."""
    columns = [table[name] for name in table.dtype.names or () if not name.startswith("recompute")]
    same = np.unique(np.stack([*columns, *others], axis=1), axis=0, return_inverse=True)[1].reshape(-1)
    keeps_all = table["recompute"] == RECOMPUTE.index("none")
    row = np.full(len(table), -1)
    row[same[keeps_all]] = np.flatnonzero(keeps_all)
    return np.asarray(np.where(keeps_all, -1, row[same]))


def of_use(fits: np.ndarray, plain: np.ndarray, failed: Sequence[int] = ()) -> np.ndarray:
    """(n,) probability that each layout fits and is of use: a layout that recomputes is of none while the same one without, ``plain``,
    surely fits, and of use again once that one ``failed`` to run."""
    return np.asarray(np.where((plain >= 0) & (fits[plain] >= SURELY_FITS) & ~np.isin(plain, failed), 0.0, fits))
