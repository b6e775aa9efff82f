"""torch.compile of each block, as one graph: each communication in it is an operation of its own (``trainer.tensor.traced``).

The compiler is imported only when used: the import takes as long as that of torch, in every rank.
"""

from __future__ import annotations

import torch
from torch import nn

from trainer.models.attention import rotary_table
from trainer.models.experts import MixtureOfExperts
from trainer.pipeline.recompute import Recomputed

USUAL_LIMIT = 8
"""How often torch compiles one piece of code by default."""


def compiles(enabled: bool | None, device: torch.device) -> bool:
    """Returns whether blocks are compiled on ``device``, as ``run.compile`` says."""
    return device.type == "cuda" if enabled is None else enabled


def compile_blocks(blocks: nn.ModuleDict, enabled: bool | None, falls_back: bool, device: torch.device, lengths: int = 1) -> None:
    """Compiles the forward of each block in place; hooks on the block are not compiled. Blocks of one kind share their code.

    By default (``enabled`` is None) blocks are compiled on CUDA. A block that cannot be compiled ends the run, unless it ``falls_back``:
    then it is computed eagerly, as far as necessary, with torch's warning. Blocks with experts are never compiled. Code is made for each of
    the ``lengths`` of sequences of a run.
    """
    if not compiles(enabled, device):
        return
    from torch._inductor import config as compiler

    torch.compiler.assume_constant_result(rotary_table)
    torch._dynamo.config.suppress_errors = falls_back
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, USUAL_LIMIT * lengths)
    # Compiled code would check the sizes of each input tensor: fifty per block, a twelfth of its host time. CPUs keep the checks.
    compiler.size_asserts = device.type != "cuda"
    for block in blocks.values():
        if any(isinstance(part, MixtureOfExperts) for part in block.modules()):  # sizes of its products are known on the host alone
            continue
        for root in {block.inner, *block.repeated} if isinstance(block, Recomputed) else {block}:
            root.forward = torch.compile(root.forward, fullgraph=not falls_back, dynamic=False)  # type: ignore[method-assign]
