"""The loss scale over a long time without overflow."""

from __future__ import annotations

from trainer.state.loss_scale import FIRST, GROWTH_STEPS, LossScale


def test_a_scale_doubles_once_in_every_good_while() -> None:
    scale = LossScale.of("fp16")
    values = []
    for _ in range(3):
        for _ in range(GROWTH_STEPS - 1):
            scale.succeeded()
        values.append(scale.value)
        scale.succeeded()
    assert values == [FIRST, 2 * FIRST, 4 * FIRST]
    assert scale.value == 8 * FIRST
