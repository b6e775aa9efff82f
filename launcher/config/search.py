"""The space that ``trireme plan`` and ``trireme search`` explore, and the conditions under which they stop."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Optional

from trainer.shared.run.keys import key
from trainer.shared.run.schema import RECOMPUTE, SCHEDULES


@dataclass
class SpaceConfig:
    """The layouts that are considered. Every one of them obeys the rules of ``trainer.shared.run.rules``."""

    max_tensor: Optional[int] = key(None, "largest tensor degree; null = cluster.gpus_per_node", minimum=1)
    max_pipeline: Optional[int] = key(None, "largest pipeline degree; null = model.layers", minimum=1)
    max_virtual: Optional[int] = key(None, "most chunks per pipeline rank; null = model.layers / pipeline", minimum=1)
    max_context: Optional[int] = key(
        None, "largest context degree; null = powers of two that leave each rank 4,096 tokens of a sequence, if the trainer can be told", minimum=1
    )
    max_expert: Optional[int] = key(None, "largest expert degree; null = model.experts.count, if the trainer can be told", minimum=1)
    max_expert_tensor: Optional[int] = key(None, "most parts of an expert's width; null = none, or those of a node, if the trainer can be told", minimum=1)
    max_slices: Optional[int] = key(
        None, "most slices of a sequence; null = powers of two that leave each 4,096 tokens, if the trainer can be told", minimum=1
    )
    max_micro_batch: int = key(16, "largest micro-batch", minimum=1)
    schedules: list[str] = key(partial(list, ("1f1b", "interleaved", "zero_bubble", "sliced_1f1b")), "pipeline schedules (gpipe never beats 1f1b)", choices=SCHEDULES)
    recompute: list[str] = key(partial(list, RECOMPUTE), "recomputation of activations", choices=RECOMPUTE)
    partial_recompute: bool = key(True, "also full recomputation of only half the blocks of a chunk")
    sequence_parallel: list[bool] = key(partial(list, (False, True)), "sequence parallelism, where layout.tensor > 1", choices=(False, True))
    sharding: str = key("levels", "sharding factors: levels (1, the replicas of a node, all) or all divisors", choices=("levels", "all"))
    offload: list[float] = key(partial(list, (0.0,)), "shares of the optimizer states in host memory; more than 0 only if asked for, as where nothing fits", minimum=0, maximum=1)


@dataclass
class SearchConfig:
    """The search for the fastest layout with few measured trials."""

    tolerance: float = key(0.02, "stop when no untried layout can plausibly beat the best by more than this fraction", minimum=0)
    doubt: float = key(0.1, "stop once the probability that any untried layout is faster than the best by more than tolerance is below this", minimum=0, maximum=1)
    max_trials: Optional[int] = key(None, "most trials; null = no limit", minimum=1)
    max_gpu_hours: Optional[float] = key(None, "most GPU-hours of trials; null = no limit", minimum=0)
    max_hours: Optional[float] = key(None, "most hours of wall-clock time; null = no limit", minimum=0)
    nodes: str = key("fewest", "nodes of a trial: fewest (data degree cut down, layout kept) or full", choices=("fewest", "full"))
    verify: int = key(2, "how many of the best are measured at full size, and again where noise leaves open which is faster", minimum=1)
    start_s: float = key(60.0, "seconds a trial needs before its first step, until some have been measured; counted as GPU-hours", minimum=0)
    enough: Optional[float] = key(None, "a training ends once its step time is known to this fraction (standard error); null = half of tolerance; 0 = after run.steps", minimum=0)
    parallel: int = key(1, "trials proposed at once, for clusters whose queue is the bottleneck", minimum=1)
    recipe: Optional[str] = key(None, "name of the recipe that the winner is written to; null = the name of the sweep")
    target_loss: Optional[float] = key(None, "goal=loss: the validation loss that arms are to reach", above=0)
    arms: dict[str, str] = key(dict, "goal=loss: the arms by name, each the overrides that make it: search.arms.muon='optimizer=muon optimizer.lr=0.003'")
    branches: Optional[int] = key(None, "goal=loss: lengths, up to run.steps and equally far apart, to which decays branch from one stable training of each arm and seed; null = each arm has the schedule and the length that it says", minimum=2, maximum=100)
    decay: float = key(0.2, "goal=loss with branches: share of each length in which the learning rate falls", above=0, maximum=1)
    seeds: int = key(5, "goal=loss: runs of each arm, with run.seed and the seeds after it", minimum=2)
    confidence: float = key(0.95, "goal=loss: probability that an arm named the fastest is; the others are told from it or not by the same", minimum=0.5, maximum=1)
    target_cluster: Optional[str] = key(None, "goal=loss: overrides of the cluster whose time counts, by predicted step times: 'cluster=slurm hardware=h100 cluster.nodes=4 run.precision=bf16'; null = the cluster of the trials, by measured ones")
    space: SpaceConfig = key(SpaceConfig, "which layouts are looked at")
