"""torch.compile changes how a block is computed, not what."""

from __future__ import annotations

import pytest

from tests.small_runs import small
from trainer.testing import Farm


@pytest.mark.parametrize(("family", "recompute"), [("gpt", "selective"), ("bloom", "none"), ("llama", "full")])
def test_compiled_blocks_train_the_same_model(farm: Farm, family: str, recompute: str) -> None:
    """Compiled code runs around layers with a backward of their own, around recomputed parts, and through linear biases."""
    plain, compiled = (
        farm.train(small(precision="fp32", model={"layers": 1, "family": family}, run={"compile": way}, recompute=recompute), 1)
        for way in (False, True)
    )
    assert compiled.checked().result["losses"] == pytest.approx(plain.checked().result["losses"], rel=1e-5)
    assert compiled.result["grad_norms"] == pytest.approx(plain.result["grad_norms"], rel=1e-4)
