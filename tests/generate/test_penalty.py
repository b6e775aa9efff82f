"""A repetition penalty makes tokens that occur already less likely, whatever the sign of their logits."""

from __future__ import annotations

import pytest
import torch

from trainer.generate.sampling import Sampling, choose


@pytest.mark.parametrize(("logits", "text", "chosen"), [
    ([3.0, 2.0, 1.0], [0], 1),
    ([-1.0, -1.5, -9.0], [0], 1),
    ([-1.0, -1.5, -9.0], [0, 1], 0),
    ([1.0, -0.5, 0.6], [0, 0, 0], 2),
])  # fmt: skip
def test_a_token_that_occurs_already_is_less_likely(logits: list[float], text: list[int], chosen: int) -> None:
    assert choose(torch.tensor(logits), text, Sampling(), 0) == 0
    assert choose(torch.tensor(logits), text, Sampling(repetition_penalty=2.0), 0) == chosen
