"""Draws cases from the whole space, each from (seed, index); those that break a rule are drawn again.

Half of the cases are of an ordinary small model; the others have corners: stages without a block, a token or two in a sequence, one
sequence in a batch, a vocabulary that leaves tensor ranks without a row, and models with fewer elements than shards, so that ranks own
nothing.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.numerics.cases import TASKS, VOCAB, Case
from trainer.shared.families.family import Family
from trainer.shared.families.registry import FAMILIES
from trainer.shared.run.schema import (
    ACTIVATIONS,
    EXCHANGES,
    MATRICES,
    RECOMPUTE,
    ROUTERS,
    SCHEDULES,
    TARGETS,
)
from trainer.shared.run.spans import SENTINELS
from trainer.shared.run.tuning import PROMPTS

MOST_RANKS, FEW_RANKS = 8, 4


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
