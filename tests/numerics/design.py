"""Chooses among drawn cases: each has more that none before it had, a value of an axis, then a pair of values."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from tests.numerics.cases import Case
from tests.numerics.draws import FEW_RANKS, OPTIONS, OWN_AXES, draw, family_kind
from trainer.shared.families.registry import FAMILIES
from trainer.shared.parallel.balance import blocks_per_chunk
from trainer.shared.run.read import from_dict
from trainer.shared.run.rules import resolve
from trainer.shared.run.schema import (
    GATED,
    SCHEDULES,
    TrainConfig,
)
from trainer.shared.run.tuning import PROMPTS

FEW_STEPS = 2
"""Of designed cases, enough for all that ``STEPS`` is for: what the second step makes of the moments is in the last parameters."""
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
