"""Runs with phases (``trainer.shared.run.phases``): the mean step of several sizes, by which layouts are ordered as by the whole run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from launcher.cost.model import Estimate
from launcher.cost.parts import Parts, add, scale, total
from trainer.shared.run.phases import Phase, PhaseTable
from trainer.shared.run.schema import ModelConfig, RunConfig

M = TypeVar("M", bound=ModelConfig)


def sized(phase: Phase, model: M, run: RunConfig) -> tuple[M, RunConfig]:
    """Returns model and run as if all of it was of one phase."""
    return dataclasses.replace(model, seq=phase.seq), dataclasses.replace(run, global_batch=phase.global_batch, phases=[])


def shares(model: ModelConfig, run: RunConfig) -> list[tuple[float, Phase]]:
    """Returns the phases that a run reaches, each with its share of the steps."""
    return [(steps / run.steps, phase) for phase, steps in PhaseTable.of(run, model.seq).reached(run.steps)]


def mean_tokens(model: ModelConfig, run: RunConfig) -> float:
    """Returns the mean tokens of a step of the run."""
    return sum(share * (phase.global_batch * phase.seq) for share, phase in shares(model, run))


def mean_step(phases: Sequence[tuple[float, Estimate]]) -> Estimate:
    """Returns the mean step of phases with these shares of all steps: its time; and the memory of the phase that needs most."""
    if len(phases) == 1:
        return phases[0][1]
    time, behind = (add(*(scale(parts, share) for share, parts in each)) for each in _parts(phases))
    flops = sum(share * each.flops for share, each in phases)
    fits = np.minimum.reduce([each.fits for _, each in phases])
    return Estimate(time, _fullest([each.memory for _, each in phases]), fits, behind, phases[0][1].host, flops)  # states are of any phase


def _parts(phases: Sequence[tuple[float, Estimate]]) -> tuple[list[tuple[float, Parts]], list[tuple[float, Parts]]]:
    return [(share, each.time) for share, each in phases], [(share, each.behind_host) for share, each in phases]


def _fullest(memories: Sequence[Parts]) -> Parts:
    """Returns the parts of the memory that is the largest in all, for each layout."""
    totals = np.stack(np.broadcast_arrays(*(total(memory) for memory in memories)))
    most = totals.argmax(0)
    return {name: np.choose(most, [np.broadcast_to(memory[name], most.shape) for memory in memories]) for name in memories[0]}
