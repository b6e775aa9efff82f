"""Matrix products of 8-bit numbers (``run.precision=fp8``): forward, and the gradient of the input. Weight gradients stay in 16 bits.

Each row of a factor has its own scale along the summed dimension, so that its largest element is the largest number of float8 e4m3. A
token's scale is independent of other tokens: it is rounded alike in any micro-batch, replica or stage. Tensor ranks with a part of the sum
see only the largest element of their part, and round differently.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trainer.shared.run.errors import ConfigError

LARGEST = torch.finfo(torch.float8_e4m3fn).max
OLDEST = (8, 9)
"""Lowest compute capability of a GPU that multiplies such numbers."""
SIZES = 64
"""Most factor shapes for which a process compiles: those of a block's matrices, both ways, of two sizes of micro-batch."""


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds x [n, k] to 8 bits; each row has its scale [n, 1]."""
    scale = x.abs().amax(1, keepdim=True).float().clamp(min=1e-12) / LARGEST
    return (x.float() / scale).to(torch.float8_e4m3fn).contiguous(), scale


def multiplied(a: Tensor, b: Tensor, fast: bool) -> Tensor:
    """Computes ``a b^T`` of rounded factors."""
    (left, by_row), (right, by_column) = rounded(a), rounded(b)
    return torch._scaled_mm(left, right.t(), by_row, by_column.t(), out_dtype=a.dtype, use_fast_accum=fast)


class EightBitProduct:
    """Computes ``a b^T`` for a [n, k] and b [m, k], both in 16 bits, as is the result. k and m are multiples of 16."""

    def __init__(self, product: Callable[[Tensor, Tensor, bool], Tensor] = multiplied):
        self.product = product

    @classmethod
    def on(cls, device: torch.device, compiled: bool) -> EightBitProduct:
        """Makes the product for ``device``; ``compiled``: each factor is rounded by one kernel. Raises ``ConfigError`` if the device has no
        such products."""
        if device.type == "cuda" and (found := torch.cuda.get_device_capability(device)) < OLDEST:
            least, this = (".".join(map(str, each)) for each in (OLDEST, found))
            raise ConfigError(f"run.precision=fp8 needs a GPU of compute capability {least} or more, and this one has {this}; use bf16")
        if not compiled:
            return cls()
        # Code for any shape doubles the GPU's rounding time; code per factor doubles the host's.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, SIZES)
        return cls(torch.compile(multiplied, fullgraph=True, dynamic=False))

    def __call__(self, a: Tensor, b: Tensor, fast: bool) -> Tensor:
        """Multiplies. ``fast``: a GPU sums in fewer bits, as is usual for outputs and not for gradients."""
        return self.product(a.detach(), b.detach(), fast)  # one code for weights and activations
