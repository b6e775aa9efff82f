"""What ranks of one layout wrote, ranks of any other layout read back bit for bit."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.checkpoint.worlds import FACTS, SHAPES, World, assert_holds, global_state, owned_by
from trainer.checkpoint.folder import Folder
from trainer.checkpoint.pieces import whole
from trainer.checkpoint.shards import Reader, piece_of, snapshot, write_rank
from trainer.shared.parallel.shards import Factors
from trainer.shared.records.manifest import STATES, CheckpointError, FoundCheckpoint, read_manifest

pytestmark = pytest.mark.slow

worlds = st.builds(
    World,
    tensor=st.sampled_from([1, 2, 4]),
    factors=st.tuples(*(st.integers(1, 2) for _ in range(4))).map(lambda r: Factors(*itertools.accumulate(r, int.__mul__))),
    capacity=st.integers(1, 300),
)


def saved(root: Path, world: World, seed: int = 3) -> FoundCheckpoint:
    """A checkpoint that all ranks of ``world`` wrote."""
    folder, values = Folder(root, "a run", attempt=0, token="t"), global_state(seed)
    folder.enter()
    for rank, (tensor, data) in enumerate(world.ranks):
        write_rank(folder.workspace(1), rank, snapshot(owned_by(world, tensor, data, values)))
    folder.commit(1, len(world.ranks), FACTS, timeout_s=5)
    (found,) = folder.found()
    return found


@settings(max_examples=60, deadline=None)
@given(worlds, worlds, st.integers(0, 9))
def test_any_layout_reads_what_any_other_wrote(before: World, after: World, seed: int) -> None:
    with tempfile.TemporaryDirectory() as root:
        found = saved(Path(root), before, seed)
        reader = Reader(found.path, read_manifest(found))
        for tensor, data in after.ranks:
            owned = owned_by(after, tensor, data, None)
            for o in owned:
                piece = piece_of(o)
                reader.read(piece, {state: getattr(o, state)[: piece.numel] for state in STATES})
            assert_holds(owned, global_state(seed))


@settings(max_examples=30, deadline=None)
@given(worlds)
def test_every_element_is_stored_exactly_once(world: World) -> None:
    with tempfile.TemporaryDirectory() as root:
        manifest = read_manifest(saved(Path(root), world))
        for name, shape in SHAPES.items():
            assert sum(p["numel"] for p in manifest["pieces"] if p["name"] == name) == whole(name, shape).numel
        assert sum(manifest["files"].values()) == len(STATES) * 4 * sum(whole(n, s).numel for n, s in SHAPES.items())


@pytest.fixture
def found(tmp_path: Path) -> FoundCheckpoint:
    return saved(tmp_path, World(2, Factors(1, 1, 2, 2), 100))


def read_all(found: FoundCheckpoint) -> dict[str, torch.Tensor]:
    reader = Reader(found.path, read_manifest(found))
    result = {name: torch.empty(whole(name, shape).numel) for name, shape in SHAPES.items()}
    for name, shape in SHAPES.items():
        reader.read(whole(name, shape), {"weight": result[name]})
    return result


def test_whole_parameters_are_read_for_export(found: FoundCheckpoint) -> None:
    for name, value in read_all(found).items():
        assert torch.equal(value, global_state(3)["weight"][name].flatten())


def test_a_missing_shard_is_named(found: FoundCheckpoint) -> None:
    (found.path / "rank-00002.bin").unlink()
    with pytest.raises(CheckpointError, match=r"rank-00002.bin is missing"):
        read_all(found)


def test_a_shard_that_is_cut_short_is_named_with_both_sizes(found: FoundCheckpoint) -> None:
    path = found.path / "rank-00001.bin"
    content = path.read_bytes()
    path.write_bytes(content[:-4])
    with pytest.raises(CheckpointError, match=rf"rank-00001.bin has {len(content) - 4} bytes, but {len(content)} were written"):
        read_all(found)


def test_a_flipped_bit_fails_its_checksum(found: FoundCheckpoint) -> None:
    path = found.path / "rank-00000.bin"
    content = bytearray(path.read_bytes())
    content[5] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"rank-00000.bin is damaged \(weight of \w+ fails its checksum\)"):
        read_all(found)


def test_a_parameter_that_is_not_there_or_has_another_shape_is_named(found: FoundCheckpoint) -> None:
    reader = Reader(found.path, read_manifest(found))
    with pytest.raises(CheckpointError, match="parameter nothing is not there"):
        reader.read(whole("nothing", (2,)), {"weight": torch.empty(2)})
    with pytest.raises(CheckpointError, match=r"parameter norm has shape \[4\]; this model needs it with shape \[5\]"):
        reader.read(whole("norm", (5,)), {"weight": torch.empty(5)})


def test_a_parameter_with_a_hole_is_not_whole(found: FoundCheckpoint) -> None:
    manifest = read_manifest(found)
    manifest["pieces"] = [p for p in manifest["pieces"] if p["name"] != "qkv" or p["region"][0][0] == 0]
    reader = Reader(found.path, manifest)
    with pytest.raises(CheckpointError, match=r"weight of qkv is incomplete \(\d+ of 96 elements\)"):
        reader.read(whole("qkv", SHAPES["qkv"]), {"weight": torch.empty(96)})


def test_state_that_was_not_saved_is_read_as_zero(found: FoundCheckpoint) -> None:
    manifest = read_manifest(found)
    for piece in manifest["pieces"]:
        del piece["crc32"]["exp_avg"], piece["crc32"]["exp_avg_sq"]
    moments = torch.ones(4)
    Reader(found.path, manifest).read(whole("norm", (4,)), {"exp_avg": moments})
    assert moments.tolist() == [0, 0, 0, 0]
