"""Tasks that are tuned at once are tuned as if each was alone: its own examples, targets, clipping and optimizer state."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tuning.examples import EXAMPLES
from tuning.test_tuned_layouts import engine_of

from launcher.cli.main import main
from tests.farm import Farm
from tests.numerics.matrix import train_all
from tests.small_runs import ranks, small
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.read import from_dict
from trainer.shared.run.rules import resolve
from trainer.shared.run.schema import TrainConfig

pytestmark = pytest.mark.slow

TASKS = [number % 3 == 0 for number in range(len(EXAMPLES))]
"""Of each example: task 1 has 4 of them, task 0 has 8."""


def run_of(examples: dict[str, Any], folder: Path, method: str, only: int | None = None, **layout: Any) -> dict[str, Any]:
    """Both tasks, or ``only`` the examples of one, of which a step takes as many as it takes of them among others."""
    source = folder / f"{only}.jsonl"
    lines = [example | {"task": int(task)} for example, task in zip(EXAMPLES, TASKS) if only in (None, task)]
    source.write_text("\n".join(map(json.dumps, lines)))
    tune = {"method": method, "tasks": 2, "virtual_tokens": 3, "encoder": 5}
    run = {"global_batch": 8 if only is None else 4}
    config = small(steps=6, model={"vocab": 300, "seq": 64}, run=run, optimizer={"lr": 0.05, "clip": 0.02}, **layout)
    return config | {"data": examples | {"source": str(source), "task": "task"}, "tune": tune}


@pytest.mark.parametrize(
    ("method", "layout"),
    [
        pytest.param(
            "prompt",
            {"tensor": 2, "sequence_parallel": True, "pipeline": 2, "schedule": "zero_bubble"},
            marks=pytest.mark.campaign("layouts"),
        ),
        ("p_tuning", {"data": 4, "sharding": {"params": 2, "grads": 2, "optimizer": 4}}),
    ],
    ids=["prompt", "p_tuning"],
)
def test_two_tasks_trained_at_once_equal_two_runs(
    farm: Farm, data: dict[str, Any], tmp_path: Path, method: str, layout: dict[str, Any]
) -> None:
    [found] = train_all(farm, ranks(layout), [run_of(data, tmp_path, method, **layout)])
    expected = train_all(farm, 1, [run_of(data, tmp_path, method, only=task) for task in range(2)])
    torch.testing.assert_close(found["losses"], (expected[0]["losses"] + expected[1]["losses"]) / 2, rtol=1e-10, atol=0)
    own = [name for name in found if name.startswith("embedding.prompts")]
    assert len(own) == (2 if method == "prompt" else 10)
    for name in own:
        task = int(name.split(".")[3])
        assert not torch.allclose(expected[1 - task][name], expected[task][name])
        torch.testing.assert_close(found[name], expected[task][name], rtol=0, atol=1e-10, msg=name)


def test_a_task_takes_its_own_examples_in_turn_and_each_once_in_its_own_epoch(data: dict[str, Any], tmp_path: Path) -> None:
    dataset = engine_of(**run_of(data, tmp_path, "prompt")).batches.dataset
    rows = dataset.batch(0, 16)
    assert (~rows[:, 0]).tolist() == [0, 1] * 8
    epochs = np.split(rows[1::2], 2)  # of task 1, which has four examples
    assert all(len({tuple(row) for row in epoch}) == 4 for epoch in (*epochs, rows[::2][:4], rows[::2][4:]))
    assert {tuple(row) for row in epochs[0]} == {tuple(row) for row in epochs[1]}


def refusal(config: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as error:
        engine_of(**config).step(0)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_tasks_that_cannot_be_told_apart_are_refused_in_one_line(data: dict[str, Any], tmp_path: Path) -> None:
    config = run_of(data, tmp_path, "prompt")
    assert "name the field that holds its number in data.task" in refusal(config | {"data": config["data"] | {"task": None}})
    assert "no number of a task in field 'answer'" in refusal(config | {"data": config["data"] | {"task": "answer"}})
    assert "tune.tasks=1, but field 'task' of an example is 1; raise tune.tasks" in refusal(config | {"tune": {"method": "prompt"}})
    with pytest.raises(ConfigError, match=r"^run\.global_batch=8 is not divisible by tune.tasks=3"):
        resolve(from_dict(TrainConfig, config | {"tune": config["tune"] | {"tasks": 3}}), 1)


@pytest.mark.parametrize(
    ("tasks", "held_out", "words"),
    [
        ([0, 1, 0, 2], 0.0, "tune.tasks=2, but field 'task' of an example is 2; raise tune.tasks"),
        ([0, 0, 1, 2], 0.25, "tune.tasks=2, but field 'task' of an example is 2; raise tune.tasks"),
        ([0, 0, 0, 0], 0.0, "tune.tasks=2, but no example that is trained on is of task 1 (field 'task'); add some"),
        ([0, 0, 0, 1], 0.25, "tune.tasks=2, but no example that is trained on is of task 1 (field 'task'); add some"),
        ([0, 1, 10**30, 1], 0.0, "line 3 has no number of a task in field 'task'"),
    ],
)
def test_a_task_without_virtual_tokens_or_examples_is_refused_before_a_rank_starts(
    data: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], tasks: list[int], held_out: float, words: str
) -> None:
    source = tmp_path / "tasks.jsonl"
    source.write_text("\n".join(json.dumps(EXAMPLES[0] | {"task": task}) for task in tasks))
    asked = {**data, "template": f"'{data['template']}'", "source": source, "task": "task", "held_out": held_out}
    tune = ["tune.method=prompt", "tune.tasks=2", "tune.virtual_tokens=2"]
    command = ["train", f"sweep.dir={tmp_path}/runs", "model.vocab=300", "cluster.gpus_per_node=1", *tune]
    assert main([*command, *(f"data.{key}={value}" for key, value in asked.items())]) == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith("error: ") and words in said and "\n" not in said and not (tmp_path / "runs").exists()
