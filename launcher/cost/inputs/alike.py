"""Layouts that are alike but for their shards: what does not depend on shards is computed once for all of them.

A space has each way of dealing the model out under many ways of sharding its states. They compute, wait and keep activations for equally
long, so that this is counted per kind of layout and handed to all layouts of the kind.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from launcher.cost.inputs.case import Case
from launcher.cost.inputs.layouts import LAYOUT_DTYPE, SHARDED
from launcher.cost.inputs.shape import Array

FEWEST = 100
"""Layouts below which looking for kinds costs more than it spares."""


@dataclass(frozen=True)
class LayoutGroups:
    """The kinds of layouts of a case."""

    case: Case  # one layout of each kind
    rows: np.ndarray | slice  # (kinds,) which layouts these are
    of: np.ndarray | slice  # (layouts,) the kind of each layout

    @classmethod
    def of_case(cls, case: Case) -> LayoutGroups:
        """Kinds by all columns but those of shards, of which it matters here whether parameters are gathered. They are looked for among
        neighbours in the table, as an enumerated space has the ways of sharding a layout side by side; elsewhere a kind may be counted
        more than once. Where models or batches differ from layout to layout, every layout is a kind of its own."""
        table = case.table
        if len(table) < FEWEST or np.ndim(case.shape.layers) or np.ndim(case.global_batch):
            return cls(case, slice(None), slice(None))
        columns = [table[name] for name in LAYOUT_DTYPE.names or () if name not in SHARDED]
        starts = np.any([column[1:] != column[:-1] for column in columns], axis=0)
        code = 2 * np.concatenate([[0], np.cumsum(starts)]) + (table["params"] > 1)
        present = np.zeros(code[-1] + 2, bool)
        present[code] = True
        of = (np.cumsum(present) - 1)[code]
        rows = np.empty(of.max() + 1, int)
        rows[of] = np.arange(len(of))
        return cls(replace(case, table=table[rows]), rows, of)

    def spread(self, value: Array) -> Array:
        """A number of each kind (kinds,) as one of each layout (layouts,); a number that all share stays one number."""
        return np.asarray(value)[self.of] if np.ndim(value) else value
