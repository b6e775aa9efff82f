"""torch.compile of each block, as one graph: whatever communicates in it is an operation of its own (``trainer.tensor.traced``).

Nothing here imports the compiler before it is used: that takes as long as the import of torch, in every rank.
"""

from __future__ import annotations

import torch
from torch import nn

from trainer.models.attention import rotary_table
from trainer.pipeline.recompute import Recomputed


def compiles(enabled: bool | None, device: torch.device) -> bool:
    """What ``run.compile`` says for ``device``."""
    return device.type == "cuda" if enabled is None else enabled


def compile_blocks(blocks: nn.ModuleDict, enabled: bool | None, falls_back: bool, device: torch.device) -> None:
    """Compile the forward of each block in place; hooks on the block are not compiled. Blocks of one kind share their code.

    By default (``enabled`` is None) blocks are compiled on CUDA. A block that cannot be compiled ends the run, unless it ``falls_back``:
    then it is computed eagerly, as far as necessary, with torch's warning.
    """
    if not compiles(enabled, device):
        return
    from torch._inductor import config as compiler

    torch.compiler.assume_constant_result(rotary_table)
    torch._dynamo.config.suppress_errors = falls_back
    # Compiled code would look at the sizes of each tensor that it gets: fifty times a block, a twelfth of its host's time. A CPU's does.
    compiler.size_asserts = device.type != "cuda"
    for block in blocks.values():
        for root in {block.inner, *block.repeated} if isinstance(block, Recomputed) else {block}:
            root.forward = torch.compile(root.forward, fullgraph=not falls_back, dynamic=False)  # type: ignore[method-assign]
