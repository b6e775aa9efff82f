"""The folder of checkpoints: whole or not there, kept to a number, closed to attempts that are over."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.checkpoint.worlds import FACTS
from trainer.checkpoint.folder import Folder
from trainer.checkpoint.shards import write_rank
from trainer.launch.failure import classify
from trainer.shared.records.artifacts import newest_checkpoint
from trainer.shared.records.manifest import CheckpointError, read_manifest
from trainer.shared.records.outcome import Reason
from trainer.shared.run.errors import ConfigError

pytestmark = pytest.mark.slow  # imports torch


def entered(root: Path, attempt: int = 0, run: str = "a run") -> Folder:
    folder = Folder(root, run, attempt, token=f"start{attempt}")
    folder.enter()
    return folder


def save(folder: Folder, step: int, ranks: int = 1) -> None:
    for rank in range(ranks):
        write_rank(folder.workspace(step), rank, [])
    folder.commit(step, ranks, FACTS, timeout_s=5)


def steps(folder: Folder) -> list[int]:
    return [found.step for found in folder.found()]


def test_a_checkpoint_is_seen_only_when_every_rank_has_written(tmp_path: Path) -> None:
    folder = entered(tmp_path)
    write_rank(folder.workspace(1), 0, [])
    with pytest.raises(CheckpointError, match=r"rank 1 did not write its part within 0.1 s") as raised:
        folder.commit(1, 2, FACTS, timeout_s=0.1)
    assert classify(raised.value).reason is Reason.COMMUNICATION, "another attempt may have better luck"
    assert steps(folder) == []
    write_rank(folder.workspace(1), 1, [])
    folder.commit(1, 2, FACTS, timeout_s=5)
    assert steps(folder) == [1]
    assert sorted(p.name for p in folder.found()[0].path.iterdir()) == ["manifest.json", "rank-00000.bin", "rank-00001.bin"]


def test_the_newest_comes_first_and_the_later_start_counts(tmp_path: Path) -> None:
    save(entered(tmp_path, 0), 5)
    save(entered(tmp_path, 0), 12)
    save(entered(tmp_path, 1), 12)
    assert [(f.step, f.start) for f in entered(tmp_path, 1).found()] == [(12, 2), (12, 1), (5, 0)]


def test_a_start_saves_the_step_of_a_checkpoint_that_was_copied_without_its_hidden_claim(tmp_path: Path) -> None:
    """``cp -r old/* new/`` leaves out names that begin with a dot. The copy is damaged, so the run comes to its step again."""
    save(entered(tmp_path / "old"), 5)
    shutil.copytree(tmp_path / "old", tmp_path / "new", ignore=shutil.ignore_patterns(".*"))
    (tmp_path / "new" / "step-00000005-start-0" / "rank-00000.bin").unlink()
    save(entered(tmp_path / "new"), 5)
    assert newest_checkpoint(tmp_path / "new") == tmp_path / "new" / "step-00000005-start-1"


def test_a_start_from_scratch_in_a_used_folder_is_newer_for_all_who_ask(tmp_path: Path) -> None:
    save(entered(tmp_path), 20)
    for _ in range(9):
        entered(tmp_path)
    assert newest_checkpoint(tmp_path) == tmp_path / "step-00000020-start-0"
    folder = entered(tmp_path)
    for step in (2, 4):
        save(folder, step)
        folder.keep(2)
        assert newest_checkpoint(tmp_path) == folder.found()[0].path == tmp_path / f"step-{step:08d}-start-10"
    assert steps(folder) == [4, 2]
    save(entered(tmp_path), 4)
    assert newest_checkpoint(tmp_path) == tmp_path / "step-00000004-start-11"


def test_only_the_newest_are_kept_and_removal_leaves_nothing_behind(tmp_path: Path) -> None:
    folder = entered(tmp_path)
    for step in (1, 2, 3, 10):
        save(folder, step)
    folder.keep(2)
    assert steps(folder) == [10, 3]
    assert sorted(p.name for p in tmp_path.iterdir()) == [".start-0", "step-00000003-start-0", "step-00000010-start-0"]


def test_an_attempt_that_is_over_neither_commits_nor_removes(tmp_path: Path) -> None:
    old = entered(tmp_path, 0)
    save(old, 1)
    write_rank(old.workspace(9), 0, [])
    new = entered(tmp_path, 1)
    save(new, 2)
    write_rank(old.workspace(9), 0, [])
    with pytest.raises(CheckpointError, match="attempt 1 has taken over from attempt 0; step 9 is not saved"):
        old.commit(9, 1, FACTS, timeout_s=5)
    with pytest.raises(CheckpointError, match="nothing more is removed"):
        old.keep(1)
    assert steps(new) == [2, 1]


def test_an_older_attempt_cannot_start_after_a_newer_one(tmp_path: Path) -> None:
    entered(tmp_path, 3)
    with pytest.raises(
        ConfigError, match=r"attempt 3 of this run has started .*, so attempt 1 may not; .*python -m trainer CONFIG --attempt 4"
    ):
        entered(tmp_path, 1)
    entered(tmp_path, 4)


@pytest.mark.parametrize("attempt", [0, 1, 2])
def test_another_run_continues_whatever_its_attempt_and_shuts_the_first_one_out(tmp_path: Path, attempt: int) -> None:
    first = entered(tmp_path, 1)
    save(first, 5)
    write_rank(first.workspace(6), 0, [])
    other = entered(tmp_path, attempt, run="another layout")
    assert steps(other) == [5]
    write_rank(first.workspace(6), 0, [])
    with pytest.raises(CheckpointError, match="another run has taken over from attempt 1; step 6 is not saved"):
        first.commit(6, 1, FACTS, timeout_s=5)
    save(other, 6)
    assert steps(other) == [6, 5]


def test_what_a_killed_attempt_was_writing_is_cleared(tmp_path: Path) -> None:
    write_rank(entered(tmp_path).workspace(4), 1, [])
    Folder(tmp_path, "a run", 0, token="another start").enter()
    assert not list(tmp_path.glob(".writing-*"))


def test_two_starts_of_one_attempt_never_mix_their_files(tmp_path: Path) -> None:
    old, new = entered(tmp_path), Folder(tmp_path, "a run", 0, token="another start")
    new.enter()
    write_rank(new.workspace(4), 0, [])
    write_rank(old.workspace(4), 1, [])
    with pytest.raises(CheckpointError, match="rank 1 did not write"):
        new.commit(4, 2, FACTS, timeout_s=0.1)


def test_a_step_that_is_saved_again_counts_whole(tmp_path: Path) -> None:
    save(entered(tmp_path), 4, ranks=2)
    folder = Folder(tmp_path, "a run", 0, token="another start")
    folder.enter()
    save(folder, 4, ranks=1)
    assert list(read_manifest(folder.found()[0])["files"]) == ["rank-00000.bin"]


def test_a_folder_that_cannot_be_written_is_refused_plainly(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run.checkpoint.dir=.*/file cannot be written"):
        entered(tmp_path / "file")


def test_a_manifest_that_is_missing_torn_or_of_another_version_is_named(tmp_path: Path) -> None:
    folder = entered(tmp_path)
    save(folder, 1)
    (found,) = folder.found()
    manifest = found.path / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": 77}))
    with pytest.raises(CheckpointError, match="has format 77; this version reads format 2"):
        read_manifest(found)
    manifest.write_text('{"format": 2')
    with pytest.raises(CheckpointError, match=r"manifest.json cannot be read"):
        read_manifest(found)
    manifest.unlink()
    with pytest.raises(CheckpointError, match=r"has no manifest.json"):
        read_manifest(found)
