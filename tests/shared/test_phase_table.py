"""Phases of a run: how many steps each has, what they read, and what the learning rate goes with."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from trainer.data import Synthetic
from trainer.data.pieces import SequencePieces
from trainer.shared.records.outcome import Status
from trainer.shared.records.summary import result_of
from trainer.shared.run.phases import Phase, PhaseTable, phases_of
from trainer.shared.run.read import from_dict, to_dict
from trainer.shared.run.resolved import ResolvedOptimizerConfig, ResolvedTrainConfig
from trainer.shared.run.rules import resolve
from trainer.shared.run.schema import PhaseConfig, RunConfig, TrainConfig
from trainer.state.optimizer import learning_rate


def drawn(dice: random.Random) -> tuple[RunConfig, int]:
    """A run of up to four phases, and the length of its sequences."""
    seq, before, phases = 16, 0, []
    for _ in range(dice.randint(0, 3)):
        pieces = dice.choice([1, 2, 4])
        batch = pieces * dice.randint(1, 5)
        size, steps = batch * seq // pieces, dice.randint(1, 6)
        phases.append(PhaseConfig(before + steps * size - dice.randrange(size), batch, seq // pieces, dice.choice([None, 0.5])))
        before += steps * size
    return RunConfig(steps=dice.randint(1, 20), global_batch=dice.randint(1, 8), phases=phases), seq


@pytest.mark.parametrize("number", range(40))
def test_a_phase_ends_with_the_step_that_reaches_its_tokens(number: int) -> None:
    run, seq = drawn(random.Random(number))
    table, tokens, phase = PhaseTable.of(run, seq), 0, 0
    counted = {one.first: steps for one, steps in table.reached(run.steps)}
    sizes: dict[int, int] = {}
    for step in range(run.steps):
        while phase < len(run.phases) and tokens >= (run.phases[phase].until or 0):
            phase += 1
        given = run.phases[phase] if phase < len(run.phases) else PhaseConfig(None, run.global_batch, seq)
        found = table.at(step)
        assert (found.global_batch, found.seq) == (given.global_batch, given.seq)
        assert table.consumed(step) * seq * _unit(table) == tokens
        tokens += found.global_batch * found.seq
        sizes[found.first] = sizes.get(found.first, 0) + 1
    assert sizes == counted


def _unit(table: PhaseTable) -> int:
    return int(np.gcd.reduce([phase.stride for phase in table.phases]))


def test_a_run_without_phases_counts_steps() -> None:
    table = PhaseTable.of(RunConfig(global_batch=12), 16)
    assert [table.consumed(n) for n in (0, 1, 7, 10**9)] == [0, 1, 7, 10**9] and table.at(10**9).stride == 12


PHASES = [{"until": 64, "global_batch": 4, "seq": 4}, {"until": 120, "global_batch": 4, "seq": 8, "lr": 0.9}]
"""Before batches of 8 x 16 tokens: four steps of 16 tokens, two of 32."""


def resolved(**run: Any) -> ResolvedTrainConfig:
    data = {
        "model": {"layers": 1, "hidden": 8, "heads": 1, "vocab": 11, "seq": 16},
        "data": {"kind": "synthetic"},
        "run": {"steps": 10, "global_batch": 8, "phases": PHASES, **run},
    }
    return resolve(from_dict(TrainConfig, data), 1)


def test_the_learning_rate_goes_with_tokens_between_the_steps_of_its_schedule() -> None:
    config = ResolvedOptimizerConfig(lr=1.0, min_lr=0.0, warmup_steps=5, decay_steps=8, decay_style="linear")
    table = phases_of(resolved())
    tokens = [0, 16, 32, 48, 64, 96, 128, 256, 384]
    rates = [learning_rate(config, step, table.consumed) for step in range(9)]
    assert rates[:5] == pytest.approx([tokens[step + 1] / 96 for step in range(5)], rel=1e-14)
    assert rates[5:] == pytest.approx([1 - (tokens[step] - 96) / (384 - 96) for step in range(5, 9)], rel=1e-14)


def test_the_rate_of_a_phase_goes_with_the_root_of_its_tokens_unless_it_is_given() -> None:
    assert [phase.lr for phase in phases_of(resolved()).phases] == pytest.approx([(16 / 128) ** 0.5, 0.9, 1.0], rel=1e-14)


def test_values_that_are_derived_are_those_that_could_be_given() -> None:
    config = resolved(phases=[{"until": 64, "seq": 4}])
    assert config.run.phases == [PhaseConfig(64, 8, 4, 0.5)]
    assert resolve(from_dict(TrainConfig, to_dict(config)), 1) == config


@pytest.mark.parametrize("pieces", [1, 2, 4])
def test_pieces_are_the_sequences_of_the_data_cut_up(pieces: int) -> None:
    whole = Synthetic(100, 16, 1)
    cut, rows = SequencePieces(whole, pieces), whole.batch(0, 6)
    every = cut.batch(0, 6 * pieces)
    assert (every[:, :-1].reshape(6, 16) == rows[:, :-1]).all() and (every[:, 1:].reshape(6, 16) == rows[:, 1:]).all()
    for first in range(6 * pieces):
        for count in (0, 1, 2, 3, 5):
            assert (cut.batch(first, count)[: len(every) - first] == every[first : first + count]).all()


def test_the_step_time_of_a_result_is_that_of_the_whole_run() -> None:
    """Steps 1 to 4, 5 and 6, 7 to 10, the first of each for warm-up."""
    config = resolved(warmup_steps=1, peak_tflops=1.0)
    times = dict(enumerate([9.0, 1, 1, 1, 9, 2, 9, 4, 4, 4], 1))
    result = result_of(config, Status.DONE, 0, {}, times, 1)
    assert result["step_time_s"] == pytest.approx((4 * 1 + 2 * 2 + 4 * 4) / 10)
    assert result["tokens_per_s"] == pytest.approx((4 * 16 + 2 * 32 + 4 * 128) / (4 * 1 + 2 * 2 + 4 * 4))
    assert [(one["measured_steps"], one["step_time_s"], one["tokens_per_s"]) for one in result["phases"]] == [
        ([2, 4], 1.0, 16.0),
        ([6, 6], 2.0, 16.0),
        ([8, 10], 4.0, 32.0),
    ]
    flops = sum(one["share_of_steps"] * one["tflops_per_gpu"] * one["step_time_s"] for one in result["phases"])
    assert result["mfu"] == pytest.approx(flops / result["step_time_s"])


def test_a_run_that_stops_early_tells_of_the_phases_that_it_had() -> None:
    result = result_of(resolved(warmup_steps=0), Status.STOPPED, 0, {}, dict.fromkeys(range(1, 6), 1.0), 1)
    assert [one["share_of_steps"] for one in result["phases"]] == pytest.approx([4 / 6, 2 / 6])


def test_phases_are_told_by_their_numbers() -> None:
    first = phases_of(resolved()).phases[0]
    assert first == Phase(first=0, samples=0, global_batch=4, seq=4, pieces=4, lr=first.lr)
