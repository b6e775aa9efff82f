"""Every layout of a model on a cluster, as one numpy table, with the reason for each excluded combination.

The rules are those of ``trainer.shared.run.rules``, over columns instead of one run at a time (``violations``; a test compares the
two on random points), plus two that remove layouts that cannot be better (``redundancies``).

By default, context degrees are powers of two that leave each rank at least ``CONTEXT_TOKENS`` tokens of a sequence. Attention hides the
ring's transfers of keys and values only if a rank has thousands of tokens (Liu et al. 2023, arXiv 2310.01889, section 3: a block must be
longer than arithmetic rate over bandwidth), and shorter pieces make matrix products thin where another axis would not. Shorter pieces are
therefore never the fastest, and without them a space of five axes is predicted in a second or two. ``search.space.max_context`` admits
every degree up to it. Slices of sequences are as long: twice as many divide the bubble of a pipeline again, and with shorter ones the time
that they lose in kernels has been as long as that (published logs of arXiv 2406.03488: sequences of 32,768 tokens in 4 and in 8 slices,
49,390 and 50,341 tokens a second). Expert degrees, as sharding factors, are those at which the speed of dispatch changes: none, a node,
all experts. Likewise parts of experts: none, as many as ranks of a node.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from launcher.config.schema import ClusterConfig
from launcher.config.search import SpaceConfig
from launcher.cost.inputs.layouts import BALANCES, LAYOUT_DTYPE
from launcher.planning.sharding_chains import node_levels, sharding_chains
from trainer.shared.run.derived import resolve_model
from trainer.shared.run.errors import ConfigError, divisors
from trainer.shared.run.limits.model import check_model
from trainer.shared.run.resolved import ResolvedModelConfig
from trainer.shared.run.schema import RECOMPUTE, SCHEDULES, ModelConfig

RULES = (
    "heads: tensor does not divide heads, kv_heads or ffn",
    "experts: expert does not divide the experts, expert_tensor their width, or tensor the shared ones",
    "context: 2 x context does not divide the sequence",
    "sequence: sequence parallelism does not divide the sequence",
    "layers: more stages than layers",
    "layers: stages do not divide the layers",
    "ranks: tensor x pipeline x context does not divide the cluster",
    "fold: expert x expert_tensor does not divide tensor x context x data",
    "schedule: interleaving needs a pipeline and more than one chunk, and they need interleaving",
    "slices: they need sliced_1f1b, which needs them, and no more of them than positions that tensor ranks share",
    "batch: micro_batch x data does not divide the global batch",
    "sharding: params, grads, optimizer, data x context do not each divide the next",
)
REDUNDANT = (
    "node: a tensor group straddles nodes",
    "same: another layout of the space means the same run",
)
CONTEXT_TOKENS = 4096
"""The least tokens of a sequence per context rank or slice, unless ``search.space.max_context`` or ``max_slices`` is given."""
SLICED = SCHEDULES.index("sliced_1f1b")
INTERLEAVED, EQUAL, COST, FULL = SCHEDULES.index("interleaved"), BALANCES.index("equal"), BALANCES.index("cost"), RECOMPUTE.index("full")


@dataclass(frozen=True)
class Space:
    """The layouts that are in (``LAYOUT_DTYPE``, one record each), and the number of combinations excluded by each reason."""

    table: np.ndarray
    dropped: dict[str, int]


def space(model: ModelConfig, cluster: ClusterConfig, global_batch: int, limits: SpaceConfig | None = None) -> Space:
    """Returns all layouts that fill ``cluster``. ``ConfigError`` if ``model`` itself breaks a rule or no layout is left."""
    check_model(model)
    limits, model, dropped = _once(limits or SpaceConfig()), resolve_model(model), Counter[str]()

    def keep(table: np.ndarray, weight: int) -> np.ndarray:
        """Returns the layouts that obey the rules; counts each of the others as many times as it would have been refined."""
        why = violations(table, model, cluster.world_size, global_batch)
        why = np.where(why >= 0, why, redundancies(table, model, cluster.gpus_per_node, limits))
        for code, times in zip(*np.unique(why[why >= 0], return_counts=True)):
            dropped[(RULES + REDUNDANT)[code]] += int(times) * weight
        return table[why < 0]

    recomputes = _recomputes(limits)
    table = keep(_skeletons(model, cluster, global_batch, limits), len(recomputes) * len(limits.sequence_parallel))
    table = keep(_crossed(table, limits.sequence_parallel, recomputes), 1)
    table = _offloaded(_sharded(table, cluster.gpus_per_node, limits.sharding), limits.offload or [0.0])
    if not len(table):
        raise ConfigError(_nothing_left(cluster.world_size, global_batch, dropped))
    return Space(table, dict(dropped.most_common()))


def violations(table: np.ndarray, model: ResolvedModelConfig, world_size: int, global_batch: int) -> np.ndarray:
    """Returns per layout the index in ``RULES`` of the first rule of ``trainer.shared.run.rules`` broken on ``world_size`` ranks, or -1.

    ``model`` is resolved. A ``data`` degree of 0 stands for "does not divide the cluster".
    """
    tensor, pipeline, virtual, data = (table[name] for name in ("tensor", "pipeline", "virtual_pipeline", "data"))
    context, expert, cut, experts = table["context"], table["expert"], table["expert_tensor"], model.experts
    apart = (expert > 1) | (cut > 1)
    chunks, shared = pipeline * virtual, np.maximum(data * context, 1)
    slices, unit = table["slices"], np.where(table["sequence_parallel"], tensor, 1)
    split = [getattr(model, name) % tensor != 0 for name in ("heads", "kv_heads", "ffn")]
    broken = [
        split[0] | split[1] | split[2],
        np.where(
            experts.count == 0, apart, (experts.count % expert != 0) | (model.expert_ffn % cut != 0) | (experts.shared_ffn % tensor != 0)
        ),
        (context > 1) & (model.seq % (2 * context) != 0),
        table["sequence_parallel"] & ((model.seq // context % tensor != 0) | (model.decoder_seq % tensor != 0)),
        chunks > model.layers,
        (model.layers % chunks != 0) & (table["balance"] == EQUAL),
        (data < 1) | (tensor * pipeline * context * data > world_size),
        tensor * shared % (expert * cut) != 0,
        ((table["schedule"] == INTERLEAVED) != (virtual > 1)) | ((virtual > 1) & (pipeline == 1)),
        ((table["schedule"] == SLICED) != (slices > 1)) | (slices * unit > model.seq),
        global_batch % np.maximum(table["micro_batch"] * data, 1) != 0,
        (table["grads"] % table["params"] != 0) | (table["optimizer"] % table["grads"] != 0) | (shared % table["optimizer"] != 0),
    ]
    return _first(broken)


def redundancies(table: np.ndarray, model: ModelConfig, gpus_per_node: int, limits: SpaceConfig) -> np.ndarray:
    """Returns per layout the index in ``RULES + REDUNDANT`` of the reason to skip it, or -1.

    A tensor group that straddles nodes sends every layer's activations through the slowest link with the node's GPUs split
    unevenly. Without a pipeline all schedules are the same, without a tensor group sequence parallelism has no effect, and if chunks
    are single blocks, recomputing the first of every few blocks recomputes all.
    """
    tensor, pipeline, virtual = table["tensor"], table["pipeline"], table["virtual_pipeline"]
    plain = "1f1b" if "1f1b" in limits.schedules else next((name for name in limits.schedules if name != "interleaved"), "")
    first_schedule = SCHEDULES.index(plain) if plain else -1
    broken = [
        (gpus_per_node % tensor != 0) & (tensor % gpus_per_node != 0),
        ((pipeline == 1) & (table["schedule"] != first_schedule))
        | (table["sequence_parallel"] & (tensor == 1))
        | ((table["recompute_every"] > 1) & (pipeline * virtual == model.layers)),
    ]
    codes = _first(broken)
    return np.where(codes < 0, -1, codes + len(RULES))


def _first(broken: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the index of the first condition that holds, per element; -1 if none does."""
    return np.select(list(broken), list(range(len(broken))), default=-1)


