"""The parts of predicted memory are the bytes that the trainer counts, for drawn models and layouts, exactly but for padding."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pytest

from launcher.config.schema import ClusterConfig
from launcher.cost import predict
from tests.cost.machines import HARDWARE
from tests.farm import Farm
from tests.small_runs import ranks, small
from trainer.shared.run.read import from_dict
from trainer.shared.run.rules import resolve
from trainer.shared.run.schema import EXCHANGES, RECOMPUTE, TrainConfig

RUNS, MORE = 8, 45  # of the gate, and of the campaign: of the first 200 one misses, 84, interleaved with dropout behind an embedding norm
TOLERANCE = 0.03


def drawn(seed: int) -> dict[str, Any]:
    """A run of 1 to 4 ranks. Zero-bubble schedules are left out: the trainer does not count what waits for its weight gradient."""
    pick = random.Random(seed).choice
    family = pick(("gpt", "llama", "bloom"))
    tensor, pipeline, data = pick(((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (1, 2, 2), (2, 1, 2), (1, 1, 4), (1, 3, 1)))
    chunks = 3 if pipeline == 2 and pick((True, False)) else 1
    schedule = "interleaved" if chunks > 1 else pick(("1f1b", "gpipe"))
    sharding = pick([(p, g, o) for p in (1, data) for g in (p, data) for o in (g, data)])
    model = {
        "family": family, "layers": 6, "hidden": 128, "heads": 4, "vocab": pick((1000, 3000)), "seq": 64,
        "dropout": pick((0.0, 0.0, 0.1)), "attention": pick(("fused", "unfused")),
    }  # fmt: skip
    model |= {"kv_heads": pick((2, 4))} if family == "llama" else {"activation": pick(("gelu", "squared_relu"))}
    if family == "llama":
        model |= options(seed)
    layout = {
        "tensor": tensor, "pipeline": pipeline, "data": data, "virtual_pipeline": chunks, "schedule": schedule,
        "sequence_parallel": tensor > 1 and pick((True, False)), "micro_batch": pick((1, 2)), "recompute": pick(RECOMPUTE),
        "sharding": dict(zip(("params", "grads", "optimizer"), sharding)),
    }  # fmt: skip
    if layout["recompute"] == "full":
        layout |= pick(({}, {"recompute_layers": 1}, {"recompute_every": 2}))
    if pipeline > 1 and chunks == 1:
        layout["balance"] = pick(("equal", "cost"))
    precision, chunk = pick(("fp32", "bf16")), pick((None, 0.1))
    run = {"global_batch": 16 if chunks > 1 else 8, "bucket_mb": 25.0, "warmup_steps": 0, "loss_chunk_mb": chunk}
    return small(steps=1, precision=precision, model=model, run=run, **layout)


def options(seed: int) -> dict[str, Any]:
    """Choices of a decoder of today, none in half of the draws."""
    pick = random.Random(f"options {seed}").choice
    given: list[dict[str, Any]] = [
        {"qk_norm": pick(("head", "width"))},
        {"norm_at": pick(("after", "both"))},
        {"residual": pick(("parallel", "parallel_one_norm"))},
        {"window": 16, "full_every": pick((0, 2))},
        {"score_cap": 20.0, "logit_cap": 10.0},
        {"activation": pick(("gelu", "geglu", "swiglu")), "biases": pick((["qkv"], ["qkv", "output", "up", "down"]))},
        {"rope": {"share": 0.5, "skip_every": pick((0, 4))}},
        {"head_width": 48},
    ]
    return {} if pick((True, False)) else pick(given) | pick(given)


def compares_activations(plain: dict[str, Any]) -> bool:
    return bool(plain["layout"]["sharding"]["params"] == 1)


def test_most_layouts_are_compared_in_all_parts() -> None:
    assert sum(compares_activations(drawn(seed)) for seed in range(RUNS)) >= 0.6 * RUNS


@pytest.mark.parametrize("seed", [*range(RUNS), *(pytest.param(seed, marks=pytest.mark.campaign("layouts")) for seed in range(RUNS, MORE))])
def test_predicted_parts_are_what_the_trainer_counts(seed: int, farm: Farm) -> None:
    plain = drawn(seed)
    world = ranks(plain["layout"])
    counted = farm.train(plain, world).checked().result["memory"]
    config = resolve(from_dict(TrainConfig, plain), world)
    predicted = predict(config.model, config.layout, config.run, ClusterConfig(gpus_per_node=world, hardware=HARDWARE["cpu"])).counted
    if not compares_activations(plain):  # a norm keeps its weight, and with it the trainer counts the buffer that the weight lies in
        del counted["activations"]
    assert {part: predicted[part] for part in counted} == pytest.approx(counted, rel=TOLERANCE)


OPTIONS: dict[str, dict[str, Any]] = {
    "a norm of each head": {"qk_norm": "head"},
    "a norm of all heads": {"qk_norm": "width", "kv_heads": 4},
    "norms before and after": {"norm_at": "both", "qk_norm": "width"},
    "a parallel residual stream": {"residual": "parallel"},
    "a parallel residual stream with norms after": {"residual": "parallel_one_norm", "norm_at": "after"},
    "windows": {"window": 16, "full_every": 2},
    "capped scores": {"score_cap": 20.0, "attention": "unfused"},
}


SINGLE = {"a parallel residual stream"}  # two norms of one input, which in 16 bits are kept as copies


@pytest.mark.parametrize(
    ("name", "precision"),
    [(name, "bf16") for name in OPTIONS]
    + [pytest.param(name, "fp32", marks=[] if name in SINGLE else pytest.mark.campaign("layouts")) for name in OPTIONS],
)
def test_options_of_a_decoder_keep_the_bytes_that_are_predicted(name: str, precision: str, farm: Farm) -> None:
    model = {"family": "llama", "layers": 4, "hidden": 128, "heads": 4, "kv_heads": 2, "vocab": 1000, "seq": 64} | OPTIONS[name]
    plain = small(steps=1, precision=precision, model=model, run={"global_batch": 2, "warmup_steps": 0}, micro_batch=2)
    counted = farm.train(plain, 1).checked().result["memory"]
    config = resolve(from_dict(TrainConfig, plain), 1)
    predicted = predict(config.model, config.layout, config.run, ClusterConfig(gpus_per_node=1, hardware=HARDWARE["cpu"])).counted
    within = 0.02 if model.get("attention") == "unfused" else 1e-3
    assert predicted["activations"] == pytest.approx(counted["activations"], rel=within)


MIXTURES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "two of four": ({}, {}),
    "one of four, beside shared ones with a gate": ({"active": 1, "shared_ffn": 128, "shared_gate": True}, {}),
    "three of four, sigmoids, a dense block first": ({"active": 3, "router": "sigmoid", "correction": 0.1, "dense_layers": 1}, {}),
    "recomputed": ({}, {"recompute": "full"}),
    "over tensor ranks": ({"forced": True}, {"tensor": 2, "expert": 2}),
    "over data ranks": ({"forced": True}, {"data": 2, "expert": 2}),
    "cut over tensor ranks and dealt out to replicas": ({"forced": True}, {"tensor": 2, "data": 2, "expert_tensor": 2, "expert": 2}),
    "cut over pieces of sequences": ({"forced": True}, {"tensor": 2, "sequence_parallel": True, "expert_tensor": 2}),
    "cut over data ranks": ({}, {"data": 2, "expert_tensor": 2}),
    "sharded gradients": ({"forced": True}, {"data": 2, "sharding": {"params": 1, "grads": 2, "optimizer": 2}}),
    "sharded parameters": ({"forced": True}, {"data": 2, "sharding": {"params": 2, "grads": 2, "optimizer": 2}}),
}


def some(names: Iterable[str], gate: set[str]) -> list[Any]:
    """``names``, those outside of ``gate`` for the campaign."""
    return [pytest.param(name, marks=[] if name in gate else pytest.mark.campaign("layouts")) for name in names]


@pytest.mark.parametrize(
    "name", some(MIXTURES, {"two of four", "over data ranks", "cut over data ranks", "sharded gradients", "sharded parameters"})
)
def test_a_mixture_keeps_the_bytes_that_are_predicted(name: str, farm: Farm) -> None:
    experts, layout = MIXTURES[name]
    mixture = {"count": 4, "active": 2, "ffn": 128} | experts
    model = {"family": "llama", "layers": 4, "hidden": 128, "heads": 4, "ffn": 256, "vocab": 1000, "seq": 64, "experts": mixture}
    run = {"global_batch": 4 * layout.get("data", 1), "warmup_steps": 0, "bucket_mb": 25.0}
    plain = small(steps=1, model=model, run=run, micro_batch=2, **layout)
    counted = farm.train(plain, ranks(layout)).checked().result["memory"]
    if layout.get("sharding", {}).get("params", 1) > 1:  # as above
        del counted["activations"]
    config = resolve(from_dict(TrainConfig, plain), ranks(layout))
    cluster = ClusterConfig(gpus_per_node=ranks(layout), hardware=HARDWARE["cpu"])
    predicted = predict(config.model, config.layout, config.run, cluster).counted
    assert {part: predicted[part] for part in counted} == pytest.approx(counted, rel=1e-2)


CONTEXTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "learned positions": ({"family": "gpt"}, {}),
    "grouped keys that turn": ({"family": "llama", "kv_heads": 2}, {}),
    "dropout, in blocks of queries": ({"family": "gpt", "dropout": 0.1}, {}),
    "full recomputation": ({"family": "gpt"}, {"recompute": "full"}),
}


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("name", some(CONTEXTS, {"learned positions", "grouped keys that turn"}))
def test_context_ranks_keep_the_bytes_that_are_predicted(name: str, exchange: str, farm: Farm) -> None:
    """Of gathered keys and values only this rank's own."""
    model, layout = CONTEXTS[name]
    model = {"layers": 4, "hidden": 128, "heads": 4, "vocab": 1000, "seq": 64} | model
    run = {"global_batch": 2, "warmup_steps": 0, "context_exchange": exchange}
    plain = small(steps=1, model=model, run=run, micro_batch=2, context=2, **layout)
    counted = farm.train(plain, 2).checked().result["memory"]
    config = resolve(from_dict(TrainConfig, plain), 2)
    predicted = predict(config.model, config.layout, config.run, ClusterConfig(gpus_per_node=2, hardware=HARDWARE["cpu"])).counted
    assert {part: predicted[part] for part in counted} == pytest.approx(counted, rel=5e-3)


LATENTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "values narrower than keys": ({}, {}),
    "values as wide": ({"value": 48, "query_rank": 0}, {}),
    "over tensor ranks": ({}, {"tensor": 2}),
    "over pieces of sequences": ({}, {"tensor": 2, "sequence_parallel": True}),
    "selective recomputation": ({}, {"recompute": "selective"}),
    "full recomputation": ({}, {"recompute": "full"}),
    "context ranks": ({}, {"context": 2}),
    "context ranks in a ring": ({}, {"context": 2}),
}


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.campaign("layouts"))])
@pytest.mark.parametrize(
    "name", some(LATENTS, {"values narrower than keys", "values as wide", "over tensor ranks", "over pieces of sequences"})
)
def test_latents_keep_the_bytes_that_are_predicted(name: str, precision: str, farm: Farm) -> None:
    """Matrices that make latents are whole on every tensor rank, and so are latents without sequence parallelism."""
    own, layout = LATENTS[name]
    latent = {"kv_rank": 40, "query_rank": 48, "rotary": 16, "value": 24} | own
    model = {"family": "deepseek_v3", "layers": 4, "hidden": 128, "heads": 4, "head_width": 32, "ffn": 256, "vocab": 1000, "seq": 64}
    run = {"global_batch": 2, "warmup_steps": 0, "context_exchange": "ring" if "ring" in name else "all_gather"}
    plain = small(steps=1, precision=precision, model=model | {"latent": latent}, run=run, micro_batch=2, **layout)
    counted = farm.train(plain, ranks(layout)).checked().result["memory"]
    config = resolve(from_dict(TrainConfig, plain), ranks(layout))
    cluster = ClusterConfig(gpus_per_node=ranks(layout), hardware=HARDWARE["cpu"])
    predicted = predict(config.model, config.layout, config.run, cluster).counted
    assert {part: predicted[part] for part in counted} == pytest.approx(counted, rel=5e-3)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_gradients_of_one_micro_batch_fill_one_buffer_and_of_more_two(micro_batches: int, farm: Farm) -> None:
    layout: dict[str, Any] = {"data": 2, "sharding": {"params": 1, "grads": 2, "optimizer": 2}}
    plain = small(steps=1, model={"layers": 2}, run={"global_batch": 2 * micro_batches, "bucket_mb": 25.0, "warmup_steps": 0}, **layout)
    counted = farm.train(plain, 2).checked().result["memory"]["gradients"]
    config = resolve(from_dict(TrainConfig, plain), 2)
    predicted = predict(config.model, config.layout, config.run, ClusterConfig(gpus_per_node=2, hardware=HARDWARE["cpu"])).counted
    assert predicted["gradients"] == pytest.approx(counted, rel=TOLERANCE)


PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "unfused": ({"attention": "unfused"}, {}),
    "dropout": ({"dropout": 0.1}, {"tensor": 2, "pipeline": 2}),
    "learned positions, in stages": ({"positions": "learned"}, {"pipeline": 3}),
    "relative positions, shared sequences": ({}, {"tensor": 2, "sequence_parallel": True}),
    "recomputed": ({}, {"recompute": "full", "pipeline": 2}),
    "chosen parts recomputed": ({}, {"recompute": "selective", "data": 2, "sharding": {"params": 1, "grads": 2, "optimizer": 2}}),
}


@pytest.mark.parametrize("name", PAIRS)
def test_memory_of_an_encoder_and_its_decoder_is_what_the_trainer_counts(name: str, farm: Farm) -> None:
    model, layout = PAIRS[name]
    pair = {"family": "t5", "layers": 6, "hidden": 128, "heads": 4, "vocab": 1000, "seq": 64, "decoder_seq": 32, "ffn": 256}
    run = {"global_batch": 8, "bucket_mb": 25.0, "warmup_steps": 0}
    plain = small(steps=1, precision="fp32", model=pair | model, run=run, **({"micro_batch": 2} | layout))
    world = ranks(plain["layout"])
    counted = farm.train(plain, world).checked().result["memory"]
    config = resolve(from_dict(TrainConfig, plain), world)
    predicted = predict(config.model, config.layout, config.run, ClusterConfig(gpus_per_node=world, hardware=HARDWARE["cpu"])).counted
    assert {part: predicted[part] for part in counted} == pytest.approx(counted, rel=TOLERANCE)
