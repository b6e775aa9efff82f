"""Saving goes on beside training: it sees the state as it was, and what goes wrong is said, not lost."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from tests.checkpoint.worlds import World, assert_holds, global_state, owned_by
from tests.farm import Farm
from tests.small_runs import small
from trainer.checkpoint import CheckpointError, Checkpoints, DataOrder
from trainer.checkpoint.folder import Folder
from trainer.checkpoint.shards import write_rank
from trainer.comm import collectives
from trainer.launch.failure import classify
from trainer.shared.parallel.shards import Factors
from trainer.shared.records.outcome import Reason
from trainer.shared.run.derived import resolve_model
from trainer.shared.run.schema import CheckpointConfig, ModelConfig

pytestmark = pytest.mark.slow

ALONE = World(1, Factors(1, 1, 1, 1), 100)
MODEL = resolve_model(ModelConfig())
DATA = DataOrder(1234, "synthetic", 8, MODEL.seq)
EXTRA = {"samples": 8, "updates": 1}


def checkpoints(root: Path) -> Checkpoints:
    one = collectives.World(0, 1, torch.device("cpu"), "", 0, timeout_s=5)
    return Checkpoints(CheckpointConfig(every=1, keep=2), root, one.group, MODEL, DATA, "a run", attempt=0, timeout_s=5)


def test_what_is_saved_is_the_state_at_the_moment_of_saving(tmp_path: Path) -> None:
    run, state = checkpoints(tmp_path), owned_by(ALONE, 0, 0, global_state(1))
    run.save(1, state, EXTRA)
    for owned in state:
        owned.weight.add_(1.0)
        owned.exp_avg.zero_()
    run.finish()
    fresh = owned_by(ALONE, 0, 0, None)
    resumed = run.resume(fresh)
    assert resumed is not None and (resumed.step, resumed.extra) == (1, EXTRA)
    assert_holds(fresh, global_state(1))


def test_training_state_does_not_change_type_by_being_saved(tmp_path: Path) -> None:
    """An fp64 run reads what an fp32 run saved, and the other way round to rounding."""
    run = checkpoints(tmp_path)
    run.save(1, owned_by(ALONE, 0, 0, global_state(1)), EXTRA)
    run.finish()
    wide = owned_by(ALONE, 0, 0, None, dtype=torch.float64)
    run.resume(wide)
    assert all(owned.weight.dtype == torch.float64 for owned in wide)
    assert_holds(wide, {state: {name: value.double() for name, value in named.items()} for state, named in global_state(1).items()})


@pytest.mark.parametrize("next_call", ["finish", "save"])
def test_a_save_that_fails_is_raised_by_the_next_call_with_the_reason(tmp_path: Path, next_call: str) -> None:
    run, state = checkpoints(tmp_path / "c"), owned_by(ALONE, 0, 0, global_state(1))
    shutil.rmtree(tmp_path / "c")
    (tmp_path / "c").write_text("in the way")
    run.save(7, state, EXTRA)
    with pytest.raises(CheckpointError, match=r"cannot write the checkpoint of step 7 to .*/c: Not a directory") as raised:
        run.finish() if next_call == "finish" else run.save(8, state, EXTRA)
    assert classify(raised.value).reason is Reason.CONFIGURATION
    run.finish()


def test_a_folder_that_cannot_be_written_to_any_more_ends_the_run_as_wrong_configuration(farm: Farm, tmp_path: Path) -> None:
    folder, out = tmp_path / "c", farm.folder()
    (tmp_path / "disk").mkdir()
    folder.symlink_to(tmp_path / "disk")
    farm.write(out / "config.yaml", small(steps=100_000, data=2, run={"checkpoint": {"dir": str(folder), "every": 1, "keep": 1}}))
    started = farm.start(out / "config.yaml", 2, out)
    while not list(folder.glob("step-*")):
        assert not (out / "result.json").exists()
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "file").replace(folder)  # in one step: there is no moment without anything at that path
    run = farm.wait(started)
    assert run.codes[0] == 1 and run.result["reason"] == "configuration"
    assert "cannot write the checkpoint of step" in run.result["message"] and f"{folder}: Not a directory" in run.result["message"]


def test_a_rank_that_cannot_write_tells_rank_0_at_once(tmp_path: Path) -> None:
    folder = Folder(tmp_path, "a run", 0, "t")
    write_rank(folder.workspace(3), 0, [])
    folder.give_up(3, 1, CheckpointError("no space left"))
    with pytest.raises(CheckpointError, match="rank 1: no space left"):
        folder.commit(3, 2, {}, timeout_s=600)


def test_only_the_asked_number_is_kept_as_training_goes_on(tmp_path: Path) -> None:
    run, state = checkpoints(tmp_path), owned_by(ALONE, 0, 0, global_state(1))
    for step in (1, 2, 3, 4):
        run.save(step, state, EXTRA)
    run.finish()
    assert [found.step for found in run.folder.found()] == [4, 3]


def test_nothing_to_resume_from_is_a_run_from_the_start(tmp_path: Path) -> None:
    assert checkpoints(tmp_path / "new").resume(owned_by(ALONE, 0, 0, None)) is None
