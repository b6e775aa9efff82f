"""Draws layouts from the whole space and holds each against one process.

    python tests/numerics/matrix.py '{"layout": {"tensor": 2}, "model": {}, "precision": "fp64"}'

runs one case by hand. A case is drawn from (seed, index); cases that break a rule are drawn again. Half of the cases are of an
ordinary small model; the others have corners: stages without a block, a token or two in a sequence, one sequence in a batch, a
vocabulary that leaves tensor ranks without a row, and models with fewer elements than shards, so that ranks own nothing.

``designed`` chooses among the draws: each case has more that none before it had (a value of an axis, then a pair of values).
"""

from __future__ import annotations

import copy
import importlib
import itertools
import json
import math
import random
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tests.farm import Farm, Finished, free_port
from tests.small_runs import ranks
from trainer.data.prepare import prepare
from trainer.launch.rank_env import RankEnv
from trainer.models.experts import Choice, MixtureOfExperts
from trainer.shared.families.family import Family
from trainer.shared.families.registry import FAMILIES
from trainer.shared.parallel.balance import blocks_per_chunk
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.read import from_dict
from trainer.shared.run.resolved import ResolvedTrainConfig
from trainer.shared.run.rules import resolve
from trainer.shared.run.schema import (
    ACTIVATIONS,
    EXCHANGES,
    GATED,
    MATRICES,
    RECOMPUTE,
    ROUTERS,
    SCHEDULES,
    TARGETS,
    DataConfig,
    TrainConfig,
)
from trainer.shared.run.spans import SENTINELS
from trainer.shared.run.tuning import PROMPTS, text_model
from trainer.tensor.dropout import Noise
from trainer.tensor.experts import ExpertDispatcher, own_part
from trainer.tensor.region import places

if TYPE_CHECKING:
    from tests.whole_parameters import Saved
    from trainer.comm.collectives import World
    from trainer.step import Engine

TOLERANCE = {"fp64": 1e-10, "fp32": 1e-5}
ROUNDINGS = 4
"""Times what one process differs from itself: a layout adds up in yet another order."""
SHAKES = (1, 2, 3)
"""Seeds of the weights that are off by a unit in the last place, to see what a model makes of rounding."""
MOST_RANKS, FEW_RANKS = 8, 4
STEPS = 3
"""The first one's gradients, weights that were updated, and moments that were there before."""
FEW_STEPS = 2
"""Of designed cases, enough for that: what the second step makes of the moments is in the last parameters."""
TASKS = (2, 3)
EXAMPLES = [
    {"question": f"what is {i}?", "answer": "it is " * (i % 3) + str(i)} | {f"task{n}": i // 2 % n for n in TASKS} for i in range(12)
]
CHOICES = "chosen experts"
"""The rows of ``ChosenExperts`` of all ranks."""
VOCAB = 300
"""Of text; made-up tokens have fewer."""


@dataclass(frozen=True)
class Case:
    """One point of the space. ``model``, ``layout``, ``tune``, ``run`` and ``data`` hold what differs from the defaults."""

    layout: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    precision: str = "fp64"
    batch: int = 8  # sequences of a step; 6 makes numbers of micro-batches that stages do not divide
    tune: dict[str, Any] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)  # its kind is synthetic by default; text is that of ``EXAMPLES``
    optimizer: dict[str, Any] = field(default_factory=dict)
    steps: int = STEPS
    phases: list[dict[str, Any]] = field(default_factory=list)
    shaken: int = 0  # each weight of the first step is a unit in the last place off, up or down as this seed draws; 0: none is

    def config(self, folder: Path = Path()) -> dict[str, Any]:
        """``folder`` has the text. Adam divides by the gradient's size. The gradient of a key's bias is zero but for rounding, so a large
        eps keeps that rounding from becoming a step."""
        text = {"source": str(folder / "examples.jsonl"), "path": str(folder / "corpus"), "template": "{question}\n{answer}"}
        return {
            "model": {"layers": 2, "hidden": 32, "heads": 4, "vocab": 61, "seq": 16} | self.model,
            "layout": {"micro_batch": 1} | self.layout,
            "data": text | {"kind": "synthetic"} | self.data,
            "optimizer": {"lr": 0.02, "warmup_steps": 1, "eps": 1e-4, "clip": 0.5} | self.optimizer,
            "run": {
                "steps": self.steps,
                "warmup_steps": 0,
                "precision": self.precision,
                "global_batch": self.batch,
                "bucket_mb": 0.03,
                "phases": self.phases,
            }
            | self.run,
            "tune": self.tune,
        }

    @property
    def alone(self) -> Case:
        """The same training by one process, as plain as it gets: all sequences of a step at once."""
        return replace(self, layout={"micro_batch": math.gcd(self.batch, *(phase["global_batch"] for phase in self.phases))}, run={})

    @property
    def ranks(self) -> int:
        return ranks(self.layout)

    @property
    def valid(self) -> bool:
        try:
            resolve(from_dict(TrainConfig, self.config()), self.ranks)
        except ConfigError:
            return False
        return True

    def __str__(self) -> str:
        return json.dumps(asdict(self))


def family_kind(name: str) -> tuple[bool, bool, bool]:
    """What no key of the model changes: whether the embedding has a norm, whether dropout, and whether norms multiply by 1 + weight."""
    family = FAMILIES[name]
    return family.embedding_norm, family.embedding_dropout, family.norm_offset


def plain(family: Family) -> bool:
    """Whether its models are of one stack and trained here."""
    return not (family.attention_sinks or family.encoder_decoder)


def draw(seed: int, index: int, kind: str = "dense") -> Case:
    """Case number ``index`` of a kind of ``KINDS``, at times with experts as well."""
    dice = random.Random(f"{seed}/{index}{'' if kind == 'dense' else f'/{kind}'}")
    while True:
        case = KINDS[kind](dice, _draw_any(dice))
        case = _with_experts(dice, case) if kind in MIXED and dice.random() < MIXED[kind] else case
        if case.ranks <= MOST_RANKS and case.valid:
            case = _with_offload(random.Random(f"{seed}/{index}/offload"), case) if kind == "dense" else case
            return _with_transfer(random.Random(f"{seed}/{index}/transfer"), case) if kind in TRANSFERRED else case


WHOLE = [name for name in SCHEDULES if name != "sliced_1f1b"]
"""Schedules of whole sequences."""
TRANSFERRED = ("dense", "muon")
"""Kinds some of whose models have the hyper-parameters of a base."""
OWN_AXES = ("context", "slices", "latent", "pairs", "muon", "phases")
"""Kinds with axes of their own, which come first."""
MIXED = {"context": 0.3, "slices": 0.3, "latent": 0.6, "muon": 0.3, "phases": 0.3}
"""Kinds that have experts, too, and in what share of their cases."""


