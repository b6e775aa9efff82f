"""What tuning adds, tasks, and what is merged."""

from __future__ import annotations

from tests.planted.defect import Defect

LAYOUTS = "tests/numerics/test_matrix.py tests/tuning"

DEFECTS = [
    Defect(
        "a task is chosen by the local row",
        "trainer/prompts.py",
        "~(np.arange(first, first + len(rows), dtype=np.int64)[:, None] % tune.tasks)",
        "~(np.arange(len(rows), dtype=np.int64)[:, None] % tune.tasks)",
        "tests/numerics/test_matrix.py tests/tuning/test_tasks.py",
    ),
    Defect(
        "gradients of the replicated factor are not summed",
        "trainer/models/tuned.py",
        'ParameterSpec(Init(std), "matrices", {"tensor": a})',
        'ParameterSpec(Init(std), "matrices", {"tensor": a} if plain.cuts_inputs else {})',
        LAYOUTS,
    ),
    Defect(
        "a low-rank product is not scaled by its rank",
        "trainer/models/tuned.py",
        "self.scale, self.dropout = tune.alpha / tune.rank, tune.dropout",
        "self.scale, self.dropout = tune.alpha, tune.dropout",
        "tests/tuning/test_peft.py",
    ),
    Defect(
        "a merged product is not scaled by its rank",
        "trainer/checkpoint/tuned.py",
        "((b.flatten(0, -2) @ a) * (self.tune.alpha / self.tune.rank)).view(shape)",
        "((b.flatten(0, -2) @ a) * self.tune.alpha).view(shape)",
        "tests/tuning/test_checkpoints.py",
    ),
    Defect(
        "a task's loss is divided by its rows",
        "trainer/prompts.py",
        "counts = np.bincount(tasks, targets)",
        "counts = np.bincount(tasks) * targets.mean()",
        "tests/tuning/test_tasks.py",
    ),
    Defect(
        "each part of a sequence begins with virtual tokens",
        "trainer/tensor/parallelize.py",
        "part.runs = self.region.runs",
        "part.runs = lambda rows: (range(rows),)",
        LAYOUTS,
    ),
    Defect(
        "each tensor rank drops the inputs of the first columns",
        "trainer/tensor/dropout.py",
        "first, parts = (region.group.index * width, region.group.size) if columns_split else (0, 1)",
        "first, parts = (0, self.region.group.size) if self.columns_split else (0, 1)",
        LAYOUTS,
    ),
]
