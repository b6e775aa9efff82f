"""Products of 8-bit numbers: what they round, what they do not, and who cannot have them. ``tests/numerics`` trains with them."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from benchmarks.counts import SMALL, Seen, configured, engine_of
from tests.small_runs import ranks, small
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.read import from_dict
from trainer.shared.run.rules import resolve
from trainer.shared.run.schema import TrainConfig
from trainer.tensor.eight_bits import LARGEST, EightBitProduct, rounded

pytestmark = pytest.mark.slow


def test_a_product_is_that_of_rows_rounded_by_their_own_largest_element() -> None:
    torch.manual_seed(1)
    a, b = torch.randn(24, 64).bfloat16(), (torch.randn(48, 64) * torch.logspace(-6, 6, 48)[:, None]).bfloat16()
    (left, by_row), (right, by_column) = rounded(a), rounded(b)
    assert left.float().abs().amax(1).eq(LARGEST).all() and right.float().abs().amax(1).eq(LARGEST).all()
    want = (left.double() * by_row) @ (right.double() * by_column).t()
    torch.testing.assert_close(EightBitProduct()(a, b, fast=False).double(), want, rtol=2**-7, atol=2**-7 * float(want.abs().min()))
    assert ((want - a.double() @ b.double().t()).norm(dim=0) < 0.1 * want.norm(dim=0)).all(), "whatever the scale of a row"


def test_a_token_is_rounded_alike_in_any_batch() -> None:
    """So micro-batches, replicas and stages change nothing."""
    torch.manual_seed(2)
    a, b = torch.randn(24, 64).bfloat16(), torch.randn(48, 64).bfloat16()
    a[20] *= 1000
    whole = EightBitProduct()(a, b, fast=False)
    assert torch.equal(whole[:7], EightBitProduct()(a[:7].contiguous(), b, fast=False))


def test_zeros_stay_zeros() -> None:
    zeros, b = torch.zeros(16, 32).bfloat16(), torch.randn(16, 32).bfloat16()
    assert not EightBitProduct()(zeros, b, fast=True).any()


def test_the_blocks_matrices_multiply_in_eight_bits_and_nothing_else_does() -> None:
    """Four matrices of a block, forward and for the gradient of the input; the head stays as it is."""
    for precision, each in (("bf16", 0), ("fp8", 8)):
        engine = engine_of(configured(SMALL | {"layers": 2}, precision=precision))
        with Seen() as seen:
            engine.gradients(engine.batches.read(0))
        assert seen.launched["_scaled_mm"] == each * 2 * engine.batches.micro_batches


@pytest.mark.parametrize("changes", [{"model": {"ffn": 40}}, {"model": {"kv_heads": 1, "hidden": 48, "heads": 4}}, {"tensor": 4}], ids=str)
def test_widths_that_such_products_cannot_have_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="multiple of 16 on each tensor rank"):
        resolve(from_dict(TrainConfig, small(precision="fp8", **changes)), ranks(changes))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.campaign("compiler"))])
def test_a_compiled_product_is_the_eager_one_for_more_shapes_than_torch_compiles_by_itself(
    monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """Torch gives up after eight versions of a function; a block has more shapes than that, both ways."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    compiled, eager = EightBitProduct.on(torch.device("cpu"), compiled=True), EightBitProduct()
    draws = torch.Generator().manual_seed(0)
    for rows in (5, 16, 17):
        for k, m in ((16, 32), (32, 16), (32, 48), (48, 64)):
            a, b = (torch.randn(*size, generator=draws).bfloat16() for size in ((rows, k), (m, k)))
            assert torch.equal(compiled(a, b, fast=True), eager(a, b, fast=True))
            turned = b.t().contiguous().t()  # as the weight of an input's gradient is
            assert torch.equal(compiled(a, turned, fast=False), eager(a, turned, fast=False))


def test_a_gpu_without_such_products_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ConfigError, match=r"needs a GPU of compute capability 8\.9 or more, and this one has 8\.0"):
        EightBitProduct.on(torch.device("cuda", 0), compiled=False)
