"""torch.compile of each block: element-wise work is fused; layers that communicate are not traced."""

from __future__ import annotations

import torch
from torch import nn

from trainer.pipeline.recompute import Recomputed
from trainer.tensor.dropout import HiddenDropout, ShardedAttentionDropout
from trainer.tensor.layers import ColumnLinear, RowLinear

NOT_TRACED = (ColumnLinear, RowLinear, HiddenDropout, ShardedAttentionDropout, Recomputed)
"""Layers with a hand-written backward, or whose result depends on more than their inputs."""


def compile_blocks(blocks: nn.ModuleDict, enabled: bool | None, device: torch.device) -> None:
    """Compile the forward of each block in place; hooks on the block are not compiled.

    By default (``enabled`` is None) blocks are compiled on CUDA, and a block that cannot be compiled runs eagerly, with torch's warning.
    """
    if not (device.type == "cuda" if enabled is None else enabled):
        return
    torch._dynamo.config.suppress_errors = enabled is None
    for block in blocks.values():
        computed = {block.inner, *block.repeated} if isinstance(block, Recomputed) else {block}
        for module in {module for root in computed for module in root.modules()}:
            if isinstance(module, NOT_TRACED):
                module.forward = torch.compiler.disable(module.forward)  # type: ignore[method-assign]
        for root in computed:
            root.forward = torch.compile(root.forward)  # type: ignore[method-assign]
