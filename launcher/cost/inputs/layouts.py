"""Many layouts as one numpy structured array: the vectorised form of ``LayoutConfig`` that the cost model predicts at once.

One record per layout, one field per ``LayoutConfig`` field of the same name; those of its sharding are the fields
``params``, ``grads``, ``optimizer`` and ``offload``. Words are stored as their index in the schema's tuples, ``None`` as -1.
``stage_layers`` (an explicit split) has no column: such a layout is predicted alone. Nor has ``slice_lengths``: slices are predicted as
those of equal work.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trainer.shared.run.schema import RECOMPUTE, SCHEDULES, LayoutConfig, ShardingConfig

BALANCES = ("equal", "cost")
ORDERS = ("tensor-data-pipeline", "tensor-pipeline-data")
FACTORS = ("params", "grads", "optimizer")
SHARDED = (*FACTORS, "offload")
WORDS = {"schedule": SCHEDULES, "recompute": RECOMPUTE, "balance": BALANCES, "order": ORDERS}
"""Fields that hold words, and the words in the order of their codes."""

_FIELDS = [
    ("tensor", "i4"), ("pipeline", "i4"), ("virtual_pipeline", "i4"), ("data", "i4"), ("context", "i4"), ("expert", "i4"),
    ("expert_tensor", "i4"), ("micro_batch", "i4"), ("schedule", "i1"), ("slices", "i4"), ("sequence_parallel", "?"), ("recompute", "i1"),
    ("recompute_layers", "i4"), ("recompute_every", "i4"), ("balance", "i1"), ("order", "i1"),
    ("params", "i4"), ("grads", "i4"), ("optimizer", "i4"), ("offload", "f8"),
]  # fmt: skip
LAYOUT_DTYPE = np.dtype(_FIELDS, align=True)


def to_table(layouts: Sequence[LayoutConfig]) -> np.ndarray:
    """Layouts with a known ``data`` degree, one record each."""
    table = np.zeros(len(layouts), LAYOUT_DTYPE)
    for row, layout in zip(table, layouts):
        for name in LAYOUT_DTYPE.names or ():
            value = getattr(layout.sharding if name in SHARDED else layout, name)
            row[name] = WORDS[name].index(value) if name in WORDS else -1 if value is None else value
    return table


def to_layout(record: np.void) -> LayoutConfig:
    """The inverse of ``to_table`` for one record."""
    values = {name: record[name].item() for name in LAYOUT_DTYPE.names or ()}
    values |= {name: words[values[name]] for name, words in WORDS.items()}
    values["recompute_layers"] = None if values["recompute_layers"] < 0 else values["recompute_layers"]
    sharding = ShardingConfig(**{name: values.pop(name) for name in SHARDED})
    return LayoutConfig(sharding=sharding, **values)
