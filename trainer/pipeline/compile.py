"""torch.compile of each block: the arithmetic between the matrices is fused, the communicating layers run as they are."""

from __future__ import annotations

import torch
from torch import nn

from trainer.pipeline.recompute import Recomputed
from trainer.tensor.dropout import HiddenDropout, WeightDropout
from trainer.tensor.layers import ColumnLinear, RowLinear

AS_THEY_ARE = (ColumnLinear, RowLinear, HiddenDropout, WeightDropout, Recomputed)
"""Layers with a backward written by hand, or that change what they read: not traced."""


def compile_blocks(blocks: nn.ModuleDict, wish: bool | None, device: torch.device) -> None:
    """Compile the forward of each block in place. Hooks around it stay outside.

    Without a ``wish`` it is done on CUDA, and what cannot be compiled there runs as it is, with a warning of torch's.
    """
    if not (device.type == "cuda" if wish is None else wish):
        return
    torch._dynamo.config.suppress_errors = wish is None
    for block in blocks.values():
        for module in block.modules():
            if isinstance(module, AS_THEY_ARE):
                module.forward = torch.compiler.disable(module.forward)  # type: ignore[method-assign]
        inner = block.inner if isinstance(block, Recomputed) else block
        inner.forward = torch.compile(inner.forward)  # type: ignore[method-assign]