def _draw_any(dice: random.Random) -> Case:
    tensor, pipeline, data, sharding = _draw_degrees(dice)
    schedule = dice.choice(WHOLE if pipeline > 1 else ["gpipe", "1f1b", "zero_bubble"])
    virtual = dice.choice([2, 3, 4]) if schedule == "interleaved" else 1
    layout = {
        "tensor": tensor,
        "pipeline": pipeline,
        "data": data,
        "schedule": schedule,
        "virtual_pipeline": virtual,
        "micro_batch": dice.choice([1, 1, 2, 3]),
        "sequence_parallel": tensor > 1 and dice.random() < 0.6,
        "recompute": dice.choice(RECOMPUTE),
        "recompute_layers": dice.choice([None, 1]),
        "recompute_every": dice.choice([1, 2]),
        "balance": dice.choice(["equal", "cost"]),
        "order": dice.choice(["tensor-data-pipeline", "tensor-pipeline-data"]),
        "sharding": dict(zip(("params", "grads", "optimizer"), sharding)),
    }
    kind = dice.choice([{}, {}, {"kind": "corpus"}, {"kind": "instructions"}, {"kind": "instructions", "pack": True}])
    tune = _draw_tuning(dice) if dice.random() < 0.5 else {}
    if tune.get("tasks", 1) > 1 and kind.get("kind") == "instructions":
        kind = kind | {"task": f"task{tune['tasks']}"}
    heads = tensor * dice.choice([1, 2]) if tensor > 1 else dice.choice([2, 4])
    model = {
        "family": dice.choice(dice.choice(list(FAMILY_KINDS.values()))),
        "tied": dice.random() < 0.5,
        "dropout": dice.choice([0.0, 0.0, 0.1]),
        "attention": dice.choice(["fused", "unfused"]),
        "heads": heads,
        "kv_heads": dice.choice([n for n in range(1, heads + 1) if heads % n == 0 and n % tensor == 0]),
        "hidden": heads * dice.choice([4, 8]),
        "ffn": tensor * dice.choice([8, 12]),
        "layers": max(2, pipeline * virtual) + dice.choice([0, 0, 1]),
        "activation": dice.choice(ACTIVATIONS),
        "vocab": VOCAB if kind else 61,
        "seq": tensor * -(-(24 if kind else 12) // tensor),
    }
    run = {
        "async_tensor": bool(layout["sequence_parallel"]) and dice.random() < 0.5,
        "bucket_mb": dice.choice([0.0, 0.03, 25.0]),
        "loss_chunk_mb": dice.choice([None, 4 * model["vocab"] * 5 / 2**20]),
    }
    batch = layout["micro_batch"] * data * dice.choice([1, 2, 3])
    case = Case(layout, model, dice.choice(["fp64", "fp64", "fp32"]), batch, tune, run, kind)
    case = _with_corners(dice, case) if dice.random() < 0.5 or model["layers"] > 4 else case
    return _with_options(dice, case) if dice.random() < 0.8 else case


def _draw_degrees(dice: random.Random) -> tuple[int, int, int, tuple[int, ...]]:
    """Degrees of tensor, pipeline and data, and the three factors of sharding: all levels that can be are as likely as each other."""
    levels = dice.choice(LEVELS)
    factors = [dice.choice([2, 2, 2, 3, 4, 5]) if level else 1 for level in levels]
    *sharding, data = itertools.accumulate(factors, int.__mul__)
    if data > MOST_RANKS:
        return _draw_degrees(dice)
    first = dice.choice([n for n in (1, 2, 2, 3, 4, 5, 6, 8) if n * data <= MOST_RANKS])
    second = dice.choice([n for n in (1, 2, 2, 3, 4) if n * first * data <= MOST_RANKS])
    return *dice.sample([first, second], 2), data, tuple(sharding)


LEVELS = [levels for levels in itertools.product([False, True], repeat=4) if sum(levels) < 4]
"""Whether parameters are sharded, gradients more than they, optimizer states more than those, and whether there are replicas left of them:
whatever eight ranks can have."""


def _draw_tuning(dice: random.Random) -> dict[str, Any]:
    method = dice.choice(["lora", "lora", "lora", "adapter", "prompt", "p_tuning", "ia3"])
    return {
        "method": method,
        "targets": dice.sample(TARGETS, dice.randint(1, len(TARGETS))),
        "rank": dice.choice([1, 3, 4]),
        "alpha": 8.0,
        "dropout": dice.choice([0.0, 0.1]),
        "virtual_tokens": dice.choice([1, 3, 5]),
        "encoder": 5,
        "tasks": dice.choice([1, *TASKS]) if method in ("prompt", "p_tuning") else 1,
    }


def _with_corners(dice: random.Random, case: Case) -> Case:
    """``case`` with some of what is smallest. In fp64, for LayerNorm over few elements makes much of rounding."""
    layout, model, batch = dict(case.layout), dict(case.model), case.batch
    chunks, tensor = layout["pipeline"] * layout["virtual_pipeline"], layout["tensor"]
    if model["layers"] > 4 or dice.random() < 0.5:
        model["layers"] = min(model["layers"], 4)
        cuts = sorted(dice.randint(0, model["layers"]) for _ in range(chunks - 1))
        layout["stage_layers"] = [high - low for low, high in itertools.pairwise([0, *cuts, model["layers"]])]
    if dice.random() < 0.5:
        model["ffn"] = tensor * dice.choice([1, 4])
    if not case.data and dice.random() < 0.4:
        model["vocab"] = dice.choice([2, 3, 5])
    if not case.data and dice.random() < 0.4:
        model["seq"] = tensor * dice.choice([1, 2]) if layout["sequence_parallel"] else dice.choice([1, 2])
    if dice.random() < 0.3:
        layout["micro_batch"], batch = 1, layout["data"]
    return replace(case, layout=layout, model=model, batch=batch, precision="fp64")


def _with_context(dice: random.Random, case: Case) -> Case:
    """``case`` with context ranks, over which states may be sharded, too."""
    layout, run, degree, batch = case.layout, case.run, dice.choice([2, 2, 2, 3, 4]), case.batch
    kept = dice.choice(["tensor", "pipeline", "data", "none", "all"])
    if kept not in ("data", "all"):
        layout, batch = layout | {"data": 1}, batch // layout["data"]
    if kept not in ("tensor", "all"):
        layout, run = layout | {"tensor": 1, "sequence_parallel": False}, run | {"async_tensor": False}
    if kept not in ("pipeline", "all"):
        layout = {name: value for name, value in layout.items() if name != "stage_layers"} | {"pipeline": 1, "virtual_pipeline": 1}
        layout["schedule"] = "1f1b" if layout["schedule"] == "interleaved" else layout["schedule"]
    unit = 2 * degree * (layout["tensor"] if layout["sequence_parallel"] else 1)
    shards = [degree * layout["data"]]
    for _ in ("optimizer", "grads", "params"):
        shards.append(dice.choice([n for n in range(1, shards[-1] + 1) if shards[-1] % n == 0]))
    sharding = dict(zip(("optimizer", "grads", "params"), shards[1:]))
    model, exchange = case.model | {"seq": unit * -(-case.model["seq"] // unit)}, dice.choice(EXCHANGES)
    if exchange == "all_to_all":
        groups, each = layout["tensor"] * degree, dice.choice([1, 2])
        model |= {"heads": groups * each, "kv_heads": groups, "hidden": groups * each * dice.choice([4, 8])}
    return replace(
        case,
        layout=layout | {"context": degree, "sharding": sharding},
        model=model,
        run=run | {"context_exchange": exchange},
        batch=batch,
    )


def _with_slices(dice: random.Random, case: Case) -> Case:
    """``case`` in slices: of equal work, of any lengths, or of a token each but for one (of one on each tensor rank that shares it)."""
    layout = {name: value for name, value in case.layout.items() if name != "stage_layers" or case.layout["virtual_pipeline"] == 1}
    unit = layout["tensor"] if layout["sequence_parallel"] else 1
    units = max(2, case.model["seq"] // unit)
    count = min(units, dice.choice([2, 3, 4, 6]))
    kind = dice.choice(["work", "any", "tokens"])
    if kind == "any":
        cuts = sorted(dice.sample(range(1, units), count - 1))
        layout["slice_lengths"] = [unit * (high - low) for low, high in itertools.pairwise([0, *cuts, units])]
    elif kind == "tokens":
        layout["slice_lengths"] = [unit] * count
        layout["slice_lengths"][dice.randrange(count)] *= units - count + 1
    layout |= {"schedule": "sliced_1f1b", "virtual_pipeline": 1, "slices": count}
    return replace(case, layout=layout, model=case.model | {"seq": unit * units}, precision="fp64")


def _with_latents(dice: random.Random, case: Case) -> Case:
    """``case`` with queries, keys and values from latents, at times over context ranks. Values are narrower than keys, or wider. In fp64, for
    norms of few elements."""
    case = _with_context(dice, case) if dice.random() < 0.3 else case
    turning = dice.choice([2, 4, 6])
    latent = {
        "kv_rank": dice.choice([3, 8]),
        "query_rank": dice.choice([0, 5]),
        "rotary": turning,
        "value": dice.choice([None, 3, 20]),
        "interleaved": dice.random() < 0.7,
    }
    model = case.model | {"latent": latent, "kv_heads": case.model["heads"], "qk_norm": "none"}
    model["biases"] = [name for name in model.get("biases", ()) if name != "qkv"]
    if "rope" in model:
        model["rope"] = (
            model["rope"] | {"share": 1.0} | {name: [1.5] * (turning // 2) for name in ("short", "long") if name in model["rope"]}
        )
    tune = case.tune | {"targets": ["output"]} if case.tune.get("method") == "lora" else case.tune
    return replace(case, model=model, tune=tune if tune.get("method") != "ia3" else {}, precision="fp64")


def _with_experts(dice: random.Random, case: Case) -> Case:
    """``case`` with experts, few enough for some to have no token. In fp64, for rounding may change what a router chooses."""
    folded = case.layout["tensor"] * case.layout.get("context", 1) * case.layout["data"]
    degree = dice.choice([n for n in range(1, folded + 1) if folded % n == 0])
    groups = dice.choice([1, 1, 2])
    count = math.lcm(degree, groups) * dice.choice([1, 2, 4])
    active_groups = dice.choice([1, groups])
    corrected = dice.choice([None, None, 0.0, 0.05]) if count >= 2 * groups or groups == 1 else None
    experts = {
        "count": count,
        "active": dice.randint(1, min(3, active_groups * count // groups)),
        "ffn": dice.choice([None, 4, 12]),
        "shared_ffn": dice.choice([0, 0, 4]) * case.layout["tensor"],
        "shared_gate": dice.random() < 0.5,
        "dense_layers": dice.choice([0, 0, 1]),
        "every": dice.choice([1, 1, 2]),
        "router_bias": dice.random() < 0.3,
        "router": dice.choice(ROUTERS),
        "normalized": dice.random() < 0.5,
        "scale": dice.choice([1.0, 2.5]),
        "groups": groups,
        "active_groups": active_groups,
        "correction": corrected,
        "balance_loss": dice.choice([0.0, 0.3]),
        "z_loss": dice.choice([0.0, 0.02]),
    }
    width = experts["ffn"] or case.model.get("ffn", 1)
    cut = dice.choice([1, *(n for n in range(2, folded // degree + 1) if folded // degree % n == 0 and width % n == 0)])
    layout = case.layout | {"expert": degree, "expert_tensor": cut}
    return replace(case, layout=layout, model=case.model | {"experts": experts}, precision="fp64")


def _with_encoder(dice: random.Random, case: Case) -> Case:
    """``case`` with an encoder in front, of any share of the blocks, and what such models choose from."""
    layout, model, tune = case.layout, case.model, case.tune if case.tune.get("method") not in PROMPTS else {}
    layers = max(2, model["layers"])
    unit = layout["tensor"] if layout["sequence_parallel"] else 1
    data = {"kind": case.data["kind"]} if case.data else {}
    lengths = {"instructions": (40, 20), "corpus": (24, 8)}.get(data.get("kind", ""), (dice.choice([1, 5, 12]), dice.choice([1, 3, 8])))
    read, written = (unit * -(-length // unit) for length in lengths)
    pairs = {name: value for name, value in model.items() if name in ("dropout", "attention", "heads", "hidden", "ffn", "activation")}
    pairs |= {
        "family": "t5",
        "layers": layers,
        "kv_heads": model["heads"],
        "encoder_layers": dice.randint(1, layers - 1),
        "seq": read,
        "decoder_seq": written,
        "vocab": VOCAB + SENTINELS if data else model["vocab"],
        "tied": dice.random() < 0.5,
        "positions": dice.choice(["relative", "relative", "learned", "none"]),
        "relative_buckets": dice.choice([4, 8, 32]),
        "relative_distance": dice.choice([17, 128]),
        "norm": dice.choice(["rms", "rms", "layer", "layer_no_bias"]),
        "biases": dice.choice([[], [], [*MATRICES], ["qkv", "down"]]),
        "head_width": dice.choice([4, 12]),
    }
    if layout.get("stage_layers") and sum(layout["stage_layers"]) != layers:
        layout = {name: value for name, value in layout.items() if name != "stage_layers"}
    return replace(case, layout=layout, model=pairs, tune=tune, data=data, precision="fp64")


def _with_muon(dice: random.Random, case: Case) -> Case:
    """``case`` with orthogonalised matrices, at times over context ranks. In fp64, for the iterations make much of rounding. Queries that see
    one key alone have no gradient: its rounding would become a step."""
    case = _with_context(dice, case) if dice.random() < 0.2 else case
    model = case.model | ({"window": 3} if case.model.get("window") == 1 else {})
    muon = {
        "nesterov": dice.random() < 0.7,
        "scale": dice.choice(["rms", "spectral"]),
        "cautious": dice.random() < 0.3,
        "steps": dice.choice([3, 5]),
    }
    groups = dice.choice([{}, {"matrices": {"lr": 0.05, "weight_decay": 0.3}}])
    muon["row_beta"] = dice.choice([0.0, 0.9])
    return replace(case, model=model, optimizer={"kind": "muon", "muon": muon, "groups": groups}, precision="fp64")


def _with_offload(dice: random.Random, case: Case) -> Case:
    """``case`` with a share of its states in host memory, three times out of five."""
    share = dice.choice([0.0, 0.0, 0.3, 0.7, 1.0])
    return replace(case, layout=case.layout | {"sharding": case.layout["sharding"] | {"offload": share}})


def _with_transfer(dice: random.Random, case: Case) -> Case:
    """``case`` with hyper-parameters of a base of another width, and at times of another depth, one time out of three."""
    base = {"hidden": dice.choice([8, 24, 64]), "head_width": dice.choice([None, 16])}
    deep = {"layers": dice.choice([1, 6])} if dice.random() < 0.5 else {}
    optimizer = case.optimizer | ({"muon": case.optimizer["muon"] | {"scale": "aspect"}} if "muon" in case.optimizer else {})
    model = case.model | {"transfer": {"kind": "completep" if deep else "mup", **base, **deep}}
    other = replace(case, model=model, optimizer=optimizer, precision="fp64")
    return other if dice.random() < 1 / 3 and other.valid else case


def _with_phases(dice: random.Random, case: Case) -> Case:
    """``case`` with one or two phases before its last one: of other batches, shorter sequences or both, each of a step or two."""
    case = dice.choice([lambda dice, case: case, lambda dice, case: case, _with_context, _with_slices])(dice, case)
    seq, unit = case.model["seq"], case.layout["micro_batch"] * case.layout["data"]
    phases: list[dict[str, Any]] = []
    before = steps = 0
    for _ in range(dice.choice([1, 2])):
        pieces = dice.choice([n for n in (1, 2, 2, 3, 4) if seq % n == 0])
        count, batch = dice.choice([1, 2]), math.lcm(unit, pieces) * dice.choice([1, 1, 2])
        before, steps = before + count * batch * (seq // pieces), steps + count
        phase = {"until": before - dice.choice([0, 1]), "global_batch": batch, "seq": seq // pieces}
        phases.append(phase | dice.choice([{}, {"lr": 0.5}]))
    return replace(case, phases=phases, steps=steps + 1, precision="fp64")


KINDS: dict[str, Callable[[random.Random, Case], Case]] = {
    "dense": lambda dice, case: case,
    "experts": _with_experts,
    "context": _with_context,
    "slices": _with_slices,
    "latent": _with_latents,
    "pairs": _with_encoder,
    "muon": _with_muon,
    "phases": _with_phases,
}
"""What makes a dense case one of a kind."""


OPTIONS: dict[str, list[Any]] = {
    "head_width": [12, 16],
    "biases": [[], ["qkv", "down"], [*MATRICES], ["output", "up", "head"], ["head"]],
    "positions": ["learned", "rotary", "alibi", "none", "none"],
    "norm": ["layer", "layer_no_bias", "layer_no_bias", "rms"],
    "norm_at": ["before", "after", "both"],
    "qk_norm": ["none", "head", "width"],
    "residual": ["sequential", "parallel", "parallel_one_norm"],
    "window": [1, 3, 5],
    "full_every": [0, 2],
    "score_cap": [0.5],
    "logit_cap": [0.7],
    "attention_scale": [0.3],
    "embedding_scale": [3.0],
    "residual_scale": [0.5],
    "logit_scale": [0.5],
}
"""Values of the model's keys that every family leaves to their defaults, or chooses from. Caps are low enough to bend what they cap."""
ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0, "original": 8},
    "llama3": {"factor": 4.0, "original": 8, "low": 0.5, "high": 2.0},
    "yarn": {"factor": 4.0, "original": 8, "fast": 2.0, "slow": 0.2},
    "longrope": {"factor": 3.0, "original": 8},
}
FAMILY_KINDS = {
    kind: [name for name, family in FAMILIES.items() if plain(family) and family_kind(name) == kind]
    for kind in sorted({family_kind(name) for name, family in FAMILIES.items() if plain(family)})
}
"""Families by what no key of the model changes."""


def _with_options(dice: random.Random, case: Case) -> Case:
    """``case`` with other values for some of the model's keys. In fp64, for norms over few elements make much of rounding."""
    share = dice.choice([0.3, 0.7])
    model = case.model | {name: dice.choice(values) for name, values in OPTIONS.items() if dice.random() < share}
    if "window" not in model:
        model.pop("full_every", None)
    if "head" in model.get("biases", ()):
        model["tied"] = False
    if dice.random() < 0.4:
        kind = dice.choice(list(ROPES))
        width = model.setdefault("head_width", 12)
        turning = dice.choice([1.0, 0.5])
        factors = [dice.choice([1.0, 1.5, 3.0]) for _ in range(round(width * turning) // 2)]
        model["rope"] = {"kind": kind, "share": turning, **ROPES[kind]} | (
            {"short": factors, "long": factors} if kind == "longrope" else {}
        )
        model["rope"] |= {"skip_every": dice.choice([0, 2])} | ({"local_theta": 50.0} if "window" in model and dice.random() < 0.5 else {})
        model["positions"] = "rotary"
    return replace(case, model=model, precision="fp64")


OPTIONS_OF_NOTE = {
    **{f"{name}={value}": (name, value) for name in ("norm_at", "qk_norm", "residual") for value in OPTIONS[name][1:]},
    **{f"positions={value}": ("positions", value) for value in ("alibi", "none")},
    "norm=layer_no_bias": ("norm", "layer_no_bias"),
    "full_every": ("full_every", 2),
}
"""Values that are tried under each kind of layout."""
VALUED = ("head_width", "window", "score_cap", "logit_cap", "attention_scale", "embedding_scale", "residual_scale", "logit_scale")
"""Keys of which any value is."""
ROTARY = ("scaled", "share", "skip_every", "local_theta")
"""Likewise of rotary positions."""


def options(case: Case) -> set[str]:
    """The choices of ``case`` that a plain model does not make."""
    model, rope = case.model, case.model.get("rope", {})
    told = {name: FAMILIES[model["family"]].default(name) for name, _ in OPTIONS_OF_NOTE.values()} | model
    found = {title for title, (name, value) in OPTIONS_OF_NOTE.items() if told[name] == value} | {*VALUED} & model.keys()
    turning = {"scaled": rope.get("kind", "default") != "default", "share": rope.get("share", 1) < 1} | {
        name: bool(rope.get(name)) for name in ("skip_every", "local_theta")
    }
    return (
        found
        | {f"rope.{name}" for name in ROTARY if turning[name]}
        | ({"bias of the head"} if "head" in model.get("biases", ()) else set())
    )


def kinds_of_layout(case: Case) -> set[str]:
    """What each of ``options`` has to meet."""
    layout = case.layout
    held = {
        "tensor": layout["tensor"] > 1,
        "sequence parallelism": layout["sequence_parallel"],
        "sharded parameters": layout["sharding"]["params"] > 1,
        "selective recomputation": layout["recompute"] == "selective",
        "full recomputation": layout["recompute"] == "full",
        "dropout": case.model["dropout"] > 0,
        "low-rank tuning": case.tune.get("method") == "lora",
        "chunks of the loss": case.run["loss_chunk_mb"] is not None,
        **{name: layout["pipeline"] > 1 and layout["schedule"] == name for name in SCHEDULES},
    }
    return {name for name, holds in held.items() if holds}


def traits(case: Case) -> dict[str, Any]:
    """Where a case is on each axis of the space."""
    layout, model, run = case.layout, case.model, case.run
    sharding = [1, *(layout["sharding"][state] for state in ("params", "grads", "optimizer")), layout["data"]]
    heads = model["kv_heads"], model["heads"]
    return (
        {
            "levels": tuple(low < high for low, high in itertools.pairwise(sharding)),
            "tensor": layout["tensor"],
            "pipeline": layout["pipeline"],
            "data": layout["data"],
            "schedule": (layout["schedule"], layout["recompute"]) if layout["pipeline"] > 1 else layout["recompute"],
            "virtual": layout["virtual_pipeline"],
            "partly recomputed": layout["recompute"] == "full" and (layout["recompute_layers"] is not None, layout["recompute_every"]),
            "sequence": (layout["sequence_parallel"], run["async_tensor"]),
            "stages": "given" if "stage_layers" in layout else layout["balance"],
            "order": layout["order"],
            "micro-batch": layout["micro_batch"],
            "micro-batches": case.batch // layout["micro_batch"] // layout["data"],
            "family": (family_kind(model["family"]), model["tied"]),
            "attention": (model["attention"], model["dropout"] > 0),
            "keys": "one" if heads[0] == 1 < heads[1] else heads[0] < heads[1],
            "activation": model["activation"],
            "vocabulary": model["vocab"],
            "tokens": min(model["seq"], 3),
            "precision": case.precision,
            "data kind": (case.data.get("kind", "synthetic"), case.data.get("pack", False)),
            "tuned": case.tune.get("method", "full"),
            "tasks": case.tune.get("tasks", 1),
            "loss": run["loss_chunk_mb"] is not None,
            "buckets": run["bucket_mb"],
            "offload": layout["sharding"].get("offload", 0.0),
            "rope": case.model.get("rope", {}).get("kind"),
            "transfer": case.model.get("transfer", {}).get("kind"),
        }
        | _traits_of_context(case)
        | _traits_of_slices(case)
        | _traits_of_pairs(case)
        | _traits_of_experts(case)
        | _traits_of_latents(case)
        | _traits_of_muon(case)
        | _traits_of_phases(case)
    )


def _traits_of_context(case: Case) -> dict[str, Any]:
    model, layout, degree = case.model, case.layout, case.layout.get("context", 1)
    if degree == 1:
        return {}
    exchange, sharding = case.run["context_exchange"], layout["sharding"]
    return {
        "context": (degree, exchange),
        "context beside": (layout["tensor"] > 1, layout["sequence_parallel"], layout["pipeline"] > 1, layout["data"] > 1),
        "context sharded": (sharding["params"] > 1, sharding["optimizer"] > layout["data"], layout["order"]),
        "context recomputed": (layout["recompute"], exchange),
        "context attends": (model["attention"], model["dropout"] > 0, exchange),
        "context in windows": (model.get("window") is not None, model["attention"]),
        "context with texts": case.data.get("pack", False),
        "context with experts": "experts" in model,
    }


def _traits_of_slices(case: Case) -> dict[str, Any]:
    model, layout = case.model, case.layout
    if layout.get("slices", 1) == 1:
        return {}
    lengths, unit = layout.get("slice_lengths"), layout["tensor"] if layout["sequence_parallel"] else 1
    return {
        "slices": (layout["slices"], lengths and lengths.count(unit) >= len(lengths) - 1),
        "slices beside": (layout["tensor"] > 1, layout["sequence_parallel"], layout["pipeline"] > 1, layout["data"] > 1),
        "slices sharded": (layout["sharding"]["params"] > 1, layout["sharding"]["optimizer"] > 1),
        "slices recomputed": layout["recompute"],
        "slices attend": (model["attention"], model["dropout"] > 0),
        "slices in windows": (model.get("window") is not None, model["attention"]),
        "slices at": model.get("positions", FAMILIES[model["family"]].default("positions")),
        "slices with texts": case.data.get("pack", False),
        "slices with experts": "experts" in model,
        "slices of virtual tokens": case.tune.get("method") in PROMPTS,
    }


def _traits_of_pairs(case: Case) -> dict[str, Any]:
    model, layout = case.model, case.layout
    if "encoder_layers" not in model:
        return {}
    config = resolve(from_dict(TrainConfig, case.config()), case.ranks)
    counts = blocks_per_chunk(config.model, config.layout)
    cuts, border = [*itertools.accumulate(counts)][:-1], model["encoder_layers"]
    where = {"encoder" if 0 < cut < border else "decoder" if border < cut < config.model.layers else "border" for cut in cuts}
    return {
        "pairs cut": (tuple(sorted(where)), layout["schedule"]),
        "pairs at": (model["positions"], layout["tensor"] > 1, layout["sequence_parallel"], layout["pipeline"] > 1),
        "pairs without use for a stream": len(counts) > 1 and counts[-1] == 0,
        "pairs tied": (model["tied"], layout["pipeline"] > 1, layout["schedule"] == "interleaved"),
        "pairs recomputed": (layout["recompute"], model["dropout"] > 0, model["attention"]),
        "pairs sharded": (layout["sharding"]["params"] > 1, layout["sharding"]["optimizer"] > 1, layout["pipeline"] > 1),
        "pairs of data": case.data.get("kind", "synthetic"),
        "pairs' tokens": (min(model["seq"], 2), min(model["decoder_seq"], 2)),
        "pairs in training": case.tune.get("method", "full"),
    }


def _traits_of_experts(case: Case) -> dict[str, Any]:
    experts, layout = case.model.get("experts"), case.layout
    if experts is None:
        return {}
    degree, cut, tensor = layout["expert"], layout["expert_tensor"], layout["tensor"]
    alike = tensor * layout.get("context", 1) * layout["data"] // degree // cut
    return {
        "experts cut": (cut > 1, cut > tensor, degree > 1, tensor > 1 and (cut < tensor, layout["sequence_parallel"])),
        "cut experts": cut > 1 and (layout["pipeline"] > 1, layout["recompute"], experts["shared_ffn"] > 0),
        "cut experts alike": cut > 1 and (alike > 1, layout["sharding"]["params"] > 1, layout["sharding"]["optimizer"] > 1),
        "experts over": (degree > 1, layout["tensor"] > 1, layout["sequence_parallel"], layout["data"] > 1),
        "experts alike": (alike > 1, layout["sharding"]["params"] > 1, layout["sharding"]["optimizer"] > 1),
        "one expert each": degree == experts["count"],
        "router": (experts["router"], experts["normalized"], experts["groups"], experts["correction"] is not None),
        "experts recomputed": (layout["recompute"], layout["schedule"]),
        "balanced": (experts["balance_loss"] > 0, layout["tensor"] > 1, layout["recompute"] == "full"),
        "shared experts": (experts["shared_ffn"] > 0, experts["shared_gate"], layout["tensor"] > 1),
        "blocks with experts": (experts["dense_layers"], experts["every"]),
    }


def _traits_of_latents(case: Case) -> dict[str, Any]:
    latent, layout = case.model.get("latent"), case.layout
    if latent is None:
        return {}
    width, context = case.model.get("head_width", 8) + latent["rotary"], layout.get("context", 1)
    return {
        "latent of queries": (latent["query_rank"] > 0, layout["tensor"] > 1),
        "latent values": ((latent["value"] or 0) > width, case.model["attention"], case.model["dropout"] > 0),
        "latent over": (layout["tensor"] > 1, layout["sequence_parallel"], layout["pipeline"] > 1, layout["data"] > 1),
        "latent recomputed": (layout["recompute"], layout["sequence_parallel"]),
        "latent sharded": (layout["sharding"]["params"] > 1, layout["tensor"] > 1),
        "latent turning": (case.model.get("positions") in (None, "rotary"), latent["interleaved"]),
        "latent context": context > 1 and case.run["context_exchange"],
        "latent experts": ("experts" in case.model, layout.get("expert", 1) > 1),
    }


def _traits_of_muon(case: Case) -> dict[str, Any]:
    layout, sharding = case.layout, case.layout["sharding"]
    if not case.optimizer:
        return {}
    cut = sharding["optimizer"] > 1, layout["tensor"] > 1
    return {
        "muon shards": (*cut, sharding["params"] > 1),
        "muon over": (*cut, layout["pipeline"] > 1, sharding["optimizer"] < layout["data"]),
        "muon with experts": ("experts" in case.model, *cut, layout.get("expert", 1) > 1),
        "muon with context": (layout.get("context", 1) > 1, *cut),
        "muon tunes": case.tune.get("method", "full"),
        "muon and ties": (case.model["tied"], layout["pipeline"] > 1),
        "muon's gates": (case.model["activation"] in GATED, *cut),
        "muon's keys": (case.model["kv_heads"] < case.model["heads"], *cut),
        "muon's buckets": (case.run["bucket_mb"], *cut),
    } | {f"muon.{name}": value for name, value in case.optimizer["muon"].items()}


def _traits_of_phases(case: Case) -> dict[str, Any]:
    layout, shorter = case.layout, any(phase["seq"] < case.model["seq"] for phase in case.phases)
    if not case.phases:
        return {}
    return {
        "phases": (len(case.phases), shorter),
        "phases of batches": len({phase["global_batch"] for phase in case.phases} | {case.batch}) > 1,
        "phases over": (shorter, layout["pipeline"] > 1, layout["tensor"] > 1, layout["data"] > 1),
        "phases beside": (shorter, layout["sequence_parallel"], layout.get("context", 1) > 1, layout.get("slices", 1) > 1),
        "phases with experts": (shorter, "experts" in case.model),
        "phases of noise": (shorter, case.model["dropout"] > 0),
    }


@cache
def designed(seed: int, count: int, kind: str = "dense", choice: int = 60) -> list[Case]:
    """``count`` cases of a kind, each the one of the next ``choice`` draws that has the most values of axes that none before it has (of
    ``OWN_AXES``, its own axes first), and after that the most pairs of an option and a kind of layout, then of any values, for each of its
    ranks."""
    chosen: list[Case] = []
    seen: set[Any] = set()
    for number in range(count):
        draws = [draw(seed, index, kind) for index in range(number * choice, (number + 1) * choice)]
        draws = [case for case in draws if case.ranks <= FEW_RANKS or kind in ("dense", "muon")]
        found = [set(traits(case).items()) for case in draws]
        met = [set(itertools.product(options(case), kinds_of_layout(case))) for case in draws]
        every = [values | set(itertools.combinations(sorted(values, key=str), 2)) for values in found]
        first = [{value for value in values if kind in OWN_AXES and value[0].startswith(kind)} for values in found]
        worth = [
            (len(first[n] - seen), len(found[n] - seen) + len(met[n] - seen), len(every[n] - seen) / draws[n].ranks)
            for n in range(len(draws))
        ]
        best = max(range(len(draws)), key=lambda n: worth[n])
        chosen.append(draws[best])
        seen |= every[best] | met[best]
    return [case if case.phases else replace(case, steps=FEW_STEPS) for case in chosen]


def by_ranks(cases: Sequence[Case]) -> dict[int, list[Case]]:
    """``cases`` by the ranks that they take: the same ranks train one after the other."""
    found = defaultdict(list)
    for case in cases:
        found[case.ranks].append(case)
    return found


def trained(env: RankEnv, out: str | Path, configs: list[dict[str, Any]], shaken: Sequence[int] = ()) -> None:
    """Run in every rank: train each of ``configs``, and leave losses, norms and this rank's part of the final parameters in ``out``. Each has
    a world of its own, which takes a tenth of what a step takes: torch names groups by how many a rank has made, and layouts give ranks
    different numbers of them."""
    from trainer.comm.collectives import World

    port = env.port
    for number, config in enumerate(configs):
        print(json.dumps(config), flush=True)  # the last one in the log is the one that failed
        world = World(env.rank, env.world_size, torch.device("cpu"), env.address, port, 60.0)
        found, port = _trained(world, resolve(from_dict(TrainConfig, config), env.world_size), shaken[number] if shaken else 0)
        torch.save(found, Path(out) / f"{number}.{env.rank}.pt")
        world.close()


def _trained(
    world: World, run: ResolvedTrainConfig, shaken: int
) -> tuple[tuple[torch.Tensor, torch.Tensor, list[Saved], list[torch.Tensor]], int]:
    """Losses and norms of all steps, parts of parameters, and the experts that tokens have had."""
    from tests.whole_parameters import parts
    from trainer.data import open_dataset
    from trainer.step import Engine

    dataset = open_dataset(run.data, text_model(run.model, run.tune), run.run.seed)
    engine = Engine(run, world, dataset)
    if shaken:
        _shake(engine, torch.Generator().manual_seed(shaken))
    choices = ChosenExperts(engine)
    frozen = [piece.weight.clone() for piece in engine.rank.shards if not piece.record.trainable]
    results = []
    for choices.step in range(run.run.steps):
        results.append(engine.step(choices.step))
    still = [piece.weight for piece in engine.rank.shards if not piece.record.trainable]
    assert all(map(torch.equal, frozen, still)), "what is frozen has changed"
    losses = torch.tensor([r.loss for r in results], dtype=torch.float64)
    norms = torch.tensor([r.grad_norm for r in results], dtype=torch.float64)
    found = losses, norms, [*parts(engine.rank), *_load(engine)], choices.rows
    return found, engine.rank.groups.world.gather_objects(free_port())[0]  # nobody leaves a world that another one still uses


def _shake(engine: Engine, draws: torch.Generator) -> None:
    """Moves each parameter by a unit in its last place, up or down."""
    for chunk in engine.rank.pipeline.chunks:
        for parameter in chunk.model.parameters():
            up = torch.randint(0, 2, parameter.shape, generator=draws).to(parameter.dtype) * 2 - 1
            parameter.data.mul_(1 + up * torch.finfo(parameter.dtype).eps)


class ChosenExperts:
    """The experts that routers of this rank choose: rows of step, block, sequence, position, and the experts in order."""

    def __init__(self, engine: Engine):
        self.rank, self.step, self.rows = engine.rank, 0, list[torch.Tensor]()
        for chunk in engine.rank.pipeline.chunks:
            for name, layer in chunk.model.named_modules():
                if isinstance(layer, MixtureOfExperts):
                    layer.balanced = self._noted(layer, int(name.split(".")[1]), chunk.noise)  # type: ignore[method-assign]

    def _noted(self, layer: MixtureOfExperts, block: int, noise: Noise) -> Callable[[Choice, torch.Tensor], Choice]:
        balanced, region, dispatcher = layer.balanced, self.rank.region, layer.dispatcher

        def note(choice: Choice, x: torch.Tensor) -> Choice:
            length, batch = x.shape[:2]
            index = torch.arange(length * batch)
            if isinstance(dispatcher, ExpertDispatcher) and dispatcher.splits:
                index = index[own_part(len(index), region.group)]
            where = noise.key.first_row + index % batch, places(region.runs(length), x.device)[index // batch]
            common = (torch.full_like(index, number) for number in (self.step, block))
            self.rows.append(torch.cat((torch.stack((*common, *where), 1), choice.experts.sort(-1).values), 1))
            return balanced(choice, x)

        return note


def _load(engine: Engine) -> list[Saved]:
    """The tokens of each expert of each block in the last step, as a parameter: all ranks know them."""
    if engine.rank.balance is None:
        return []
    load = engine.rank.balance.load
    shape = tuple(load.shape)
    return [("tokens of experts", shape, tuple((0, n) for n in shape), shape, 0, load.flatten())]


def train_all(farm: Farm, ranks: int, configs: list[dict[str, Any]]) -> list[dict[str, torch.Tensor]]:
    """Losses, norms and final parameters of each of ``configs``, which the same ranks train one after the other."""
    done = farm.call(trained, ranks, configs=configs)
    return [_whole(done, number) for number in range(len(configs))]


class Failed(Exception):
    """Ranks of a case that ended before they were through with it, or that differ."""


class Matrix:
    """Runs cases, and remembers what one process makes of each model. ``plainer``: a case that fails is made plain before it is shown."""

    def __init__(self, farm: Farm, plainer: bool = True):
        self.farm, self.text, self.plainer = farm, farm.folder(), plainer
        self.references: dict[str, dict[str, torch.Tensor]] = {}
        self.flipped = [0, 0]  # tokens with other experts than in one process, of all
        (self.text / "examples.jsonl").write_text("\n".join(map(json.dumps, EXAMPLES)))
        (self.text / "text.txt").write_text(" ".join(map(json.dumps, EXAMPLES)))
        prepare(DataConfig(source=str(self.text / "text.txt"), path=str(self.text / "corpus"), vocab=VOCAB))

    def run(self, cases: Sequence[Case]) -> list[dict[str, torch.Tensor] | Failed]:
        """What becomes of each of ``cases``, which take as many ranks as each other. After one that fails the others have ranks anew."""
        found: list[dict[str, torch.Tensor] | Failed] = []
        while len(found) < len(cases):
            left, out = cases[len(found) :], self.farm.folder()
            call = self.farm.write_call(
                out, trained, configs=[case.config(self.text) for case in left], shaken=[case.shaken for case in left]
            )
            done = self.farm.wait(self.farm.start(call, left[0].ranks, out))
            for number, case in enumerate(left):
                if not all((out / f"{number}.{rank}.pt").exists() for rank in range(case.ranks)):
                    found.append(Failed(f"exit codes {done.codes}\n{done.logs[-3000:]}"))
                    break
                try:
                    found.append(_whole(done, number))
                except AssertionError as error:
                    found.append(Failed(str(error)))
        return found

    def trained(self, cases: Sequence[Case]) -> list[dict[str, torch.Tensor]]:
        """The same of cases that must not fail."""
        found = self.run(cases)
        for one in found:
            if isinstance(one, Failed):
                raise one
        return [one for one in found if isinstance(one, dict)]

    def remember(self, cases: Sequence[Case]) -> None:
        """The references of all ``cases`` by one process."""
        wanted = {str(case.alone): case.alone for case in cases}
        if missing := [one for name, one in wanted.items() if name not in self.references]:
            self.references |= zip(map(str, missing), self.trained(missing))

    def reference(self, case: Case) -> dict[str, torch.Tensor]:
        self.remember([case])
        return self.references[str(case.alone)]

    def faults(self, cases: Sequence[Case]) -> list[str | None]:
        """What is wrong with each of ``cases``, which take as many ranks as each other: what differs most from one process, and by how much,
        relative to its largest element."""
        self.remember(cases)
        return [self._fault(case, found) for case, found in zip(cases, self.run(cases))]

    def _fault(self, case: Case, found: dict[str, torch.Tensor] | Failed) -> str | None:
        expected = self.reference(case)
        if isinstance(found, Failed):
            return str(found)
        if expected.keys() != found.keys():
            return f"other parameters: {expected.keys() ^ found.keys()}"
        flipped = _flipped(found, expected)
        self.flipped = [total + count for total, count in zip(self.flipped, flipped)]
        if flipped[0]:  # another model from here on
            return f"{flipped[0]} of {flipped[1]} tokens have other experts" if case.precision == "fp64" else None
        name, difference = _worst(found, expected)
        if difference <= TOLERANCE[case.precision]:
            return None
        allowed = max(TOLERANCE[case.precision], ROUNDINGS * self.rounding(case))
        return f"{name} differs by {difference:.1e}, allowed is {allowed:.0e}" if difference > allowed else None

    def rounding(self, case: Case) -> float:
        """How much one process differs from itself where it adds up in another order, with smaller micro-batches, and where weights are off
        by what they cannot be told from. A norm over few elements makes twenty times as much of it in every step, one over the few of a
        latent hundreds of times."""
        sizes = [size for size in (1, 2, 3, case.batch // 2) if 0 < size < case.batch and case.batch % size == 0]
        orders = [replace(case.alone, layout={"micro_batch": size}) for size in sorted(set(sizes))]
        others = self.trained([*orders, *(replace(case.alone, shaken=seed) for seed in SHAKES)])
        alike = [other for other in others if not _flipped(other, self.reference(case))[0]]
        return max((_worst(other, self.reference(case))[1] for other in alike), default=0.0)

    def fault(self, case: Case) -> str | None:
        return self.faults([case])[0]

    def check(self, cases: Sequence[Case]) -> None:
        """``AssertionError`` with every case that fails and how to run it; the first one as plain as it still fails."""
        faults = [(case, fault) for case, fault in zip(cases, self.faults(cases) if cases else []) if fault]
        shown = [self.shrunk(case) if self.plainer and number == 0 else case for number, (case, _) in enumerate(faults)]
        assert not faults, "\n".join(f"{fault}\npython tests/numerics/matrix.py '{case}'" for case, (_, fault) in zip(shown, faults))

    def shrunk(self, case: Case) -> Case:
        """A failing case as plain as it gets: every setting that is not needed for the failure is left out."""
        for part in ("run", "tune", "layout", "model", "data"):
            for name in list(getattr(case, part)):
                plainer = copy.deepcopy(case)
                del getattr(plainer, part)[name]
                if plainer.valid and plainer.alone.valid and self._fails(plainer):
                    case = plainer
        return case

    def _fails(self, case: Case) -> bool:
        """False where one process fails as well."""
        try:
            return self.fault(case) is not None
        except Failed:
            return False


def _whole(done: Finished, number: int) -> dict[str, torch.Tensor]:
    """What all ranks left of a case. The loss and the norm are the same on each."""
    from tests.whole_parameters import joined

    ranks = [torch.load(done.directory / f"{number}.{rank}.pt") for rank in done.codes]
    losses, norms, *_ = ranks[0]
    assert all(torch.equal(losses, other) and torch.equal(norms, again) for other, again, *_ in ranks), "ranks differ in losses or norms"
    choices = [rows for _, _, _, found in ranks for rows in found]
    chosen = {CHOICES: torch.cat(choices).unique(dim=0)} if choices else {}
    return {"losses": losses, "norms": norms} | joined(parts for _, _, parts, _ in ranks) | chosen


def _flipped(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> tuple[int, int]:
    """The tokens, of all steps and blocks, whose experts are others, and all there are."""
    if CHOICES not in expected:
        return 0, 0
    assert found[CHOICES].shape == expected[CHOICES].shape, "routers have had other tokens"
    return len(torch.cat((found[CHOICES], expected[CHOICES])).unique(dim=0)) - len(expected[CHOICES]), len(expected[CHOICES])


def _worst(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> tuple[str, float]:
    """What differs most, and by how much."""
    values = ((name, _difference(found[name], value)) for name, value in expected.items() if name != CHOICES)
    return max(values, key=lambda pair: pair[1])


def _difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    if not torch.isfinite(found).all():
        return float("inf")
    return float(
        (found - expected).abs().max() / expected.abs().max().clamp_min(1e-4)
    )  # of less, rounding is most: a key norm's bias has no gradient


def main() -> int:
    case = Case(**json.loads(sys.argv[1]))
    farm = Farm(Path(tempfile.mkdtemp()))
    fault = Matrix(farm).fault(case)
    farm.close()
    print(fault or "as one process")
    return int(fault is not None)


if __name__ == "__main__":
    sys.exit(importlib.import_module("tests.numerics.matrix").main())  # ranks find functions by the name of their module
