"""Schedules and what executes them, recomputation."""

from __future__ import annotations

from tests.planted.defect import Defect

RUNTIME, SCHEDULE = "trainer/pipeline/runtime.py", "trainer/shared/parallel/schedule.py"
LAYOUTS = "tests/numerics/test_layouts_agree.py tests/numerics/test_matrix.py"
SCHEDULES = "tests/shared/test_pipeline_schedule.py"

DEFECTS = [
    Defect(
        "weight gradients that are put off are lost",
        "trainer/tensor/layers.py",
        "    layer.gradients.later(work, dy, rows)\n",
        "    dy = torch.zeros_like(dy) if layer.gradients.defers else dy\n    layer.gradients.later(work, dy, rows)\n",
        LAYOUTS,
    ),
    Defect(
        "zero-bubble computes only the first weight gradient of a micro-batch",
        RUNTIME,
        "            while pending:\n                pending.pop(0)[0]()",
        "            pending.pop(0)[0]()",
        LAYOUTS,
    ),
    Defect(
        "a recomputed forward draws other masks",
        "trainer/pipeline/recompute.py",
        "ctx.module.noise.at(ctx.key)",
        "ctx.module.noise.at(ctx.module.noise.key)",
        LAYOUTS,
    ),
    Defect(
        "a recomputed block is differentiated at other inputs",
        "trainer/pipeline/recompute.py",
        "inputs = [t if t is None else t.detach().requires_grad_(t.requires_grad) for t in ctx.saved_tensors]",
        "inputs = [t if t is None else (t.detach() * 1.01).requires_grad_(t.requires_grad) for t in ctx.saved_tensors]",
        LAYOUTS,
    ),
    Defect(
        "chunks of one rank hold neighbouring blocks",
        "trainer/build.py",
        'chunk * config.layout.pipeline + groups.at["pipeline"]',
        'groups.at["pipeline"] * config.layout.virtual_pipeline + chunk',
        LAYOUTS,
    ),
    Defect(
        "each tensor rank sends the first part of a boundary",
        RUNTIME,
        "tensor.chunk(parts)[self.split.group.index if parts > 1 else 0]",
        "tensor.chunk(parts)[0]",
        LAYOUTS,
    ),
    Defect(
        "1F1B keeps one micro-batch more in flight",
        SCHEDULE,
        "warm_up=stages - 1 - rank + slices - 1)",
        "warm_up=stages - rank + slices - 1)",
        SCHEDULES,
    ),
    Defect(
        "zero-bubble never puts a weight gradient off",
        SCHEDULE,
        "yield Action(Kind.WEIGHT_GRAD, 0, m - rank)\n    yield from (Action(Kind.WEIGHT_GRAD, 0, m) for m in range(max(0, micro_batches - rank), micro_batches))",
        "yield Action(Kind.WEIGHT_GRAD, 0, m - rank)\n    yield from (Action(Kind.WEIGHT_GRAD, 0, m) for m in range(max(0, micro_batches - rank), micro_batches - 1))",
        SCHEDULES,
    ),
    Defect(
        "interleaving warms up for one chunk less",
        SCHEDULE,
        "warm_up=2 * (stages - 1 - rank) + (chunks - 1) * stages)",
        "warm_up=2 * (stages - 1 - rank) + (chunks - 2) * stages)",
        SCHEDULES,
    ),
    Defect(
        "the larger chunks come first",
        "trainer/shared/parallel/balance.py",
        "return tuple((layers + i) // chunks for i in range(chunks))",
        "return tuple((layers + chunks - 1 - i) // chunks for i in range(chunks))",
        "tests/shared/test_stage_balance.py",
    ),
    Defect(
        "a receive is posted too late to be hidden",
        "trainer/shared/parallel/messages.py",
        "AHEAD = 1\n",
        "AHEAD = 0\n",
        SCHEDULES,
    ),
    Defect(
        "a recomputed block leaves out a product whose output a norm reads",
        "trainer/pipeline/recompute.py",
        "if normed or not isinstance(down, RowLinear)",
        "if not isinstance(down, RowLinear)",
        "tests/numerics/test_matrix.py",
    ),
]
