"""How much single steps differ from the time of their run, in published logs that print every step.

    python -m benchmarks.step_scatter

Prints for each log of ``benchmarks/step_times.csv`` how far the step after a warm-up of two, the median of the three after it,
and all of its steps are off from the median of steps 3 to 10, and how far the second step, the last of the warm-up, was from the third.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.console import answered
from launcher.search.steps import FEW_STEPS, OWN_STEPS

STEPS = Path(__file__).parent / "step_times.csv"
WARMUP, LAST = 2, 10
"""Steps of a trial that are not measured, and its last one, as ``run.warmup_steps`` and ``run.steps`` have them."""


@dataclass(frozen=True)
class Log:
    """A run that printed its steps."""

    name: str
    devices: str
    seconds: dict[int, float]  # by number of the step, from 1

    @property
    def factors(self) -> list[float]:
        """Measured steps as multiples of their median."""
        measured = [value for step, value in sorted(self.seconds.items()) if WARMUP < step <= LAST]
        return [value / median(measured) for value in measured]


def logs() -> list[Log]:
    """Those of which at least two steps after the warm-up, or one and one of it, are known."""
    found: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    with STEPS.open(newline="") as file:
        for row in csv.DictReader(file):
            found[row["log"], row["devices"]][int(row["step"])] = float(row["seconds"])
    return [Log(name, devices, seconds) for (name, devices), seconds in found.items()]


@dataclass(frozen=True)
class Drawn:
    """Steps that scatter as those of one log do: drawn from them with replacement. What all trials of a machine share, that it gets warm,
    say, would not change which is faster; here it does, so that a search has it harder than with the steps in their order."""

    factors: Sequence[float]
    random: np.random.Generator

    def __call__(self, count: int) -> Sequence[float]:
        return [float(factor) for factor in self.random.choice(self.factors, count)]


def main(argv: list[str] | None = None) -> int:
    """Always 0."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args(argv)
    print("third step   three   all of 3 to 10   second and third   log")
    first, few = [], []
    for log in logs():
        second, third = log.seconds.get(WARMUP), log.seconds.get(WARMUP + 1)
        warm = f"{100 * math.log(second / third):+7.1f} %" if second and third else ""
        if len(log.factors) < OWN_STEPS:
            print(f"{'':37}{warm:>15}    {log.name}")
            continue
        off = np.log(log.factors)
        early = [float(off[0]), math.log(median(log.factors[:FEW_STEPS]))]
        if warm:  # else its steps may be others than those after a warm-up
            first.append(early[0])
            few.append(early[1])
        shown = f"{early[0]:+9.2%} {early[1]:+8.2%}" if warm else " " * 18
        print(f"{shown} {np.sqrt((off**2).mean()):13.2%}   {warm:>15}    {log.name}")
    for name, values in (("third step", first), ("three", few)):
        half, mean = np.median(np.abs(values)), np.sqrt(np.square(values).mean())
        print(f"{name} of {len(values)} logs: half are off by less than {half:.2%}, root mean square {mean:.2%}")
    return 0


if __name__ == "__main__":
    sys.exit(answered(main))
