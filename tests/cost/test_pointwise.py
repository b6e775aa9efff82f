"""Bytes of memory-bound operations against those that PyTorch's operations read and write."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from launcher.cost.time.pointwise import PASSES

pytestmark = pytest.mark.slow

ROWS, HIDDEN = 4096, 8


class Moved(TorchDispatchMode):
    """Elements that operations read and write, in passes over the rows of a block: every one's inputs and outputs, views apart."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = 0.0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        made = function(*arguments, **(named or {}))
        if not function.is_view:
            tensors = [each for each in tree_leaves((arguments, named, made)) if isinstance(each, Tensor)]
            self.passes += sum(each.numel() * each.element_size() for each in tensors) / (ROWS * HIDDEN * 2)
        return made


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("dropped", [False, True], ids=["kept", "dropout"])
def test_a_residual_moves_what_its_tensor_operations_read_and_write(biased: bool, dropped: bool) -> None:
    stream = torch.randn(ROWS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    bias = torch.zeros(HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    with Moved() as forward:
        branch = stream.view(ROWS, HIDDEN)  # stands for norm, matrices and attention, whose gradient joins that of the residual
        branch = branch + bias if biased else branch
        branch = torch.native_dropout(branch, 0.1, True)[0] if dropped else branch
        out = stream + branch
    gradient = torch.ones_like(out)
    with Moved() as backward:
        torch.autograd.grad(out, [stream, bias] if biased else [stream], gradient)
    eager = PASSES["eager"]
    counted = [eager.residual[way] + biased * eager.bias[way] + dropped * eager.dropout[way] for way in (0, 1)]
    assert [forward.passes, backward.passes] == pytest.approx(counted, abs=0.01)


@pytest.mark.parametrize(("fewer", "more"), [("fused", "eager"), ("compiled", "fused")])
def test_what_is_fused_moves_no_more(fewer: str, more: str) -> None:
    one, other = (vars(PASSES[name]) for name in (fewer, more))
    assert all(one[name][way] <= other[name][way] for name in one for way in (0, 1))
