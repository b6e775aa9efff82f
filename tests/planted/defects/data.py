"""Which rows a step reads, examples and their targets, packed texts."""

from __future__ import annotations

from tests.planted.defect import Defect

DATASET, INSTRUCTIONS = "trainer/data/dataset.py", "trainer/data/instructions.py"
ROWS = "tests/data/test_rows.py"

DEFECTS = [
    Defect(
        "all replicas read the same rows",
        "trainer/batches.py",
        "count, first = self.micro_batches * self.size, start + self.first",
        "count, first = self.micro_batches * self.size, start",
        "tests/numerics/test_layouts_agree.py",
    ),
    Defect(
        "every epoch has the same order",
        DATASET,
        "permute(positions[chosen], self.windows, key_of(self.seed, int(epoch)))",
        "permute(positions[chosen], self.windows, key_of(self.seed))",
        ROWS,
    ),
    Defect(
        "targets are the inputs themselves",
        DATASET,
        "rows = [self.tokens.read(int(start), self.seq + 1) for start in starts]",
        "rows = [np.append(self.tokens.read(int(start), self.seq), 0) for start in starts]",
        ROWS,
    ),
    Defect(
        "evaluation reads text that is trained on",
        DATASET,
        "self.first, self.windows = (trained, held_out) if held_out else (0, trained)",
        "self.first, self.windows = (0, held_out) if held_out else (0, trained)",
        "tests/data/test_rows.py tests/stages/test_evaluate.py",
    ),
    Defect(
        "some positions of a permutation are never taken",
        "trainer/data/permutation.py",
        "while (outside := result >= n).any():",
        "while (outside := result > n).any():",
        ROWS,
    ),
    Defect(
        "prompts of examples are learnt",
        INSTRUCTIONS,
        "return [~token for token in before] + after",
        "return [*before, *after]",
        "tests/tuning/test_instructions.py",
    ),
    Defect(
        "padding of examples is learnt",
        INSTRUCTIONS,
        "[padded(example, width, ~self.end) for example in examples]",
        "[padded(example, width, self.end) for example in examples]",
        "tests/tuning/test_instructions.py",
    ),
    Defect(
        "a packed text sees the one before it",
        "trainer/tensor/placed.py",
        "((columns <= columns[:, None]) & (columns >= self.starts.t()[..., None]))[:, None]",
        "((columns <= columns[:, None]) & (columns >= 0 * self.starts.t()[..., None]))[:, None]",
        "tests/tuning/test_packing.py",
    ),
    Defect(
        "the loss of examples is divided by all tokens",
        "trainer/step.py",
        "ratio = queued.tokens / max(targets, 1)",
        "ratio = 1.0",
        "tests/tuning/test_instructions.py tests/tuning/test_packing.py",
    ),
    Defect(
        "every sample's spans are those of the first",
        "trainer/data/spans.py",
        "key_of(self.seed, number, part)",
        "key_of(self.seed, 0, part)",
        "tests/data/test_spans.py -k spans_of_three",
    ),
]
