"""Time of what happens once per step, or per micro-batch with sharded parameters: gradient reduction, parameter gathers, optimizer.

Sharding factors cut the data axis into levels (``trainer.layout.shards``): gradients are reduce-scattered level by level down to
the optimizer's shard and all-reduced over the replicas that are left; updated parameters climb the same way back.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from launcher.cost import collectives
from launcher.cost.case import Case
from launcher.cost.shape import Number
from launcher.cost.stages import Held


@dataclass(frozen=True)
class Work:
    """Seconds before anything is hidden behind computation."""

    gather: Number  # parameters, once per block pass (sharded parameters): per micro-batch, forward and backward together
    scatter: Number  # gradients over the ranks that share parameters: per reduction
    reduce: Number  # gradients over the other levels: once per step
    refresh: Number  # updated parameters: once per step
    tied: Number  # gradients of the embedding that the first and the last stage share: once per step
    optimizer: Number  # update, norm: once per step


def work(case: Case, held: Held) -> Work:
    """Communication and update time of the rank that holds most."""
    dense, expert = held.dense.most(), held.expert.most()
    f = case.framework
    weights = case.width
    sent = 0.0 if case.shape.frozen else case.width if case.wide else f.reduce_bytes
    params, grads, optimizer = case.field("params"), case.field("grads"), case.field("optimizer")
    inner = case.data_group(params)
    passes = np.where(params > 1, np.where(case.kept_whole, 1.0, 2.0 if f.gather_again else 1.0), 0.0)
    count = held.blocks.most() * f.gathers_per_block + 1
    gather = passes * count * _all(case, inner, (dense + expert) * weights / count)
    scatter = count * _scatter(case, inner, (dense + expert) * sent / count)
    reduce = refresh = 0.0
    share = dense / params
    for size, stride in ((grads / params, params), (optimizer / grads, grads)):
        group = case.data_group(size, stride)
        reduce = reduce + _scatter(case, group, share * sent)
        refresh = refresh + _all(case, group, share * weights)
        share = share / size
    replicas = case.data_group(case.data / optimizer, optimizer)
    reduce = reduce + collectives.all_reduce(case.device, case.constants, replicas, share * sent)
    reduce = reduce + _expert_reduce(case, expert, sent)
    updated = 0 if case.shape.frozen else dense / optimizer + expert / np.maximum(optimizer / case.expert, 1)
    return Work(gather, scatter, reduce, refresh, tied_embedding(case, sent), update(case, updated))


def tied_embedding(case: Case, sent: float) -> Number:
    """The first and the last stage sum the gradients of the matrix that both hold."""
    payload = case.shape.vocab * case.shape.hidden / case.tensor * sent
    pair = collectives.Group(2, np.where(case.stages_apart, 1, 2), 1)
    both = collectives.all_reduce(case.device, case.constants, pair, payload)
    return np.where((case.pipeline > 1) & case.shape.tied, both, 0.0)


def _all(case: Case, group: collectives.Group, payload: Number) -> Number:
    return collectives.all_gather(case.device, case.constants, group, payload)


def _scatter(case: Case, group: collectives.Group, payload: Number) -> Number:
    return collectives.reduce_scatter(case.device, case.constants, group, payload)


def _expert_reduce(case: Case, parameters: Number, sent: float) -> Number:
    group = case.data_group(np.maximum(case.data / case.expert, 1), case.expert)
    return collectives.all_reduce(case.device, case.constants, group, parameters * sent)


def update(case: Case, parameters: Number) -> Number:
    """Adam on one rank's shard: gradient, master weight and two moments read, all but the gradient written, weights written; the norm
    reads the gradient once more."""
    moved = 4 * 4 + 3 * 4 + case.width + 4
    return parameters * moved / (case.device.bandwidth * case.constants.bandwidth)
