"""``python -m trainer``, the real one, idling half a second in every step, and five once it has made a dozen: faults find it, however late
they come.

So does every attempt that finds no checkpoint, as Slurm counts starts that never reach the trainer; or those that ``SLOW_ATTEMPTS`` names.
"""

from __future__ import annotations

import os
import time
from typing import Any

from trainer.__main__ import main as train
from trainer.step import Engine, QueuedStep

PAUSE_S, LONG_PAUSE_S, LONG_FROM = 0.5, 5.0, 12
"""The long pause is shorter than the notice that Slurm gives of a preemption."""


def main(argv: list[str]) -> int:
    step = Engine.queue
    attempt, slow_attempts = argv[argv.index("--attempt") + 1], os.environ.get("SLOW_ATTEMPTS")
    first_steps: list[int] = []

    def slow_step(self: Engine, number: int, *arguments: Any, **options: Any) -> QueuedStep:
        first_steps.append(number)
        slow = first_steps[0] == 0 if slow_attempts is None else attempt in slow_attempts.split()
        time.sleep(0.01 if not slow else PAUSE_S if number < LONG_FROM else LONG_PAUSE_S)
        return step(self, number, *arguments, **options)

    Engine.queue = slow_step  # type: ignore[method-assign]
    return train(argv)
