"""Parameters and FLOPs, against published counts, closed formulas and the trainer's own models."""

from __future__ import annotations

import numpy as np
import pytest

from launcher.cost.inputs.shape import Experts, LatentAttention, Shape
from trainer.shared.families.registry import FAMILIES
from trainer.shared.run.derived import resolve_model
from trainer.shared.run.flops import model_flops
from trainer.shared.run.schema import ModelConfig

BLOOM = ModelConfig(family="bloom", layers=70, hidden=14336, heads=112, vocab=250880, seq=2048)
LLAMA_7B = ModelConfig(family="llama", layers=32, hidden=4096, heads=32, ffn=11008, vocab=32000, seq=4096)
LLAMA_70B = ModelConfig(family="llama", layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672, vocab=128256, seq=8192)


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        (ModelConfig(layers=96, hidden=12288, heads=96, vocab=51200, seq=2048), 174_615_846_912),  # 174.6 B, arXiv 2104.04473
        (BLOOM, 176_247_271_424),  # bigscience/bloom model card
        (LLAMA_7B, 6_738_415_616),  # meta-llama/Llama-2-7b
        (LLAMA_70B, 70_553_706_496),  # meta-llama/Meta-Llama-3-70B
    ],
)
def test_published_models_have_their_published_parameter_counts(model: ModelConfig, parameters: int) -> None:
    assert Shape.of(model).parameters == parameters


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt", "llama", "bloom"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tied": True},
        {"tied": False},
        {"kv_heads": 2},
        {"activation": "swiglu", "ffn": 200},
        {"activation": "gelu", "ffn": 192},
        {"activation": "squared_relu"},
        {"layers": 1, "vocab": 77, "seq": 33},
        {"qk_norm": "head", "norm": "layer", "kv_heads": 2},
        {"qk_norm": "width", "norm": "layer", "biases": ["qkv", "down"]},
        {"norm_at": "both", "residual": "parallel_one_norm", "norm": "layer", "biases": ["output", "up"]},
        {"norm_at": "after", "residual": "parallel", "norm": "layer_no_bias"},
    ],
)
def test_every_family_counts_the_parameters_that_the_trainer_builds(family: str, changes: dict[str, object]) -> None:
    import torch  # here: to collect pure tests loads no torch

    from trainer.models.transformer import Transformer

    model = resolve_model(ModelConfig(**{"family": family, "layers": 3, "hidden": 64, "heads": 4, "vocab": 300, "seq": 48} | changes))
    with torch.device("meta"):
        built = Transformer(model)
    assert Shape.of(model).parameters == sum(p.numel() for p in built.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("residual", ["sequential", "parallel", "parallel_one_norm"])
@pytest.mark.parametrize("norm_at", ["before", "after", "both"])
def test_norms_and_what_products_read_are_counted_as_a_block_computes(norm_at: str, residual: str) -> None:
    """Distinct tensors that norms and first products are given, in a block that only notes who reads what."""
    import torch
    from torch import nn

    from trainer.models.transformer import Block

    model = resolve_model(ModelConfig(layers=1, hidden=8, heads=2, vocab=16, seq=4, norm_at=norm_at, residual=residual))
    built, read = Block(model), dict[str, list[int]]()
    given = list[torch.Tensor]()  # kept, so that no two have one address
    for name, module in built.named_children():
        if name.endswith("norm") or name in ("attention", "mlp"):

            def noted(_: nn.Module, tensors: tuple[torch.Tensor], kind: str = "norms" if name.endswith("norm") else "products") -> None:
                given.append(tensors[0])
                read.setdefault(kind, []).append(id(tensors[0]))

            module.register_forward_pre_hook(noted)
    with torch.no_grad():
        built(torch.zeros(4, 1, 8))
    shape = Shape.of(model)
    assert len(read["norms"]) == shape.block_norms
    assert len(set(read["norms"])) == shape.block_norms - shape.shared_norm_inputs
    assert len(set(read["products"])) == shape.block_norms - shape.unread_norms


def test_step_flops_are_those_of_the_megatron_papers() -> None:
    """72 B L s h^2 (1 + s / 6h + V / 12 L h): Narayanan et al. 2021, equation 3, without recomputation."""
    shape = Shape.of(ModelConfig(layers=96, hidden=12288, heads=96, vocab=51200, seq=2048))
    s, h, layers, vocab = 2048, 12288, 96, 51200
    assert shape.model_flops() == pytest.approx(72 * layers * s * h**2 * (1 + s / (6 * h) + vocab / (12 * layers * h)), rel=1e-12)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_planner_and_the_trainer_count_the_same_flops(family: str) -> None:
    model = resolve_model(ModelConfig(family=family, layers=3, hidden=64, heads=8, kv_heads=2, vocab=300, seq=48))
    assert Shape.of(model).model_flops() == model_flops(model, 1)


def test_causal_counting_halves_attention_only() -> None:
    shape = Shape.of(LLAMA_7B)
    assert shape.model_flops() - shape.model_flops(causal=True) == pytest.approx(3 * shape.attention_flops() / 2)


def test_a_mixture_counts_all_experts_as_parameters_but_the_visited_ones_as_work() -> None:
    """Mixtral 8x7B: 46.7 B parameters, 12.9 B of them active (arXiv 2401.04088)."""
    experts = Experts(count=8, active=2, ffn=14336)
    mixtral = Shape(
        32, 4096, 32, 8, 128, 14336, 32000, 4096, gated=True, tied=False, biases=(), scale_only_norm=True, rotary=True, experts=experts
    )
    assert mixtral.parameters == pytest.approx(46.7e9, rel=2e-3)
    assert mixtral.active_matrix_parameters == pytest.approx(12.9e9 - 0.13e9, rel=1e-2)  # without the input embedding


def test_latent_attention_and_shared_experts_count_as_in_deepseek_v3() -> None:
    """671 B parameters, 37 B active (arXiv 2412.19437)."""
    shape = Shape(
        61, 7168, 128, 128, 128, 18432, 129280, 4096, gated=True, tied=False, biases=(), scale_only_norm=True,
        experts=Experts(256, 8, 2048, 2048, 3), latent=LatentAttention(1536, 512),
    )  # fmt: skip
    assert shape.parameters == pytest.approx(671e9, rel=5e-3)
    assert shape.active_matrix_parameters == pytest.approx(37e9, rel=3e-2)


def test_many_shapes_are_counted_at_once() -> None:
    hidden = np.array([1024.0, 2048.0])
    together = Shape(24, hidden, 16, 16, hidden / 16, 4 * hidden, 50257, 1024).parameters
    apart = [Shape(24, h, 16, 16, h / 16, 4 * h, 50257, 1024).parameters for h in hidden]
    assert together.tolist() == apart
