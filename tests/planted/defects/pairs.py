"""An encoder and its decoder: streams, biases, masks, span corruption."""

from __future__ import annotations

from tests.planted.defect import Defect

MODEL, RUNTIME = "trainer/models/encoder_decoder.py", "trainer/pipeline/runtime.py"
SPANS, PARALLEL, DROPOUT = "trainer/data/spans.py", "trainer/tensor/parallelize.py", "trainer/tensor/dropout.py"
LAYOUTS = "tests/numerics/test_matrix.py::test_a_designed_layout_has_losses_norms_and_parameters_of_one_process"
STREAMS = (
    "tests/numerics/test_matrix.py::test_streams_are_sent_in_parts_beside_whole_tables_and_come_back_from_a_stage_without_use_for_them"
)
VOLUMES = "tests/numerics/test_communication_volume.py"
BALANCE = "tests/shared/test_stage_balance.py"

DEFECTS = [
    Defect(
        "an encoder's output enters a tensor rank as it is",
        PARALLEL,
        "_set(model, name, EnteredHeads(self.region))",
        "pass",
        LAYOUTS,
    ),
    Defect(
        "keys and values of an encoder's output sum their gradients once more",
        PARALLEL,
        "self.region if part.cut and not part.entered else self._alone()",
        "self.region if part.cut else self._alone()",
        f"{LAYOUTS} {VOLUMES}",
    ),
    Defect(
        "a stage without use for a stream hands back no zeros",
        RUNTIME,
        "return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad",
        "return torch.ones_like(tensor).cumsum(-1) if tensor.grad is None else tensor.grad",
        STREAMS,
    ),
    Defect(
        "tables of biases are cut like sequences at a boundary",
        RUNTIME,
        "return [1 if name in BY_HEADS else self.split.parts for name in self.shapes._fields]",
        "return [self.split.parts for name in self.shapes._fields]",
        STREAMS,
    ),
    Defect(
        "the encoder's last norm stands behind the decoder's first block",
        MODEL,
        "if int(name) == self.border and self.encoder_end is not None:",
        "if int(name) == self.border + 1 and self.encoder_end is not None:",
        "tests/convert/test_t5.py",
    ),
    Defect(
        "a decoder's queries see keys behind them",
        MODEL,
        "StackCore(c, stack, causal=stack == DECODER), None)",
        "StackCore(c, stack, causal=False), None)",
        "tests/convert/test_t5.py",
    ),
    Defect(
        "dropout of weights on an encoder's keys is drawn by the place of the last key",
        DROPOUT,
        "queries = range(rows) if self.crosses else range(keys - rows, keys)",
        "queries = range(keys - rows, keys)",
        "tests/trainer/test_attention.py",
    ),
    Defect(
        "an MLP drops nothing behind its activation",
        MODEL,
        "self.down(self.dropout(self.activation(self.up(x))))",
        "self.down(self.activation(self.up(x)))",
        "tests/convert/test_t5.py",
    ),
    Defect(
        "tensor ranks drop the inner width of an MLP as if each had all of it",
        DROPOUT,
        "self.region, columns_split=True)",
        "self.region, columns_split=False)",
        LAYOUTS,
    ),
    Defect(
        "sentinels of a tokenizer that has a part of them are taken for all",
        "trainer/shared/corpora/index.py",
        "    if own:\n        raise ConfigError(",
        "    if not words:\n        raise ConfigError(",
        "tests/data/test_spans.py",
    ),
    Defect(
        "a text in given words may spell out a sentinel",
        "trainer/data/prepare.py",
        "tokenizer.encode_special_tokens = True",
        "tokenizer.encode_special_tokens = given_tokenizer(source.data) is None",
        "tests/data/test_spans.py",
    ),
    Defect(
        "padding is read",
        "trainer/tensor/placed.py",
        "if isinstance(core, StackCore) and not core.causal:",
        "if isinstance(core, StackCore) and core.crosses:",
        "tests/numerics/test_matrix.py::test_padding_behind_a_prompt_changes_nothing",
    ),
    Defect(
        "spans of all samples are masked alike",
        SPANS,
        "segments(n, spans, key_of(self.seed, number, part))",
        "segments(n, spans, key_of(self.seed, part))",
        "tests/data/test_spans.py",
    ),
    Defect(
        "spans begin a text",
        SPANS,
        "(len(text) - noise, noise)))",
        "(noise, len(text) - noise)))",
        "tests/data/test_spans.py",
    ),
    Defect(
        "a decoder's blocks weigh as much as an encoder's",
        "trainer/shared/run/flops.py",
        "    if model.writes(block):\n        return float(4 *",
        "    if False:\n        return float(4 *",
        "tests/trainer/test_parts.py",
    ),
]