def _skeletons(model: ResolvedModelConfig, cluster: ClusterConfig, global_batch: int, limits: SpaceConfig) -> np.ndarray:
    """Returns all combinations of the axes, schedule and micro-batch, valid or not; nothing sharded or recomputed."""
    world, ways = cluster.world_size, np.array(_schedules(model, limits))
    axes = {
        "tensor": [d for d in divisors(world) if d <= (limits.max_tensor or cluster.gpus_per_node)],
        "pipeline": [d for d in divisors(world) if d <= min(limits.max_pipeline or model.layers, model.layers)],
        "virtual_pipeline": [d for d in divisors(model.layers) if d <= (limits.max_virtual or model.layers)],
        "way": range(len(ways)),
        "micro_batch": [d for d in divisors(global_batch) if d <= limits.max_micro_batch],
        "context": _contexts(model, world, limits.max_context),
        "expert": _experts(model.experts.count, cluster.gpus_per_node, limits.max_expert),
        "expert_tensor": _expert_parts(model, cluster.gpus_per_node, limits.max_expert_tensor),
    }
    grid = np.meshgrid(*axes.values(), indexing="ij")
    table = np.zeros(grid[0].size, LAYOUT_DTYPE)
    columns = {name: values.ravel() for name, values in zip(axes, grid)}
    columns["schedule"], columns["slices"] = ways[columns.pop("way")].T
    for name, values in columns.items():
        table[name] = values
    for name in ("recompute_every", "params", "grads", "optimizer"):
        table[name] = 1
    table["recompute_layers"] = -1
    model_ranks = table["tensor"] * table["pipeline"] * table["context"]
    table["data"] = np.where(world % model_ranks == 0, world // model_ranks, 0)
    uneven = (model.layers % table["pipeline"] != 0) & (table["virtual_pipeline"] == 1)
    table["balance"] = np.where(uneven, COST, EQUAL)
    return table


def _schedules(model: ResolvedModelConfig, limits: SpaceConfig) -> list[tuple[int, int]]:
    """Returns (schedule, slices) of each way to run a pipeline, with all numbers of slices up to ``max_slices`` if it is given."""
    if model.encoder_layers:
        limits = dataclasses.replace(limits, max_slices=1)
    if limits.max_slices is not None:
        slices = list(range(2, limits.max_slices + 1))
    else:
        slices = [n for n in (2**power for power in range(1, 31)) if n * CONTEXT_TOKENS <= model.seq]
    given = [SCHEDULES.index(name) for name in limits.schedules]
    return [(code, n) for code in given for n in (slices if code == SLICED else [1])] or [(SLICED, 1)]


def _contexts(model: ResolvedModelConfig, world: int, most: int | None) -> list[int]:
    """Returns the context degrees to try: all up to ``most`` if it is given. An encoder and its decoder have none."""
    if model.encoder_layers:
        return [1]
    if most is not None:
        return [d for d in divisors(world) if d <= most]
    return [d for d in divisors(world) if d == 1 or (d & (d - 1) == 0 and d * CONTEXT_TOKENS <= model.seq)]


def _experts(count: int, gpus_per_node: int, most: int | None) -> list[int]:
    """Returns the expert degrees to try: all up to ``most`` if it is given; else 1, those of one node, and one expert per rank."""
    if most is not None:
        return [d for d in divisors(max(count, 1)) if d <= most]
    return sorted({1, math.gcd(count, gpus_per_node), count}) if count else [1]


def _expert_parts(model: ResolvedModelConfig, gpus_per_node: int, most: int | None) -> list[int]:
    """Returns in how many parts to try to cut experts: all up to ``most`` if it is given; else whole, or over a node."""
    if not model.experts.count:
        return [1]
    if most is not None:
        return [d for d in divisors(model.expert_ffn) if d <= most]
    return sorted({1, math.gcd(model.expert_ffn, gpus_per_node)})


def _recomputes(limits: SpaceConfig) -> list[tuple[int, int]]:
    """Returns (kind, every k-th block) of each way to recompute."""
    ways = [(RECOMPUTE.index(name), 1) for name in limits.recompute]
    return [*ways, (FULL, 2)] if limits.partial_recompute and "full" in limits.recompute else ways


def _crossed(table: np.ndarray, sequence_parallel: Sequence[bool], recomputes: Sequence[tuple[int, int]]) -> np.ndarray:
    """Combines each layout with each way to treat activations. Without a tensor group, sequence parallelism is always included as "off"."""
    rows = []
    for parallel in sequence_parallel:
        for kind, every in recomputes:
            part = table.copy()
            part["sequence_parallel"] = parallel if len(sequence_parallel) > 1 else parallel & (table["tensor"] > 1)
            part["recompute"], part["recompute_every"] = kind, every
            rows.append(part)
    return np.concatenate(rows) if rows else table[:0]


def _sharded(table: np.ndarray, gpus_per_node: int, levels: str) -> np.ndarray:
    """Combines each layout with each allowed {params, grads, optimizer} over its data x context ranks, made once per group size."""
    pairs, group = np.unique(np.stack([table["tensor"], table["data"] * table["context"]], axis=1), axis=0, return_inverse=True)
    rows = []
    for index, (tensor, data) in enumerate(pairs.tolist()):
        members = table[group.ravel() == index]
        near = max(1, gpus_per_node // tensor)
        chains = np.array(sharding_chains(data, None if levels == "all" else node_levels(data, near)))
        part = np.repeat(members, len(chains))
        for column, name in enumerate(("params", "grads", "optimizer")):
            part[name] = np.tile(chains[:, column], len(members))
        rows.append(part)
    return np.concatenate(rows) if rows else table


def _offloaded(table: np.ndarray, shares: Sequence[float]) -> np.ndarray:
    """Combines each layout with each share of its optimizer states in host memory."""
    table = np.repeat(table, len(shares))
    table["offload"] = np.tile(shares, len(table) // len(shares))
    return table


def _once(limits: SpaceConfig) -> SpaceConfig:
    """Removes repeated values from ``limits``."""
    names = ("schedules", "recompute", "sequence_parallel", "offload")
    words: dict[str, Any] = {name: list(dict.fromkeys(getattr(limits, name))) for name in names}
    return dataclasses.replace(limits, **words)


def _nothing_left(world_size: int, global_batch: int, dropped: Counter[str]) -> str:
    """Returns the error. A combination counts for the first rule that it breaks, so the last reason has those nearest to a valid run."""
    reason = max(dropped, key=(RULES + REDUNDANT).index)
    return (
        f"no layout fits {world_size} ranks with run.global_batch={global_batch}: of {sum(dropped.values())} combinations those that come "
        f"nearest ({dropped[reason]}) break '{reason}'; change cluster.nodes, run.global_batch, "
        "model.heads or model.layers, or widen search.space"
    )
