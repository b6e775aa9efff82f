"""Slices of sequences: positions, keys and values of the slices before, their gradients, order."""

from __future__ import annotations

from tests.planted.defect import Defect

REGION, KEPT, SCHEDULE = "trainer/tensor/region.py", "trainer/tensor/slices.py", "trainer/shared/parallel/schedule.py"
LAYOUTS = "tests/numerics/test_matrix.py::test_a_designed_layout_has_losses_norms_and_parameters_of_one_process"
PURE = "tests/shared/test_sliced_schedule.py"

DEFECTS = [
    Defect(
        "keys get no gradient from the slices behind them",
        KEPT,
        "[total[run.start : run.stop].to(own.dtype) for total, own in zip(self.sums, gradients)]",
        "[own[run.start : run.stop] for own in gradients]",
        LAYOUTS,
    ),
    Defect("positions begin anew in every slice", REGION, "return (self.slices.now,)", "return (range(rows),)", LAYOUTS),
    Defect(
        "micro-batches in flight share their keys",
        REGION,
        "self.micro_batches.setdefault((chunk, micro_batch), {})",
        "self.micro_batches.setdefault((chunk, 0), {})",
        LAYOUTS,
    ),
    Defect(
        "dropout counts elements as if a slice was a sequence",
        REGION,
        "return self.slices.length if self.slices.now is not None else rows",
        "return rows",
        LAYOUTS,
    ),
    Defect(
        "dropout of attention takes the keys so far for the whole sequence",
        KEPT,
        "attend(query, keys, values, length=self.slices.length)",
        "attend(query, keys, values)",
        LAYOUTS,
    ),
    Defect(
        "a slice sees its own keys alone",
        KEPT,
        "(whole.data[: run.stop] for whole in self.tensors)",
        "(whole.data[run.start : run.stop] for whole in self.tensors)",
        LAYOUTS,
    ),
    Defect("backward begins with the first slice", SCHEDULE, "for s in reversed(range(slices))", "for s in range(slices)", PURE),
    Defect("a backward comes before its micro-batch is whole", SCHEDULE, "stages - 1 - rank + slices - 1", "stages - 1 - rank", PURE),
    Defect(
        "slices of a message are not told apart",
        "trainer/shared/parallel/messages.py",
        "action.micro_batch, action.slice), source",
        "action.micro_batch, 0), source",
        PURE,
    ),
    Defect(
        "a simulated slice takes the first one's time",
        "trainer/shared/parallel/simulate.py",
        "ready + self.times[action.slice].of",
        "ready + self.times[0].of",
        PURE,
    ),
    Defect(
        "work is cut as if queries saw all keys",
        "trainer/shared/run/flops.py",
        "return near * (near + 1) // 2 + (positions - near) * near",
        "return positions * near",
        PURE,
    ),
]
