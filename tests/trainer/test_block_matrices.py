"""The matrices that a block is declared to have are those that the trainer builds: parameters, times and ranks of LoRA follow from them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from trainer.models.encoder_decoder import network
from trainer.shared.run.derived import resolve_model
from trainer.shared.run.flops import matrices_of
from trainer.shared.run.resolved import ResolvedModelConfig
from trainer.shared.run.schema import ExpertsConfig, LatentConfig, ModelConfig

SIZES: dict[str, Any] = {"layers": 4, "hidden": 24, "heads": 4, "vocab": 100, "seq": 12}
NETWORKS: dict[str, Mapping[str, Any]] = {
    "two matrices in the MLP": {"family": "gpt", "ffn": 40},
    "grouped queries, wide heads, a gate": {"family": "llama", "kv_heads": 2, "head_width": 10, "ffn": 40},
    "experts, shared ones with a gate, in every other block": {
        "family": "llama", "experts": ExpertsConfig(count=4, active=2, ffn=10, shared_ffn=14, shared_gate=True, dense_layers=1, every=2),
    },
    "experts without a gate, nor shared ones": {"family": "gpt", "biases": [], "experts": ExpertsConfig(count=3, active=1)},
    "latents, values of their own width": {"family": "llama", "latent": LatentConfig(kv_rank=6, query_rank=8, rotary=2, value=5)},
    "queries made from the hidden state": {"family": "llama", "latent": LatentConfig(kv_rank=6, rotary=4)},
    "an encoder and its decoder": {"family": "t5", "head_width": 10, "ffn": 40},
}  # fmt: skip


def declared(model: ResolvedModelConfig, block: int) -> Counter[str]:
    """Elements of the declared matrices, by the module that holds them."""
    found: Counter[str] = Counter()
    for matrix in matrices_of(model, block):
        found["mlp" if matrix.name in ("up", "down", "experts", "router") else "attention"] += matrix.count * matrix.elements
    return found


def built(block: nn.Module) -> Counter[str]:
    """Elements of the parameters of a block that multiply: neither biases nor norms."""
    found: Counter[str] = Counter()
    for name, weight in block.named_parameters():
        if name.endswith("weight") and "norm" not in name:
            found["mlp" if name.startswith("mlp") else "attention"] += math.prod(weight.shape)
    return found


@pytest.mark.parametrize("named", NETWORKS)
def test_declared_matrices_are_those_that_are_built(named: str) -> None:
    model = resolve_model(ModelConfig(**SIZES, **NETWORKS[named]))
    with torch.device("meta"):
        blocks = network(model).blocks
    assert {i: declared(model, int(i)) for i in blocks} == {i: built(block) for i, block in blocks.items()}
