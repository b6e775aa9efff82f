"""Prompt tuning of several tasks at once: which row belongs to which task, and what each task counts in the loss."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trainer.shared.run.errors import ConfigError
from trainer.shared.run.resolved import ResolvedTrainConfig
from trainer.shared.run.tuning import PROMPTS

Rows = NDArray[np.int64]


def with_task(rows: Rows, first: int, config: ResolvedTrainConfig) -> Rows:
    """Returns ``rows`` [count, s + 1], of which sample ``first`` is the first, behind the places of virtual tokens, where tokens name the
    task of each row: that which stands before it (``data.task``), or else tasks take turns."""
    tune, named = config.tune, config.data.task is not None
    text = rows[:, 1:] if named else rows
    if tune.method not in PROMPTS:
        return text
    tasks = rows[:, :1] if named else ~(np.arange(first, first + len(rows), dtype=np.int64)[:, None] % tune.tasks)
    if (most := int((~tasks).max(initial=0))) >= tune.tasks:
        raise ConfigError(f"tune.tasks={tune.tasks}, but field '{config.data.task}' of an example is {most}; raise tune.tasks")
    return np.concatenate([np.repeat(tasks, tune.virtual_tokens, axis=1), text], axis=1)


def task_shares(rows: Rows) -> tuple[NDArray[np.float64], int]:
    """Returns what a target of each row of a global batch counts, so that the loss of each task is the mean over its own targets, as if it
    was tuned alone; and how many tasks there are."""
    tasks, targets = ~rows[:, 0], (rows[:, 1:] >= 0).sum(1)
    counts = np.bincount(tasks, targets)
    return targets.sum() / counts[tasks], int((counts > 0).sum())
