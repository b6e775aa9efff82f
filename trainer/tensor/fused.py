"""Products that communicate while they compute (``run.async_tensor``), by torch's fused operations on symmetric memory: asynchronous
tensor parallelism.

Devices that reach each other's memory (NVLink) need no collective between a product and its rows: each multiplies the rows of one rank
while those of the next are copied, and those of its sums that others keep are fetched from it while it computes further ones. torch
defines the same operations by a collective and a product; that is what other devices run.

Only what would be waited for is fused. Where a layer computes its weight gradient next, that hides the sum of the input gradient already;
and what a low-rank product adds to a partial sum has to be added before anything is sent. A bias is added to the rounded product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.comm.collectives import Group
from trainer.spec import ConfigError


@dataclass(frozen=True)
class FusedProducts:
    """The fused operations of the tensor ranks ``group``."""

    group: Group
    gather_multiply: Callable[..., Any]
    multiply_scatter: Callable[..., Any]

    @classmethod
    def on(cls, device: torch.device, group: Group, everyone: Group, largest: int) -> FusedProducts:
        """Collective over ``everyone``. ``largest``: bytes of a rank's rows, or of its sums. ``ConfigError`` where GPUs of a group do not
        reach each other's memory."""
        from torch.distributed import _symmetric_memory as defined  # registers operations, which nobody else needs

        if device.type != "cuda":
            return cls(group, defined._fused_all_gather_matmul_fallback, defined._fused_matmul_reduce_scatter_fallback)
        everyone.together(lambda: reserve(group, 2 * largest), (ConfigError,))  # two pieces are on their way at a time
        return cls(group, torch.ops.symm_mem.fused_all_gather_matmul, torch.ops.symm_mem.fused_matmul_reduce_scatter)

    def gathered(self, x: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """The whole x [s, b, k] of a sharded one [s/t, b, k], and its product with ``matrix`` [k, n]: [s, b, n]."""
        x, name = x.contiguous(), self.group.handle.group_name
        nbytes = x.nbytes * self.group.size
        whole, (product,) = self.group.computing("all_gather", nbytes, lambda: self.gather_multiply(x, [matrix], 0, name))
        return whole, product

    def scattered(self, x: Tensor, matrix: Tensor) -> Tensor:
        """This rank's rows [s/t, b, n] of the sum over ranks of x [s, b, k] times ``matrix`` [k, n]."""
        name, nbytes = self.group.handle.group_name, x.shape[0] * x.shape[1] * matrix.shape[1] * x.element_size()
        summed: Tensor = self.group.computing("reduce_scatter", nbytes, lambda: self.multiply_scatter(x, matrix, "sum", 0, name))
        return summed


def reserve(group: Group, nbytes: int) -> None:
    """Memory that all ranks of ``group`` reach. Collective. ``ConfigError`` if there is none."""
    if why := group.share_memory(nbytes):
        raise ConfigError(
            f"run.async_tensor=true needs tensor ranks on one host whose devices reach each other's memory (NVLink): {why}; "
            "use run.async_tensor=false"
        )
