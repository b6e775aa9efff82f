"""Examples that share a row train what they train in rows of their own, and see nothing of each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from tuning.examples import EXAMPLES
from tuning.test_tuned_layouts import engine_of

from tests.farm import Farm
from tests.numerics.matrix import train_all
from tests.small_runs import ranks, small
from trainer.data.instructions import packed
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.read import from_dict
from trainer.shared.run.rules import resolve
from trainer.shared.run.schema import TrainConfig
from trainer.step import Engine
from trainer.tensor.dropout import DropoutKey
from trainer.tensor.placed import PackedTextStarts

pytestmark = pytest.mark.slow

ROWS = 4
"""That the examples make, packed."""
FAMILIES = [{"family": "gpt", "attention": "unfused"}, {"family": "llama", "kv_heads": 2}, {"family": "bloom"}]
"""With learned positions, rotary embeddings and linear biases."""


def run_of(examples: dict[str, Any], pack: bool, model: dict[str, Any], **layout: Any) -> dict[str, Any]:
    """Every step takes all examples, so that both ways take the same."""
    sizes = {"vocab": 300, "seq": 128, "layers": 4, "hidden": 16, "heads": 4}
    batch = {"global_batch": ROWS if pack else len(EXAMPLES)}
    return small(model=sizes | model, run=batch, optimizer={"eps": 1e-4}, **layout) | {"data": examples | {"pack": pack}}


@pytest.mark.parametrize(
    ("model", "layout", "tune"),
    [
        (FAMILIES[0], {"tensor": 2, "sequence_parallel": True, "recompute": "selective"}, {}),
        (FAMILIES[1], {"pipeline": 4, "schedule": "zero_bubble", "recompute": "full", "micro_batch": 2}, {"method": "lora", "rank": 4}),
        (FAMILIES[2], {"tensor": 2, "pipeline": 2, "data": 2, "sharding": {"params": 2, "grads": 2, "optimizer": 2}}, {}),
    ],
    ids=["gpt", "llama", "bloom"],
)
def test_packed_examples_train_what_single_ones_train_under_any_layout(
    farm: Farm, data: dict[str, Any], model: dict[str, Any], layout: dict[str, Any], tune: dict[str, Any]
) -> None:
    [expected] = train_all(farm, 1, [run_of(data, False, model, micro_batch=6) | {"tune": tune}])
    [found] = train_all(farm, ranks(layout), [run_of(data, True, model, **layout) | {"tune": tune}])
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values, rtol=0, atol=1e-10 * float(values.abs().max()), msg=name)


def logits(engine: Engine, rows: Tensor, texts: PackedTextStarts | None) -> Tensor:
    """Of rows [s + 1, b]: [s, b, V]."""
    chunk = engine.rank.pipeline.chunks[0]
    with torch.no_grad(), chunk.noise.at(DropoutKey(texts=texts)):
        return chunk.model(torch.where(rows < 0, ~rows, rows)[:-1])


@pytest.mark.parametrize("model", FAMILIES, ids=["gpt", "llama", "bloom"])
def test_an_example_is_read_alike_in_any_company_and_alone(data: dict[str, Any], model: dict[str, Any]) -> None:
    alone, together = engine_of(**run_of(data, False, model)), engine_of(**run_of(data, True, model))
    rows = torch.from_numpy(together.batches.dataset.batch(0, ROWS)).t().contiguous()
    texts = PackedTextStarts.of(rows)
    seen = logits(together, rows, texts)
    single = torch.from_numpy(alone.batches.dataset.batch(0, len(EXAMPLES))).t()
    expected = {example(single[:, n]): of_row for n, of_row in enumerate(logits(alone, single, None).unbind(1))}
    met = 0
    for row in range(ROWS):
        for first in texts.starts[:, row].unique().tolist():
            if (words := example(rows[first:, row])) in expected:
                length = min(len(words), len(seen) - first)
                torch.testing.assert_close(seen[first : first + length, row], expected[words][:length], rtol=0, atol=1e-11)
                others = torch.where((texts.starts[:, row] == first), rows[:-1, row], (rows[:-1, row] + 1) % 300)
                changed = logits(together, torch.cat((others, rows[-1:, row]))[:, None], PackedTextStarts(texts.starts[:, row : row + 1]))
                assert torch.equal(changed[first : first + length, 0], seen[first : first + length, row])
                met += 1
    assert met == len(EXAMPLES)


def example(row: Tensor) -> tuple[int, ...]:
    """The first one of what is left of a row: what is asked, then the answer."""
    words, count = row.tolist(), 0
    while count < len(words) and words[count] < 0:
        count += 1
    while count < len(words) and words[count] >= 0:
        count += 1
    return tuple(words[:count])


@given(st.lists(st.integers(1, 9), max_size=30))
def test_packing_loses_nothing_and_opens_a_row_only_where_none_has_room(lengths: list[int]) -> None:
    rows = packed([[number] * length for number, length in enumerate(lengths)], 10)
    assert sorted(word for row in rows for word in row) == [number for number, length in enumerate(lengths) for _ in range(length)]
    assert all(len(row) <= 10 for row in rows)
    assert sum(len(row) <= 5 for row in rows) <= 1  # two such rows would have been one


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"data": {"kind": "synthetic", "pack": True}}, "data.pack=true packs examples, and data.kind=synthetic has none"),
        ({"tune": {"method": "prompt", "virtual_tokens": 2}}, "no place before each example for the virtual tokens of tune.method=prompt"),
        ({"run": {"compile": True}}, "run.compile=true compiles blocks for which all rows are alike"),
    ],
)
def test_packing_is_refused_in_one_line_where_it_cannot_hold(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve(from_dict(TrainConfig, small() | {"data": {"kind": "instructions", "pack": True}} | change), 1)
    assert words in str(error.value) and "\n" not in str(error.value)
