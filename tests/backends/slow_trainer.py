"""``python -m trainer``, the real one, idling half a second in every step: faults find it, however late they come.

So does its first attempt, or those that ``SLOW_ATTEMPTS`` names.
"""

from __future__ import annotations

import os
import time
from typing import Any

from trainer.__main__ import main as train
from trainer.engine import Engine, QueuedStep

PAUSE_S = 0.5


def main(argv: list[str]) -> int:
    step = Engine.queue
    slow = argv[argv.index("--attempt") + 1] in os.environ.get("SLOW_ATTEMPTS", "0").split()

    def slow_step(self: Engine, *arguments: Any, **options: Any) -> QueuedStep:
        time.sleep(PAUSE_S if slow else 0.01)
        return step(self, *arguments, **options)

    Engine.queue = slow_step  # type: ignore[method-assign]
    return train(argv)
