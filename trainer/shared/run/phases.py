"""Phases of a training: steps of fewer or shorter sequences before those of ``run.global_batch`` and ``model.seq``. Pure.

Shorter sequences are pieces of those of ``model.seq``, and a step reads whole ones. So the number of those consumed is the position in the
data in every phase, every token is read once, and no border skips one.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

from trainer.shared.run.schema import PhaseConfig, RunConfig, TrainConfig

C = TypeVar("C", bound=TrainConfig)


@dataclass(frozen=True)
class Phase:
    """Steps of one size."""

    first: int  # number of its first step, from 0
    samples: int  # sequences of ``model.seq`` that the steps before it read
    global_batch: int
    seq: int
    pieces: int  # that a sequence of ``model.seq`` is cut in
    lr: float  # factor of the learning rate

    @property
    def stride(self) -> int:
        """Returns the sequences of ``model.seq`` that a step reads."""
        return self.global_batch // self.pieces

    def of(self, config: C) -> C:
        """Returns ``config`` as a run that is all of this phase."""
        run = dataclasses.replace(config.run, global_batch=self.global_batch, phases=[])
        return dataclasses.replace(config, model=dataclasses.replace(config.model, seq=self.seq), run=run)


@dataclass(frozen=True)
class PhaseTable:
    """All phases of a run whose ``run.phases`` are resolved and checked. The last one has no end."""

    phases: tuple[Phase, ...]

    @classmethod
    def of(cls, run: RunConfig, seq: int) -> PhaseTable:
        found, first, samples = list[Phase](), 0, 0
        for given in (*run.phases, PhaseConfig()):
            batch, length = given.global_batch or run.global_batch, given.seq or seq
            phase = Phase(first, samples, batch, length, seq // length, 1.0 if given.lr is None else given.lr)
            found.append(phase)
            steps = -(-((given.until or 0) - samples * seq) // (batch * length))
            first, samples = first + steps, samples + steps * phase.stride
        return cls(tuple(found))

    def at(self, step: int) -> Phase:
        """Returns the phase of step ``step``, from 0."""
        return self.phases[bisect_right(self.phases, step, key=lambda phase: phase.first) - 1]

    def consumed(self, steps: int) -> int:
        """Returns what the first ``steps`` steps read, in a unit that makes it ``steps`` where all are of one size."""
        phase, unit = self.at(steps), math.gcd(*(phase.stride for phase in self.phases))
        return (phase.samples + (steps - phase.first) * phase.stride) // unit

    def reached(self, steps: int) -> Iterator[tuple[Phase, int]]:
        """Yields the phases of a run of so many steps, each with its own number of steps."""
        for phase, after in itertools.pairwise((*self.phases, None)):
            last = steps if after is None else min(steps, after.first)
            if phase is not None and last > phase.first:
                yield phase, last - phase.first


def phases_of(config: TrainConfig) -> PhaseTable:
    """Returns the phases of a resolved run."""
    return PhaseTable.of(config.run, config.model.seq)


def resolve_phases(run: RunConfig, seq: int) -> list[PhaseConfig]:
    """Returns ``run.phases`` with every derived value. The learning rate of a phase goes with the square root of the tokens of its steps
    (Krizhevsky 2014, arXiv 1404.5997; for Adam: Malladi et al. 2022, arXiv 2205.10287)."""
    found = []
    for given in run.phases:
        batch, length = given.global_batch or run.global_batch, given.seq or seq
        lr = math.sqrt(batch * length / (run.global_batch * seq)) if given.lr is None else given.lr
        found.append(dataclasses.replace(given, global_batch=batch, seq=length, lr=lr))
    return found
