"""What a step asks of a GPU and of its host, beside what a plain loop asks (``benchmarks/counts.py``)."""

from __future__ import annotations

import pytest

from benchmarks import counts
from trainer.state.parameters import BLOCK
from trainer.tensor.block_attention import SCORES

pytestmark = pytest.mark.slow


def test_the_host_waits_for_nothing_in_a_step_and_logits_are_those_of_a_chunk() -> None:
    waits, late, logits = counts.of_a_step()
    assert (waits.plain, waits.now) == (1, 0) and (late.plain, late.now) == (0, 1)
    assert logits.plain == 2048 * 50257 * 4, "all tokens of a micro-batch"
    assert 64 << 20 < logits.now <= 128 << 20, "chunks are equal, and two of them would not fit one"


@pytest.mark.parametrize(("family", "products"), [("gpt", 14), ("llama", 14)])
def test_a_block_computes_the_products_of_a_plain_block_and_few_copies_more(family: str, products: int) -> None:
    """Four matrices with two gradients each, and attention with its gradient."""
    operations, matrices, copies = counts.of_a_block({"family": family})
    assert matrices.plain == matrices.now == products
    assert operations.now <= 1.5 * operations.plain and copies.now - copies.plain <= 4


def test_alibi_adds_columns_and_no_bias() -> None:
    (bias,) = counts.of_alibi()
    heads, seq, _ = counts.BLOOM_7B
    assert bias.plain == heads * seq * seq * 2 and bias.now == heads * seq * 8 * 2 * 2


def test_attention_with_dropout_keeps_no_scores_and_makes_those_of_a_block() -> None:
    kept, largest = counts.of_attention_dropout()
    heads, seq, hidden = (counts.WIDE[name] for name in ("heads", "seq", "hidden"))
    assert kept.plain > 2 * heads * seq * seq * 2, "weights before and after dropout"
    assert 3 * seq * hidden * 2 <= kept.now < 3 * seq * hidden * 2 + 100, "queries, keys and values"
    assert largest.plain >= heads * seq * seq * 2 and largest.now <= 8 * SCORES["cuda"] < heads * seq * seq


def test_a_replica_draws_its_share_of_the_weights() -> None:
    (drawn,) = counts.of_start()
    share = drawn.plain / counts.REPLICAS
    assert share <= drawn.now <= share + 4 * BLOCK < drawn.plain
