"""Time of optimizer states in host memory: copies of gradients down and of weights up, and the update by the host's threads in between.

Of the project's trainer (``trainer/state/host.py``; Ren et al. 2021, arXiv 2101.06840): gradients go down behind backward, the update
begins when the norm is known and goes bucket by bucket, and the next forward begins as soon as it has its first one. Another trainer that
has all states there copies what it computes with, from and to memory that is not pinned.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from launcher.cost.inputs.case import Case
from launcher.cost.inputs.shape import Array
from launcher.cost.inputs.stages import StageShare


@dataclass(frozen=True)
class OffloadTimes:
    """Seconds (layouts,) of one rank per step, before anything is hidden."""

    down: Array  # gradients
    update: Array  # update and weights up
    first: Array  # those of the first bucket, which the next forward waits for


def elements(case: Case, dense: Array, expert: Array) -> Array:
    """Returns the parameters, of ``dense`` and experts' ones of a rank, whose states the rank has in host memory."""
    return case.field("offload") * case.shard("optimizer", dense, expert) * case.shape.trained


def host_bytes(case: Case) -> tuple[float, float]:
    """Returns the bytes per parameter there: of states, and of gradients and weights that are copied."""
    wide = case.wide
    states = (3 * case.width if wide else case.trainer.numbers.optimizer_bytes) + case.average_bytes
    return states, case.width if wide else 4 + case.width


def times(case: Case, held: StageShare) -> OffloadTimes:
    """The update reads and writes the states and the gradient once each, and weights in the type of computation are written."""
    count, c = elements(case, held.dense.most(), held.expert.most()), case.constants
    states, copied = host_bytes(case)
    gradient = case.width if case.wide else 4
    down, up = count * gradient / c.pinned_link, count * case.width / c.pinned_link
    update = count * (2 * states + copied + gradient) * case.device.host_sharers / c.host_update
    together = update + up if case.device.host else np.maximum(update, up)  # on a GPU the next bucket is updated meanwhile
    shard, bucket = case.shard("optimizer", held.dense.most(), held.expert.most()) * gradient, case.trainer.memory.bucket_bytes
    buckets = np.maximum(shard / bucket, 1.0) if bucket else np.inf
    return OffloadTimes(down, together, together / buckets)
