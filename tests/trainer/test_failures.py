"""A run that goes wrong ends in bounded time and says why in plain words."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.farm import Farm
from tests.small_runs import small


def test_states_above_the_memory_budget_end_the_run_as_out_of_memory(farm: Farm) -> None:
    run = farm.train(small(run={"memory_gb": 1e-4}), 1)
    assert run.codes == {0: 1}
    assert run.result["status"] == "failed"
    assert run.result["reason"] == "out of memory"
    assert "run.memory_gb=0.0001" in run.result["message"]


@pytest.mark.parametrize(("missing", "what"), [(1, "weights, gradients and optimizer states need "), (0, "activations need more than")])
def test_states_are_counted_to_the_byte_before_they_are_allocated(farm: Farm, missing: int, what: str) -> None:
    """With gradients whole on each rank nothing but the states themselves is in use."""
    layout = {"data": 2, "sharding": {"params": 1, "grads": 1, "optimizer": 2}}
    memory = farm.train(small(precision="bf16", **layout), 2).checked().result["memory"]
    states = sum(memory.values()) - memory["activations"]
    run = farm.train(small(precision="bf16", run={"memory_gb": (states - missing) / 1e9}, **layout), 2)
    assert run.result["reason"] == "out of memory" and what in run.result["message"]


def test_activations_above_the_memory_budget_end_the_run_as_out_of_memory(farm: Farm) -> None:
    states = farm.train(small(), 1).result
    budget = states["peak_memory_bytes"] - states["memory"]["activations"] // 2
    run = farm.train(small(run={"memory_gb": budget / 1e9}), 1)
    assert run.result["reason"] == "out of memory"
    assert "activations" in run.result["message"]


@pytest.mark.parametrize(("model", "message"), [
    ({"vocab": 10**9, "hidden": 128}, "weights, gradients and optimizer states of the ranks on "),
    ({"hidden": 10**6, "ffn": 10**6}, "weights, gradients and optimizer states of the ranks on "),
    ({"family": "llama", "hidden": 4, "heads": 1, "attention": "unfused", "seq": 10**6}, "the host does not grant 8e+03 GB more at once"),
])  # fmt: skip
def test_a_model_that_no_host_holds_is_out_of_host_memory_in_plain_words(farm: Farm, model: dict[str, object], message: str) -> None:
    """The first two by their states, before anything is allocated; the last one by its attention."""
    run = farm.train(small(model=model, data=2), 2)
    assert set(run.codes.values()) == {1}
    assert run.result["reason"] == "host memory"
    assert message in run.result["message"]


def test_enough_memory_is_enough(farm: Farm) -> None:
    needed = farm.train(small(), 1).result["peak_memory_bytes"]
    assert farm.train(small(run={"memory_gb": needed / 1e9}), 1).result["status"] == "done"


def test_one_rank_out_of_memory_is_the_reason_of_the_whole_run(farm: Farm) -> None:
    """The last stage holds the logits; the first would report a broken receive."""
    layout = {"pipeline": 2, "micro_batch": 4}
    wide = {"vocab": 2001, "tied": False}
    needed = farm.train(small(model=wide, **layout), 2).result["peak_memory_bytes"]
    run = farm.train(small(model=wide, run={"memory_gb": needed * 0.9e-9}, **layout), 2)
    assert 0 not in run.codes.values()
    assert run.result["reason"] == "out of memory"


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_rank(farm: Farm) -> None:
    run = farm.train(small(steps=6, precision="fp32", optimizer={"lr": 1e30, "warmup_steps": 0, "clip": 0.0}), 1)
    assert run.codes == {0: 1}
    assert run.result["reason"] == "numerics"
    assert "on rank 0 is not finite" in run.result["message"]


def test_a_step_that_is_not_finite_can_be_skipped(farm: Farm) -> None:
    """The second step spoils the weights; all later ones are skipped, and say so."""
    run = farm.train(
        small(steps=4, precision="fp32", run={"on_nonfinite": "skip"}, optimizer={"lr": 1e30, "warmup_steps": 0, "clip": 0.0}, data=2), 2
    ).checked()
    assert run.result["status"] == "done"
    assert run.result["losses"][0] > 0 and run.result["losses"][1:] == [None] * 3
    assert "warning: step 2: the output of blocks.0.attention_norm on rank 0 is not finite; the step is skipped" in run.logs


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_a_run_whose_every_step_was_skipped_has_failed(farm: Farm, precision: str) -> None:
    """Initial weights that overflow, at any loss scale."""
    run = farm.train(small(precision=precision, model={"init_std": 1e30}, run={"on_nonfinite": "skip"}, data=2), 2)
    assert set(run.codes.values()) == {1}
    assert (run.result["status"], run.result["reason"]) == ("failed", "numerics")
    assert "none of the 3 steps changed the weights" in run.result["message"]


def test_a_rank_that_never_comes_ends_the_others(farm: Farm) -> None:
    out = farm.folder()
    path = out / "config.yaml"
    farm.write(path, small(data=2, run={"timeout_s": 2.0}))
    run = farm.wait(farm.start(path, 2, out, only=[1]))
    assert run.codes == {1: 1}
    failure = run.failure(1)
    assert failure["reason"] == "communication" and failure["collective"] == "rendezvous"
    assert failure["message"].startswith("rank 1 cannot meet the others at 127.0.0.1:")


def test_a_killed_rank_ends_its_peers_soon_and_they_name_the_collective(farm: Farm) -> None:
    out = farm.folder()
    path = out / "config.yaml"
    farm.write(path, small(steps=100000, data=2, run={"timeout_s": 3000.0}))  # soon: long before a collective may take no longer
    started = farm.start(path, 2, out)
    wait_for_steps(out, 2)
    os.kill(started["pids"][1], signal.SIGKILL)
    run = farm.wait(started)
    assert run.codes == {0: 1, 1: -9}
    failure = run.failure(0)
    assert failure["reason"] == "communication"
    assert failure["collective"].split(" over ")[1] in ("data replicas", "world")
    assert "rank 0" in failure["message"]


def test_a_rank_that_hangs_ends_the_run_after_the_timeout(farm: Farm) -> None:
    out = farm.folder()
    path = out / "config.yaml"
    farm.write(path, small(steps=100000, data=2, run={"timeout_s": 6.0}))
    started = farm.start(path, 2, out)
    wait_for_steps(out, 2)
    os.kill(started["pids"][1], signal.SIGSTOP)
    run = farm.wait(started)
    assert run.codes == {0: 1, 1: -9}
    assert run.failure(0)["reason"] == "communication"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_a_signal_stops_all_ranks_after_the_same_step(farm: Farm, number: int) -> None:
    out = farm.folder()
    path = out / "config.yaml"
    farm.write(path, small(steps=100000, data=2))
    started = farm.start(path, 2, out)
    wait_for_steps(out, 2)
    os.kill(started["pids"][1], number)
    run = farm.wait(started)
    assert run.codes == {0: 75, 1: 75}
    assert run.result["status"] == "stopped"
    assert len(run.result["losses"]) == len((out / "metrics.jsonl").read_text().splitlines())


def test_a_wrong_configuration_is_one_line_and_exit_code_2(farm: Farm) -> None:
    run = farm.train(small(tensor=3), 3)
    assert set(run.codes.values()) == {2}
    assert "error: layout.tensor=3 does not divide model.heads=4; use 1, 2 or 4" in run.logs
    assert "Traceback" not in run.logs
    assert run.result["reason"] == "configuration"


def wait_for_steps(out: Path, steps: int) -> None:
    path = out / "metrics.jsonl"
    deadline = time.monotonic() + 300
    while not path.exists() or len(path.read_text().splitlines()) < steps:
        assert time.monotonic() < deadline, "the run does not start"
        time.sleep(0.05)
