"""``python -m trainer``, the real one, with half a second of idleness in every step: time enough for faults to happen."""

from __future__ import annotations

import time
from typing import Any

from trainer.__main__ import main as train
from trainer.engine import Engine, StepResult

PAUSE_S = 0.5


def main(argv: list[str]) -> int:
    step = Engine.step

    def slow_step(self: Engine, *arguments: Any, **options: Any) -> StepResult:
        time.sleep(PAUSE_S)
        return step(self, *arguments, **options)

    Engine.step = slow_step  # type: ignore[method-assign]
    return train(argv)
