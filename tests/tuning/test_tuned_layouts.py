"""Tuning under any layout trains what one process trains, leaves the rest as it is, and sends nothing for it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.farm import Farm
from tests.numerics.cases import Case
from tests.numerics.matrix import Matrix
from tests.small_runs import ranks, small
from trainer.comm.collectives import World
from trainer.data import open_dataset
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.read import from_dict
from trainer.shared.run.rules import resolve
from trainer.shared.run.schema import METHODS, TrainConfig
from trainer.shared.run.tuning import added_parameters, text_model
from trainer.step import Engine

pytestmark = pytest.mark.slow

LORA = {"method": "lora", "rank": 4, "alpha": 8.0}


@pytest.fixture(scope="module")
def matrix(farm: Farm) -> Matrix:
    return Matrix(farm)


BUCKET = {"params": 2, "grads": 2, "optimizer": 2}
AGREE = {
    # modelscope/mcore-bridge#173: each rank sees its shard of the sequence, and rank 0 is exported.
    "gradients of replicated factors are summed under sequence parallelism": Case(
        {"tensor": 2, "sequence_parallel": True}, tune=LORA | {"dropout": 0.1}
    ),
    # Megatron-Bridge#5840: the fan of a shard made the initial values wider. A row layer's A is sharded.
    "initial factors do not depend on the tensor degree": Case({"tensor": 4}, tune=LORA | {"targets": ["output", "down"]}),
    # NVIDIA/NeMo#10280, #10920: dimensions did not match.
    **{
        f"sequence parallelism keeps shapes with {target} as target": Case(
            {"tensor": 2, "sequence_parallel": True}, {"family": "llama", "kv_heads": 2}, tune=LORA | {"targets": [target]}
        )
        for target in ("qkv", "down")
    },
    # Our own: torch's linear kept a view of weights whose storage had another use by backward.
    "a bucket of gathered encoder weights is not read after it was freed": Case(
        {"pipeline": 2, "data": 2, "schedule": "zero_bubble", "recompute": "full", "sharding": BUCKET},
        {"vocab": 3},
        tune={"method": "p_tuning", "virtual_tokens": 1, "encoder": 5},
    ),
    # Our own: virtual tokens, the input of their encoder, had gone with their bucket when its weights' gradients were due.
    "deferred gradients of one bucket know what lies in others of its unit": Case(
        {"pipeline": 2, "data": 2, "schedule": "zero_bubble", "sharding": BUCKET},
        run={"bucket_mb": 0.0},
        tune={"method": "p_tuning", "virtual_tokens": 2, "encoder": 5},
    ),
}
"""Cases for what other trainers, or ours, got wrong."""


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_other_trainers_got_wrong_is_right(matrix: Matrix, ranks: int) -> None:
    matrix.check([case for case in AGREE.values() if case.ranks == ranks])


def test_recomputation_over_a_frozen_embedding_still_has_gradients(matrix: Matrix) -> None:
    """A block's input has no gradient there: a checkpointed block's backward would not be called (Megatron-Bridge, peft/recompute.py)."""
    methods = [name for name in METHODS if name != "full"]
    cases = [
        Case({"recompute": "full"}, {"layers": 1}, tune={"method": method, "rank": 2, "virtual_tokens": 2, "encoder": 4})
        for method in methods
    ]
    matrix.check(cases)
    for case in cases:
        assert float(matrix.reference(case)["norms"].min()) > 0, case


def engine_of(**data: Any) -> Engine:
    config = resolve(from_dict(TrainConfig, data), 1)
    dataset = open_dataset(config.data, text_model(config.model, config.tune), config.run.seed)
    return Engine(config, World(0, 1, torch.device("cpu"), "", 0, 10.0), dataset)


@pytest.mark.parametrize("family", ["gpt", "llama", "bloom"])
@pytest.mark.parametrize("method", [name for name in METHODS if name != "full"])
def test_only_what_the_method_adds_is_trained_and_counted_by_the_formula(method: str, family: str) -> None:
    """NVIDIA-NeMo/Automodel#547: tensor parallelism made all parameters trainable."""
    tune = {"method": method, "rank": 3, "virtual_tokens": 2, "encoder": 5, "targets": ["qkv", "up", "down"], "tasks": 1}
    engine = engine_of(**small(model={"family": family, "kv_heads": 2}), tune=tune)
    trained = sum(math.prod(piece.record.shape) for piece in engine.trained)
    assert trained == added_parameters(engine.config.model, engine.config.tune)
    engine.step(0)
    assert engine.rank.state.nbytes["gradients"] < sum(piece.weight.nbytes for piece in engine.rank.shards) / 4


