"""The loss scale of fp16 runs, which keeps gradients from vanishing and from overflowing."""

from __future__ import annotations

from dataclasses import dataclass

FIRST = 2.0**16
GROWTH_STEPS = 1000
LOWEST = 1.0


@dataclass
class LossScale:
    """Halves the scale when a step overflows, doubles it after ``GROWTH_STEPS`` that did not (Micikevicius et al. 2018). All ranks agree,
    since they see the same norm. Without ``dynamic`` it stays 1."""

    dynamic: bool
    value: float = 1.0
    good_steps: int = 0

    @classmethod
    def of(cls, precision: str) -> LossScale:
        return cls(True, FIRST) if precision == "fp16" else cls(False)

    def overflowed(self) -> bool:
        """Lower the scale after a step that was not finite; False when it cannot be lowered, so the scale is not the cause."""
        self.good_steps = 0
        if not self.dynamic or self.value <= LOWEST:
            return False
        self.value /= 2
        return True

    def succeeded(self) -> None:
        """Counts a finite step."""
        self.good_steps += 1
        if self.dynamic and self.good_steps >= GROWTH_STEPS:
            self.value, self.good_steps = self.value * 2, 0
