"""Optimizer states in host memory: the same training, fewer bytes on the device, and every byte that is copied counted."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.farm import Farm
from tests.numerics.matrix import train_all
from tests.small_runs import small
from trainer.checkpoint.folder import Folder
from trainer.checkpoint.pieces import whole
from trainer.checkpoint.shards import Reader
from trainer.comm.clock import Clock
from trainer.comm.collectives import Ledger, World
from trainer.data import open_dataset
from trainer.launch.rank_env import RankEnv
from trainer.shared.parallel.shards import ALIGNMENT, on_host
from trainer.shared.records.manifest import STATES, read_manifest
from trainer.shared.records.outcome import Reason
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.read import from_dict
from trainer.shared.run.rules import resolve
from trainer.shared.run.schema import PRECISIONS, TrainConfig
from trainer.state.host import HostMemory
from trainer.step import Engine

STEPS = 3
SHARES = (0.0, 0.3, 1.0)
MODEL = {"layers": 2, "vocab": 61}
CPU = torch.device("cpu")


def run_of(
    share: float, precision: str = "bf16", sharding: dict[str, int] | None = None, run: dict[str, Any] | None = None, **layout: Any
) -> dict[str, Any]:
    return small(STEPS, precision, MODEL, run, {"clip": 0.5}, sharding=(sharding or {}) | {"offload": share}, **layout)


def engine_of(config: dict[str, Any]) -> Engine:
    resolved = resolve(from_dict(TrainConfig, config), 1)
    dataset = open_dataset(resolved.data, resolved.model, resolved.run.seed)
    return Engine(resolved, World(0, 1, CPU, "", 0, 1.0), dataset)


def saved(folder: Path, step: int = 4) -> dict[tuple[str, str], torch.Tensor]:
    """Weights and moments after ``step`` steps, whole."""
    found = next(found for found in Folder(folder, "", 0, "").found() if found.step == step)
    reader = Reader(found.path, read_manifest(found))
    states = {(name, kind): torch.empty(whole(name, shape).numel) for name, shape in reader.shapes.items() for kind in STATES}
    for (name, kind), state in states.items():
        reader.read(whole(name, reader.shapes[name]), {kind: state})
    return states


MORE = pytest.mark.campaign("layouts")


@pytest.mark.parametrize(
    ("layout", "precisions"),
    [
        pytest.param({}, PRECISIONS, id="alone"),
        pytest.param({"tensor": 2, "sequence_parallel": True}, ("bf16",), id="gradients summed once more"),
        pytest.param({"data": 2, "sharding": {"params": 2, "grads": 2, "optimizer": 2}}, ("bf16", "fp16"), id="zero-3", marks=MORE),
        pytest.param(
            {"data": 2, "sharding": {"optimizer": 2}, "run": {"moments": "bf16", "bucket_mb": 25.0}},
            ("bf16", "fp8"),
            id="zero-1",
            marks=MORE,
        ),
        pytest.param({"pipeline": 2}, ("fp32", "bf16"), id="tied stages", marks=MORE),
    ],
)
def test_losses_norms_and_parameters_have_the_bits_of_no_offload(farm: Farm, layout: dict[str, Any], precisions: tuple[str, ...]) -> None:
    configs = [run_of(share, precision, **layout) for precision in precisions for share in SHARES]
    found = train_all(farm, 2 if layout else 1, configs)
    for number, precision in enumerate(precisions):
        none, *others = found[number * len(SHARES) : (number + 1) * len(SHARES)]
        for share, other in zip(SHARES[1:], others, strict=True):
            differ = [name for name, value in none.items() if not torch.equal(other[name], value)]
            assert not differ, f"{precision}, share {share}: {differ}"


def test_the_device_keeps_less_by_the_share_and_what_fits_so_trains(farm: Farm) -> None:
    """12 bytes a parameter in mixed precision: master weight and moments. Gradients go down in 4 bytes, weights come up in 2."""
    results = [farm.train(run_of(share), 1).checked().result for share in SHARES]
    states, elements = [result["memory"]["optimizer"] for result in results], results[0]["memory"]["optimizer"] // 12
    assert states[2] == 0 and states[1] == pytest.approx(0.7 * states[0], rel=0.01)
    for kept, result in zip(states[1:], results[1:], strict=True):
        assert result["memory"]["weights"] == results[0]["memory"]["weights"]
        there = elements - kept // 12
        down, up = (result["communication"][f"copy_{way} over host memory"]["payload_bytes"] for way in ("down", "up"))
        assert (down, up) == (4 * there * len(result["losses"]), 2 * there * len(result["losses"]))
    room = {"memory_gb": (results[2]["peak_memory_bytes"] + 4 * elements) / 1e9}
    without = farm.train(run_of(0.0, run=room), 1)
    assert without.failure(0)["reason"] == Reason.OUT_OF_MEMORY.value
    assert farm.train(run_of(1.0, run=room), 1).checked().result["losses"] == results[0]["losses"]


def test_a_checkpoint_continues_under_any_share_and_in_files(farm: Farm, tmp_path: Path) -> None:
    """To the bit: a run in two parts has the losses of one, and leaves the same parameters and moments."""

    def part(steps: int, folder: Path, share: float, **run: Any) -> list[float]:
        saves = {"checkpoint": {"every": 2, "dir": str(folder)}} | run
        config = run_of(share, "fp16", {"optimizer": 2}, saves, data=2)
        config["run"] |= {"steps": steps, "warmup_steps": 0}
        config["optimizer"]["decay_steps"] = 4
        return list(farm.train(config, 2).checked().result["losses"])

    files = {"offload_path": str(tmp_path / "states")}
    expected = part(4, tmp_path / "whole", 0.0)
    part(2, tmp_path / "cut", 0.3)
    for number, (share, run) in enumerate([(1.0, {}), (0.0, {}), (0.6, files)]):
        copy = tmp_path / f"again{number}"
        shutil.copytree(tmp_path / "cut", copy)
        assert part(4, copy, share, **run)[-2:] == expected[-2:]
        ours, theirs = (saved(root) for root in (copy, tmp_path / "whole"))
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], value) for name, value in theirs.items())
    assert not list((tmp_path / "states").iterdir()), "a file of a process that has ended"


def waited_late(env: RankEnv, folder: Path) -> None:
    """A reduce-scatter that another thread waits for after its result was changed here."""
    world = World(env.rank, env.world_size, CPU, env.address, env.port, 60.0)
    piece = torch.empty(1)
    pending = world.make_group("data", [0, 1]).reduce_scatter(piece, torch.ones(2))
    work = pending.work
    pending.wait()
    piece += 40
    late = threading.Thread(target=work.wait)
    late.start()
    late.join()
    (folder / f"{env.rank}.txt").write_text(str(piece.item()))
    world.close()


def test_a_thread_that_waits_late_for_a_gradient_leaves_what_was_added_to_it(farm: Farm) -> None:
    folder = farm.call(waited_late, 2).directory
    assert [(folder / f"{rank}.txt").read_text() for rank in range(2)] == ["42.0", "42.0"]


def test_a_skipped_step_changes_nothing_on_the_host() -> None:
    engine = engine_of(run_of(0.5))
    engine.step(0)
    engine.rank.state.settle()
    before = [[state.clone() for state in piece.states.values()] for piece in engine.trained]
    engine.optimizer.step(0.1, torch.full((1,), torch.nan, dtype=torch.float64), torch.ones(()))
    engine.rank.state.publish_updates()
    engine.rank.state.settle()
    after = [[*piece.states.values()] for piece in engine.trained]
    assert any(piece.host for piece in engine.trained) and any(not piece.host for piece in engine.trained)
    assert all(torch.equal(a, b) for one, other in zip(before, after) for a, b in zip(one, other))


@given(st.integers(0, 1 << 30), st.floats(0, 1))
def test_a_shard_is_cut_at_whole_lines_within_half_a_line_of_the_share(lines: int, share: float) -> None:
    numel = lines * ALIGNMENT
    there = on_host(numel, share)
    assert there % ALIGNMENT == 0 and 0 <= there <= numel and abs(there - share * numel) <= ALIGNMENT / 2 + 1e-6 * numel
    assert on_host(numel, 0.0) == 0 and on_host(numel, 1.0) == numel


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("files", [False, True])
def test_bytes_on_the_host_are_known_before_they_are_taken(tmp_path: Path, precision: str, files: bool) -> None:
    engine = engine_of(run_of(0.7, precision, run={"offload_path": str(tmp_path)} if files else {}))
    state = engine.rank.state
    assert state.planned_bytes == sum(sum(bucket.nbytes.values()) for bucket in state.buckets)
    memory: set[tuple[int, int]] = set()
    file: set[tuple[int, int]] = set()
    for host in (bucket.host for bucket in state.buckets if bucket.host is not None):
        states, copied = (host.weight, host.exp_avg, host.exp_avg_sq), (host.gradient, host.outgoing)
        (file if files else memory).update((x.data_ptr(), x.nbytes) for x in states)
        memory.update((x.data_ptr(), x.nbytes) for x in copied)
    known = state.planned_host
    for found, planned in ((memory, known.memory), (file, known.file)):
        assert sum(nbytes for _, nbytes in found) <= planned < sum(-(-nbytes // 4096) * 4096 + 1 for _, nbytes in found) + 1


def test_a_folder_that_cannot_hold_the_states_ends_the_run_with_one_line(farm: Farm, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ended = farm.train(run_of(1.0, run={"offload_path": str(tmp_path / "file")}, data=2), 2)
    assert set(ended.codes.values()) != {0}
    for rank in range(2):
        assert ended.failure(rank)["message"].count("\n") == 0
        assert "run.offload_path=" in ended.failure(rank)["message"] and "lower layout.sharding.offload" in ended.failure(rank)["message"]
    memory = HostMemory(1.0, CPU, Ledger(Clock(CPU)), str(tmp_path))
    with pytest.raises(ConfigError, match=r"cannot hold 1\.13e\+06 GB"):
        memory.reserve(1 << 50)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layout": {"sharding": {"offload": 0.5}}, "optimizer": {"kind": "muon"}}, "layout.sharding.offload=0.5 moves states of AdamW"),
        ({"run": {"offload_path": "/x"}}, "run.offload_path=/x is for states of layout.sharding.offload, which is 0"),
        ({"layout": {"sharding": {"offload": 1.5}}}, "layout.sharding.offload=1.5"),
    ],
)
def test_what_has_no_meaning_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace(".", r"\.")):
        resolve(from_dict(TrainConfig, changes), 1)