@pytest.mark.parametrize("method", ["lora", "adapter", "ia3"])
def test_what_is_added_changes_nothing_before_it_is_trained(method: str) -> None:
    """B and the way back of a bottleneck begin as zero, scales as one."""
    before = engine_of(**small()).step(0).loss
    assert engine_of(**small(), tune={"method": method}).step(0).loss == pytest.approx(before, rel=1e-14)


def test_published_counts_are_those_of_the_formulas() -> None:
    """Files of huggingface/peft's method comparison for Llama-3.2-3B: 9,175,040 (LoRA of rank 32 on queries and values is a part of ours),
    IA3 286,720, prompt tuning of 200 tokens 614,400."""
    sizes = {"family": "llama", "layers": 28, "hidden": 3072, "heads": 24, "kv_heads": 8, "ffn": 8192, "vocab": 128256, "tied": True}
    counts = {}
    for method, further in (("ia3", {}), ("prompt", {"virtual_tokens": 200}), ("lora", {"rank": 32, "targets": ["qkv"]})):
        config = resolve(from_dict(TrainConfig, small(model=sizes | {"seq": 512}) | {"tune": {"method": method} | further}), 1)
        counts[method] = added_parameters(config.model, config.tune)
    assert counts == {"ia3": 286_720, "prompt": 614_400, "lora": 28 * 32 * (3072 + 3072 + 2 * 1024)}


def volumes(farm: Farm, tune: dict[str, Any], **layout: Any) -> dict[str, float]:
    """Payload bytes per step on rank 0, by collective; without the one that ends a step."""
    config = small(model={"tied": False}, run={"bucket_mb": 100}, **layout) | {"tune": tune}
    found = farm.train(config, ranks(layout)).checked().result["communication"]
    return {key: volume["payload_bytes"] / 3 for key, volume in found.items() if "world" not in key}


def test_nothing_is_sent_for_frozen_parameters(farm: Farm) -> None:
    """Gradients of the added parameters alone, aligned to 64 elements each, in fp64."""
    config = resolve(from_dict(TrainConfig, small(model={"tied": False}) | {"tune": LORA}), 1)
    ends = {"qkv": (32, 96), "output": (32, 32), "up": (32, 128), "down": (128, 32)}
    added = sum(math.ceil(4 * n / 64) * 64 for pair in ends.values() for n in pair) * config.model.layers
    assert added_parameters(config.model, config.tune) == added
    assert volumes(farm, LORA, data=2) == {"all_reduce over data replicas": 8 * added}
    sharding = {"params": 1, "grads": 1, "optimizer": 2}
    assert volumes(farm, LORA, data=2, sharding=sharding) == {
        "reduce_scatter over data optimizer": 8 * added,
        "all_gather over data optimizer": 8 * added,
    }


def test_lora_adds_no_message_per_micro_batch_to_those_of_tensor_parallelism(farm: Farm) -> None:
    """Less the input gradient that full tuning sums for the embedding; more, once per step, the replicated factors."""
    for sequence_parallel in (False, True):
        layout = {"tensor": 2, "sequence_parallel": sequence_parallel}
        full, lora = (sum(volumes(farm, tune, **layout).values()) for tune in ({}, LORA))
        factors = 2 * 4 * (32 + 32 + 32 + 32) * 8  # blocks, rank, and the side of each matrix that is not sharded
        assert lora < full + factors


@pytest.mark.parametrize(
    ("tune", "words"),
    [
        ({"method": "lora", "targets": ["query"]}, "tune.targets[0]='query' is not one of qkv, output, up or down"),
        ({"method": "lora", "rank": 33}, "tune.rank=33 is above that of the matrix qkv of 32 x 96; use 32 or less"),
        ({"method": "prompt", "virtual_tokens": 16}, "tune.virtual_tokens=16 leave no place for text in model.seq=16; use 15 or fewer"),
        ({"method": "lora", "tasks": 2}, "tune.tasks=2 needs a method of virtual tokens"),
        ({"method": "lora", "dropout": 1.0}, "tune.dropout=1 drops everything"),
    ],
)
def test_a_tuning_that_cannot_be_is_refused_in_one_line(tune: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve(from_dict(TrainConfig, small() | {"tune": tune}), 1)
    assert words in str(error.value) and "\n" not in str(error.value)
