"""torch.compile of each block: the arithmetic between the matrices is fused, the communicating layers run as they are."""

from __future__ import annotations

import torch
from torch import nn

from trainer.pipeline.recompute import Recomputed
from trainer.tensor.dropout import HiddenDropout, ShardedAttentionDropout
from trainer.tensor.layers import ColumnLinear, RowLinear

NOT_TRACED = (ColumnLinear, RowLinear, HiddenDropout, ShardedAttentionDropout, Recomputed)
"""Layers with a hand-written backward, or whose result depends on more than their inputs."""


def compile_blocks(blocks: nn.ModuleDict, wish: bool | None, device: torch.device) -> None:
    """Compile the forward of each block in place. Hooks around it stay outside.

    Without a ``wish`` it is done on CUDA, and what cannot be compiled there runs as it is, with a warning of torch's.
    """
    if not (device.type == "cuda" if wish is None else wish):
        return
    torch._dynamo.config.suppress_errors = wish is None
    for block in blocks.values():
        computed = {block.inner, *block.repeated} if isinstance(block, Recomputed) else {block}
        for module in {module for root in computed for module in root.modules()}:
            if isinstance(module, NOT_TRACED):
                module.forward = torch.compiler.disable(module.forward)  # type: ignore[method-assign]
        for root in computed:
            root.forward = torch.compile(root.forward)  # type: ignore[method-assign]
