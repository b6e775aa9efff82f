"""Products that communicate while they compute (``run.async_tensor``), by torch's fused operations on symmetric memory: asynchronous
tensor parallelism.

Devices that reach each other's memory (NVLink) need no collective between a product and its rows: each multiplies the rows of one rank
while it copies those of the next, and other ranks fetch their sums from it while it computes further ones. Other devices run the
operations' definition, a collective and a product.

Only a collective that would be waited for is fused. Where a layer computes its weight gradient next, that hides the sum of the input
gradient already; and a low-rank product has to be added to a partial sum before anything is sent. A bias is added to the rounded product.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.comm.collectives import Group
from trainer.shared.run.errors import ConfigError


@dataclass(frozen=True)
class FusedProducts:
    """The products of the tensor ranks ``group``; without ``shared_memory`` each is a collective and a product.

    These are the group's own collectives, not those of torch's fallbacks. With torch 2.13 the two threads of a gloo group keep the name of
    the operation that completed last in one string, without a lock. A name of more than 15 characters is allocated, so one thread may
    write it after the other has freed it. The gather of the fallbacks has such a name (ALLGATHER_COALESCED), ours do not.
    """

    group: Group
    shared_memory: bool

    @classmethod
    def on(cls, device: torch.device, group: Group, everyone: Group, largest: int) -> FusedProducts:
        """Reserves the memory. Collective over ``everyone``. ``largest``: bytes of a rank's rows, or of its sums. Raises ``ConfigError``
        where GPUs of a group do not reach each other's memory."""
        if device.type != "cuda":
            return cls(group, shared_memory=False)
        from torch.distributed import _symmetric_memory  # noqa: F401 - registers operations that only this module needs

        everyone.together(lambda: reserve(group, 2 * largest), (ConfigError,))  # two pieces are on their way at a time
        return cls(group, shared_memory=True)

    def gathered(self, x: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the whole x [s, b, k] of a sharded one [s/t, b, k], and its product with ``matrix`` [k, n]: [s, b, n]."""
        x = x.contiguous()
        if not self.shared_memory:
            whole = x.new_empty(x.shape[0] * self.group.size, *x.shape[1:])
            self.group.all_gather(whole, x).wait()
            return whole, whole @ matrix
        multiply, name = torch.ops.symm_mem.fused_all_gather_matmul, self.group.handle.group_name
        whole, (product,) = self.group.computing("all_gather", x.nbytes * self.group.size, lambda: multiply(x, [matrix], 0, name))
        return whole, product

    def scattered(self, x: Tensor, matrix: Tensor) -> Tensor:
        """Returns this rank's rows [s/t, b, n] of the sum over ranks of x [s, b, k] times ``matrix`` [k, n]."""
        if not self.shared_memory:
            product = x @ matrix
            piece = product.new_empty(product.shape[0] // self.group.size, *product.shape[1:])
            self.group.reduce_scatter(piece, product).wait()
            return piece
        multiply, name = torch.ops.symm_mem.fused_matmul_reduce_scatter, self.group.handle.group_name
        nbytes = x.shape[0] * x.shape[1] * matrix.shape[1] * x.element_size()
        summed: Tensor = self.group.computing("reduce_scatter", nbytes, lambda: multiply(x, matrix, "sum", 0, name))
        return summed


def reserve(group: Group, nbytes: int) -> None:
    """Reserves memory that all ranks of ``group`` reach. Collective. Raises ``ConfigError`` if there is none."""
    if why := group.share_memory(nbytes):
        raise ConfigError(
            f"run.async_tensor=true needs tensor ranks on one host whose devices reach each other's memory (NVLink): {why}; "
            "use run.async_tensor=false"
        )
