"""Time of what happens once per step, or per micro-batch with sharded parameters: gradient reduction, parameter gathers, optimizer.

Sharding factors cut the data axis into levels (``trainer.shared.parallel.shards``): gradients are reduce-scattered level by level down to
the optimizer's shard and all-reduced over the replicas that are left; updated parameters climb the same way back.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from launcher.cost.inputs.case import Case
from launcher.cost.inputs.groups import PlacedGroup
from launcher.cost.inputs.shape import Array
from launcher.cost.inputs.stages import StageShare
from launcher.cost.time import collectives, orthogonal


@dataclass(frozen=True)
class DataParallelTimes:
    """Seconds (layouts,) of one rank, before anything is hidden behind computation."""

    gather: Array  # parameters, once per block pass (sharded parameters): per micro-batch, forward and backward together
    scatter: Array  # gradients over the ranks that share parameters or gradients: per reduction
    reduce: Array  # gradients over the other levels: once per step
    refresh: Array  # updated parameters: once per step
    tied: Array  # gradients of the embedding that the first and the last stage share: once per step
    optimizer: Array  # update, norm: once per step


def work(case: Case, held: StageShare) -> DataParallelTimes:
    """Communication and update time of the rank that holds most."""
    dense, expert, f = held.dense.most(), held.expert.most(), case.trainer
    weights, expert_weights = stored(case, held)
    sent = (case.width if case.wide else case.reduce_bytes) * case.shape.trained
    params, grads, optimizer = (case.field(name) for name in ("params", "grads", "optimizer"))
    inner, between, further = _level(case, params, 1), _level(case, grads, params), _level(case, optimizer, grads)
    owners, holders = (case.expert_shards(name) for name in ("params", "grads"))  # of an expert's parameters and gradients
    passes = np.where(params > 1, np.where(case.kept_whole, 1.0, 2.0), 0.0)
    count = held.blocks.most() * f.overlap.gathers_per_block + 1
    gather = count * _all(case, inner, weights / count)
    scatter = count * _scatter(case, inner, dense * sent / count) + _scatter(case, between, dense / params * sent, whole=True)
    replicas = _level(case, case.data * case.context, optimizer)
    reduce = _scatter(case, further, dense / grads * sent, whole=True) + _sum(case, replicas, dense / optimizer * sent)
    if case.shape.experts is not None:
        gather = gather + count * _all(case, case.expert_data_group(owners), expert_weights / count)
        scatter = scatter + count * _scatter(case, case.expert_data_group(holders), expert * sent / count)
        reduce = reduce + _sum(case, _expert_replicas(case, holders), expert / holders * sent)
    renewed = weights * case.shape.trained  # frozen weights stay as they are
    refresh = sum(renew(case, group, held.blocks.most(), renewed / level) for group, level in ((between, params), (further, grads)))
    updated = case.shard("optimizer", dense, expert) * case.shape.trained
    return DataParallelTimes(passes * gather, scatter, reduce, refresh, tied_embedding(case, sent), update(case, held, updated))


def stored(case: Case, held: StageShare) -> tuple[Array, Array]:
    """Bytes of the dense parameters, and of the routed experts, of the rank that holds most, as they travel. Matrices that are stored in 8
    bits travel so, unless their scales are those of blocks: then ranks gather 16-bit numbers and bring them into 8 bits each for itself
    (Megatron-LM, core/distributed/param_and_grad_buffer.py: ``torch.uint8``; its ``reuse_grad_buf_for_mxfp8_param_ag``)."""
    dense, expert = held.dense.most() * case.width, held.expert.most() * case.width
    if not case.stored_in_8_bits or case.trainer.numbers.block_scaled:
        return dense, expert
    return dense - held.blocks.most() * held.matrices * (case.width - 1), expert / case.width


TENSORS = 9
"""Tensors of a block: its linear maps with their biases or gates, and two norms."""


def renew(case: Case, group: PlacedGroup, blocks: Array, payload: Array) -> Array:
    """Seconds until all ranks of ``group`` have ``payload`` bytes of updated parameters: one gather, or a broadcast by each rank that owns
    any where a tensor belongs to one rank as a whole (InternLM/InternEvo, hybrid_zero_optim.py: ``broadcast_params``; no rank without
    parameters sends). Each of these waits for a trip round the ring, which makes wide groups slow."""
    if not case.trainer.overlap.owners_broadcast:
        return _all(case, group, payload)
    owners = np.minimum(group.size, TENSORS * blocks + 3)  # embedding, last norm, head
    return owners * collectives.broadcast(case.device, case.constants, group, payload / owners)


def _level(case: Case, shards: Array, before: Array) -> PlacedGroup:
    """The ranks over which a state is cut into ``shards``, ``before`` of which an inner level has cut. Context ranks stand next to each
    other among the replicas, and share as they do."""
    apart = case.data_stride / case.context  # ranks between neighbours on the axis of replicas and context ranks
    return PlacedGroup.of(case.device, shards / before, apart * before)


def _expert_replicas(case: Case, holders: Array) -> PlacedGroup:
    """The ranks that hold the same part of the same experts."""
    return case.expert_data_group(case.experts_alike / holders, holders)


def tied_embedding(case: Case, sent: Array) -> Array:
    """The first and the last stage sum the gradients of the matrix that both hold."""
    payload = case.vocabulary * case.shape.hidden * sent
    pair = PlacedGroup(2, np.where(case.stages_apart, 1, 2), 1)
    both = collectives.all_reduce(case.device, case.constants, pair, payload)
    return np.where((case.pipeline > 1) & case.shape.tied, both, 0.0)


def _all(case: Case, group: PlacedGroup, payload: Array) -> Array:
    return collectives.all_gather(case.device, case.constants, group, payload)


def _scatter(case: Case, group: PlacedGroup, payload: Array, whole: bool = False) -> Array:
    """``whole``: the ranks of the group hold whole parameters."""
    overlap = case.trainer.overlap
    if overlap.all_reduces_shards or (whole and overlap.all_reduces_states):
        return _sum(case, group, payload)
    return collectives.reduce_scatter(case.device, case.constants, group, payload)


def _sum(case: Case, group: PlacedGroup, payload: Array) -> Array:
    return collectives.all_reduce(case.device, case.constants, group, payload)


def update(case: Case, held: StageShare, parameters: Array) -> Array:
    """Adam on one rank's shard: gradient, master weight and two moments read, all but the gradient written, weights written; the norm
    reads the gradient once more, and is all that is left of what the host updates. An average of weights is read and written, and they
    are read for it. Orthogonalised matrices have one moment, and their direction is written, read, and comes back."""
    moved = (4 * 4 + 3 * 4 + case.width + 3 * case.average_bytes) * (1 - case.field("offload")) + 4
    seconds: Array = parameters * moved / (case.device.bandwidth * case.constants.streaming)
    return seconds + orthogonal.update(case, held)
