"""Head and loss hold the logits of a chunk of tokens, whatever the micro-batch and the schedule, and compute no product twice."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.farm import Farm
from tests.small_runs import ranks, small
from trainer.comm.collectives import World
from trainer.data import open_dataset
from trainer.pipeline.runtime import PipelineRuntime
from trainer.shared.parallel.actions import Action
from trainer.shared.run.read import from_dict
from trainer.shared.run.rules import resolve
from trainer.shared.run.schema import TrainConfig
from trainer.step import Engine
from trainer.tensor.cross_entropy import Targets, _compiled, _cross_entropy, chunk_height

pytestmark = pytest.mark.slow

VOCAB, TOKENS = 101, 32
"""Tokens of a micro-batch."""


class Logits(TorchDispatchMode):
    """Storages as wide as the vocabulary, by their address, and products with the head."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.products = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        found = function(*arguments, **(named or {}))
        if isinstance(found, torch.Tensor) and found.dim() > 1 and found.shape[-1] == VOCAB and function is not torch.ops.aten.t.default:
            self.largest = max(self.largest, found.numel() * found.element_size())
        shapes = [tuple(a.shape) for a in arguments if isinstance(a, torch.Tensor)]
        self.products += str(function).startswith(("aten.mm", "aten.addmm")) and any(VOCAB in shape for shape in shapes)
        return found


def step_with(chunk_mb: float | None, **layout: Any) -> Logits:
    """What a step of two micro-batches makes of logits in fp32."""
    config = small(precision="fp32", model={"tied": False, "layers": 1}, run={"loss_chunk_mb": chunk_mb}, micro_batch=2, **layout)
    resolved = resolve(from_dict(TrainConfig, config), 1)
    engine = Engine(resolved, World(0, 1, torch.device("cpu"), "", 0, 10.0), open_dataset(resolved.data, resolved.model, 1))
    with Logits() as seen:
        engine.step(0)
    return seen


@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_logits_are_those_of_a_chunk_and_each_product_is_computed_once(chunks: int) -> None:
    """Before: all of a micro-batch, and of all micro-batches under gpipe. A chunk has three products: logits, and two gradients."""
    seen = step_with(None if chunks == 1 else 4 * VOCAB * TOKENS / chunks / 2**20)
    assert seen.largest == 4 * VOCAB * TOKENS // chunks
    assert seen.products == 2 * chunks * 3


@pytest.mark.parametrize(("chunks", "deferred"), [(1, 2), (4, 0)])
def test_zero_bubble_has_the_gradient_of_the_head_later_where_one_chunk_has_all_tokens(
    monkeypatch: pytest.MonkeyPatch, chunks: int, deferred: int
) -> None:
    """One of the three products of each of two micro-batches. Otherwise the last stage's way back is longer, for all to wait for."""
    later, run = [], PipelineRuntime._weight_gradient

    def watched(self: PipelineRuntime, action: Action) -> None:
        with Logits() as seen:
            run(self, action)
        later.append(seen.products)

    monkeypatch.setattr(PipelineRuntime, "_weight_gradient", watched)
    seen = step_with(4 * VOCAB * TOKENS / chunks / 2**20, schedule="zero_bubble")
    assert sum(later) == deferred and seen.products == 2 * chunks * 3


def test_chunks_are_equal_and_within_the_limit() -> None:
    for tokens in (1, 7, 64, 1000):
        for most in (1, 3, 64, 5000):
            height = chunk_height(tokens, 50, most * 4 * 50 / 2**20)
            assert 1 <= height <= max(most, 1) and (-(-tokens // height) - 1) * height < tokens
            assert -(-tokens // height) == -(-tokens // most)


@pytest.mark.parametrize(
    "layout",
    [
        {"tensor": 2},
        {"tensor": 2, "sequence_parallel": True},
        {"pipeline": 2, "schedule": "gpipe"},
        {"pipeline": 2, "schedule": "zero_bubble"},
        {"data": 2, "sharding": {"params": 2, "grads": 2, "optimizer": 2}},
    ],
    ids=str,
)
def test_losses_do_not_depend_on_the_chunks(farm: Farm, layout: dict[str, Any]) -> None:
    """Tensor ranks have a vocabulary that they cannot share evenly."""
    whole, chunks = (
        farm.train(small(model={"layers": 2}, run={"loss_chunk_mb": chunk}, micro_batch=2, **layout), ranks(layout)).checked().result
        for chunk in (None, 4 * VOCAB * 5 / 2**20)
    )
    assert chunks["losses"] == pytest.approx(whole["losses"], rel=1e-12)
    assert chunks["grad_norms"] == pytest.approx(whole["grad_norms"], rel=1e-12)


@pytest.fixture(params=["aot_eager", pytest.param("inductor", marks=pytest.mark.campaign("compiler"))])
def compiler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What writes the code of compiled kernels: nobody, and their graph runs as it was traced, or the compiler of every day."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=request.param))
    _compiled.cache_clear()
    torch._dynamo.reset()  # a process gives up after the eighth form of a function, and no training has as many
    yield
    _compiled.cache_clear()


OFF = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 8e-3}


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    ("present", "dtype"),
    [
        pytest.param(present, dtype, marks=[] if (n + m) % 3 == 2 else pytest.mark.campaign("compiler"))  # each with one of the others
        for (n, present), (m, dtype) in itertools.product(enumerate((1, 13, 16)), enumerate(OFF))
    ],
)
def test_compiled_kernels_have_the_losses_and_gradients_of_the_others(present: int, dtype: torch.dtype) -> None:
    """Of logits whose last columns are padding; targets that are on another rank, or none. Chunks of two sizes."""
    alone, off = World(0, 1, torch.device("cpu"), "", 0, 10.0).make_group("alone", [0]), OFF[dtype]
    for n in (5, 1):
        rows = torch.randn(n, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(n)).mul(30).to(dtype)
        wanted = torch.tensor([0, -1, max(present - 1, 0), 40, 7 % max(present, 1)])[:n]
        plain, fused = (_gradient(rows.clone(), wanted, present, alone, way) for way in (False, True))
        torch.testing.assert_close(fused[0], plain[0], rtol=max(off, 1e-6) if dtype != torch.float64 else off, atol=0)
        torch.testing.assert_close(fused[1], plain[1], rtol=0, atol=off)


def _gradient(rows: torch.Tensor, wanted: torch.Tensor, present: int, group: Any, fused: bool) -> tuple[torch.Tensor, torch.Tensor]:
    weights = (wanted >= 0).to(torch.float64 if rows.dtype == torch.float64 else torch.float32)
    loss = _cross_entropy(rows, wanted, weights, Targets(wanted, 1.0, present, 1.0, fused), group, gradient=True)
    return loss, rows


def test_gpipe_keeps_no_logits_of_its_micro_batches(farm: Farm) -> None:
    """With a vocabulary that is larger than everything else, activations hardly grow with the number of micro-batches."""
    model = {"layers": 2, "vocab": 4096, "tied": False}
    few, many = (
        farm.train(small(steps=1, model=model, run={"global_batch": n, "warmup_steps": 0}, pipeline=2, schedule="gpipe"), 2)
        .checked()
        .result
        for n in (2, 8)
    )
    logits = 8 * 4096 * 16  # fp64, of one micro-batch
    assert many["memory"]["activations"] - few["memory"]["activations"] < logits
