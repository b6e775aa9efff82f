"""Numbers of a log are taken for what they are: a step's number, a time in milliseconds, a placeholder, a step that has diverged."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from launcher.config.trainers import profile
from tests.small_runs import small
from trainer.launch.failure import TrainerFailure
from trainer.observe import Recording
from trainer.shared.records.log_reader import LogReader
from trainer.shared.run.foreign import CommandConfig
from trainer.shared.run.read import from_dict
from trainer.shared.run.rules import resolve
from trainer.shared.run.schema import TrainConfig


def test_milliseconds_of_a_phase_called_step_are_no_number_of_a_step() -> None:
    """DeepSpeed with wall_clock_breakdown (huggingface/accelerate#1589)."""
    launch = profile("deepspeed").launch
    assert launch is not None
    reader, steps = LogReader(launch.log, 1, 8, 1), []
    for number, milliseconds in enumerate(["120.05", "72.82", "72.00"], start=1):
        lines = [f"time (ms) | optimizer_step: 60.64 | forward: 27.41 | step: {milliseconds}", f"step={number}, skipped=0, lr=[5e-05]"]
        lines.append(f"0/{number}, RunningAvgSamplesPerSec=80.1, CurrSamplesPerSec=80.0, MemAllocated=1.75GB, MaxMemAllocated=2.6GB")
        steps += [done for line in lines if (done := reader.take(line, float(number)))]
    steps.append(reader.rest() or {})
    assert [(step["step"], step["step_time_s"]) for step in steps] == [(1, 0.1), (2, 0.1), (3, 0.1)]


def test_the_rank_whose_log_is_read_knows_the_loss_under_every_layout() -> None:
    """Ranks of torchtitan that do not hold the last stage print -1 (pytorch/torchtitan#1232)."""
    assert {name: launch.reports for name in ("torchtitan", "megatron_core") if (launch := profile(name).launch)} == {
        "torchtitan": "last",
        "megatron_core": "last",
    }


def recording(folder: Path, precision: str, **run: Any) -> Recording:
    config = small(run={"precision": precision, **run}, precision=precision)
    command = CommandConfig(words=["x"], log=[r"step (?P<step>\d+) loss (?P<loss>\S+) norm (?P<grad_norm>\S+)"])
    resolved = resolve(from_dict(TrainConfig, config), 1)
    object.__setattr__(resolved, "command", command)
    return Recording(resolved, folder, 0, 1)


@pytest.mark.parametrize(
    ("line", "words"),
    [("step 3 loss nan norm 1.0", "the loss of step 3 is nan"), ("step 3 loss 0.0 norm nan", "the gradient norm of step 3 is nan")],
)
def test_a_step_that_has_diverged_ends_the_trial_whichever_number_says_so(line: str, words: str, tmp_path: Path) -> None:
    """The Trainer of Hugging Face prints a loss of 0 where it is NaN."""
    with pytest.raises(TrainerFailure, match=words):
        recording(tmp_path, "fp32").take(line, 1.0)
    recording(tmp_path, "fp32", on_nonfinite="skip").take(line, 1.0)


def test_a_norm_that_is_not_finite_is_a_skipped_step_in_fp16(tmp_path: Path) -> None:
    record = recording(tmp_path, "fp16")
    record.take("step 1 loss 2.0 norm inf", 1.0)
    assert math.isinf(record.reader.told["grad_norm"])
