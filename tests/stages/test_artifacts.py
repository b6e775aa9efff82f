"""An artifact is whole or absent, whatever happens to its folder; and the folders that Trireme made before are artifacts too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.prepare import prepare
from trainer.shared.records.artifacts import (
    MANIFEST,
    ArtifactKind,
    find_artifact,
    newest_checkpoint,
    read_artifact,
    write_artifact,
)
from trainer.shared.run.schema import DataConfig


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "deep").mkdir()
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "deep" / "b.bin").write_bytes(bytes(100))
    return tmp_path


def test_what_is_written_is_read_back(folder: Path) -> None:
    made = write_artifact(folder, ArtifactKind.TEXT, "0123456789ab", {"model": "ba9876543210"})
    assert read_artifact(folder) == made and made.files == {"a.txt": 3, "deep/b.bin": 100}


def test_a_folder_without_a_manifest_is_no_artifact(folder: Path) -> None:
    assert read_artifact(folder) is None and find_artifact(folder) is None and read_artifact(folder / "nothing") is None


@pytest.mark.parametrize("damage", ["a.txt", "deep/b.bin"])
def test_an_artifact_that_lost_a_file_or_a_part_of_one_is_absent(folder: Path, damage: str) -> None:
    write_artifact(folder, ArtifactKind.TEXT, "x")
    (folder / damage).write_bytes(b"1")
    assert read_artifact(folder) is None
    (folder / damage).unlink()
    assert read_artifact(folder) is None


@given(cut=st.integers(0, 10_000))
def test_a_torn_manifest_is_absent(cut: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("torn")
    (folder / "a").write_text("content")
    write_artifact(folder, ArtifactKind.METRICS, "x")
    text = (folder / MANIFEST).read_text().rstrip()
    (folder / MANIFEST).write_text(text[: cut % len(text)])
    assert read_artifact(folder) is None


@pytest.mark.parametrize("change", [{"kind": "song"}, {"format": 2}, {"files": None}, {"digest": 7}, {"inputs": []}])
def test_a_manifest_with_words_that_nobody_knows_is_absent(folder: Path, change: dict[str, object]) -> None:
    write_artifact(folder, ArtifactKind.TEXT, "x")
    (folder / MANIFEST).write_text(json.dumps(json.loads((folder / MANIFEST).read_text()) | change))
    assert read_artifact(folder) is None


def test_the_digest_is_that_of_names_and_contents_alone(folder: Path) -> None:
    first = write_artifact(folder, ArtifactKind.TEXT, "x").digest
    (folder / ".lock").write_text("hidden files are no content")
    assert write_artifact(folder, ArtifactKind.TEXT, "y", {"model": "z"}).digest == first
    (folder / "a.txt").write_text("two")
    changed = write_artifact(folder, ArtifactKind.TEXT, "x").digest
    (folder / "a.txt").rename(folder / "c.txt")
    assert len({first, changed, write_artifact(folder, ArtifactKind.TEXT, "x").digest}) == 3


def test_a_prepared_corpus_is_an_artifact_and_can_be_prepared_again(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("some words and some more\n" * 50)
    data = DataConfig(source=str(tmp_path / "text.txt"), path=str(tmp_path / "out"), vocab=300)
    prepare(data)
    made = read_artifact(tmp_path / "out")
    assert made is not None and made.kind is ArtifactKind.CORPUS and prepare(data).reused
    assert not prepare(data, force=True).reused and read_artifact(tmp_path / "out") == made
    (tmp_path / "out" / MANIFEST).unlink()  # as an earlier version made it
    found = find_artifact(tmp_path / "out")
    assert found is not None and found.kind is ArtifactKind.CORPUS and prepare(data).reused


def test_the_newest_checkpoint_is_found_wherever_it_is_named(tmp_path: Path) -> None:
    for step in (5, 20, 100):
        place = tmp_path / "checkpoints" / f"step-{step:08d}-start-0"
        place.mkdir(parents=True)
        (place / "manifest.json").write_text("{}")
    newest = tmp_path / "checkpoints" / "step-00000100-start-0"
    assert newest_checkpoint(tmp_path) == newest_checkpoint(tmp_path / "checkpoints") == newest_checkpoint(newest) == newest
    found = find_artifact(tmp_path)
    assert found is not None and found.kind is ArtifactKind.CHECKPOINT
