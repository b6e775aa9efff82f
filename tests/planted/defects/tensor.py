"""Tensor and sequence parallel layers, dropout, the loss over a sharded vocabulary."""

from __future__ import annotations

from tests.planted.defect import Defect

BLOCKS = "trainer/tensor/block_attention.py"
LAYERS, DROPOUT, LOSS = "trainer/tensor/layers.py", "trainer/tensor/dropout.py", "trainer/tensor/cross_entropy.py"
LAYOUTS = "tests/numerics/test_layouts_agree.py tests/numerics/test_matrix.py"

DEFECTS = [
    Defect(
        "a row layer's output is not summed over the tensor ranks",
        LAYERS,
        "return ready(self.region.sum(y)), inner",
        "return (y if not self.region.sequence_sharded else ready(self.region.sum(y))), inner",
        LAYOUTS,
    ),
    Defect(
        "a column layer's input gradient is not summed over the tensor ranks",
        LAYERS,
        "summed = None if dx is None else self.region.sum(dx)\n        _weight_gradients(self, whole, dy, inner, d_inner, stamp)",
        "summed = None if dx is None else (self.region.sum(dx) if self.region.sequence_sharded else (dx, Pending(None, self.region.group, '')))\n"
        "        _weight_gradients(self, whole, dy, inner, d_inner, stamp)",
        LAYOUTS,
    ),
    Defect(
        "gradients of norms are not summed under sequence parallelism",
        "trainer/tensor/parallelize.py",
        '["tensor"] if self.region.sequence_sharded else []',
        "[]",
        LAYOUTS,
    ),
    Defect(
        "partial gradients are summed over the wrong group",
        "trainer/step.py",
        "sum_partial(self.trained, groups.axes)",
        'sum_partial(self.trained, groups.axes | {"tensor": groups.levels["replicas"]})',
        LAYOUTS,
    ),
    Defect(
        "every part of a sequence begins at position 0",
        LAYERS,
        "rows_at(self.weight, self.region.runs(x.shape[0]))",
        "rows_at(self.weight, (range(x.shape[0]),))",
        LAYOUTS,
    ),
    Defect(
        "gradients of tokens of other ranks' rows go to row 0",
        LAYERS,
        "dy = ready(layer.region.gather(gradients[0])).masked_fill(ctx.absent.unsqueeze(-1), 0)",
        "dy = ready(layer.region.gather(gradients[0]))",
        LAYOUTS,
    ),
    Defect(
        "each part of a sequence drops the same elements",
        DROPOUT,
        "places(self.region.runs(x.shape[0]), x.device), self.region.length",
        "places((range(x.shape[0]),), x.device), self.region.length",
        LAYOUTS,
    ),
    Defect(
        "each tensor rank drops the attention weights of the first heads",
        DROPOUT,
        "for r in (self.heads, queries))",
        "for r in (range(len(self.heads)), queries))",
        LAYOUTS,
    ),
    Defect(
        "each replica drops the same elements",
        "trainer/batches.py",
        "DropoutKey(self.step, self.first_row + micro_batch * self.size, texts)",
        "DropoutKey(self.step, micro_batch * self.size, texts)",
        LAYOUTS,
    ),
    Defect(
        "exponentials of tensor ranks are relative to different maxima",
        LOSS,
        "    group.all_reduce(highest, MAX).wait()\n",
        "",
        LAYOUTS,
    ),
    Defect(
        "padding of the vocabulary takes a share of the probability",
        LOSS,
        '        block[:, present:] = float("-inf")\n',
        "",
        "tests/trainer/test_head_loss.py tests/numerics/test_matrix.py",
    ),
    Defect(
        "a chunk of the loss has the weights of the first chunk",
        LOSS,
        "_cross_entropy(logits, wanted[part], weights[part], targets,",
        "_cross_entropy(logits, wanted[part], weights[: part.stop - first], targets,",
        "tests/trainer/test_head_loss.py tests/numerics/test_matrix.py",
    ),
    Defect(
        "gradients of the norms of each head are not summed over the tensor ranks",
        "trainer/models/layers.py",
        '(c.head_width,), c.norm_eps, offset, bias, {"tensor": Partial()})',
        "(c.head_width,), c.norm_eps, offset, bias)",
        LAYOUTS,
    ),
    Defect(
        "a norm of the whole width knows this rank's heads alone",
        "trainer/tensor/parallelize.py",
        "part.total = SumOverRanks(self.region.group)",
        "pass",
        LAYOUTS,
    ),
    Defect(
        "a block of queries looks one position too far back",
        BLOCKS,
        "hidden = hidden | (place <= own - self.window)",
        "hidden = hidden | (place < own - self.window)",
        "tests/numerics/test_plain_oracle.py",
    ),
    Defect(
        "scores that are capped have the slope of those that are not",
        BLOCKS,
        "scores, slope = share * cap, 1 - share.square()",
        "scores, slope = share * cap, None",
        "tests/numerics/test_plain_oracle.py",
    ),
]
