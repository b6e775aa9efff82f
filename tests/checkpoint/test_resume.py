"""A run that is killed or stopped and started again, under the same or another layout, is the run that was not."""

from __future__ import annotations

import json
import math
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import small_runs
from tests.farm import Farm, Finished

sys.path.insert(0, str(Path(__file__).parent))  # the ranks import `doomed`

from trainer.checkpoint.folder import Folder
from trainer.checkpoint.pieces import whole
from trainer.checkpoint.shards import Reader
from trainer.convert import export_weights, import_weights
from trainer.data.prepare import prepare
from trainer.shared.corpora.index import read_index
from trainer.shared.records.manifest import STATES, read_manifest
from trainer.shared.run.schema import DataConfig

pytestmark = pytest.mark.slow

STEPS, HALF = 6, 3


def config(
    directory: Path, precision: str = "fp64", model: dict[str, Any] | None = None, every: int = HALF, kind: str = "adamw", **layout: Any
) -> dict[str, Any]:
    sharding = dict(zip(("params", "grads", "optimizer"), layout.pop("sharding", (1, 1, 1))))
    return {
        "model": {"layers": 2, "hidden": 32, "heads": 4, "vocab": 101, "seq": 16} | (model or {}),
        "layout": {"micro_batch": 4 // layout.get("data", 1), "sharding": sharding} | layout,  # two of them on any rank
        "data": {"kind": "synthetic"},
        "optimizer": {"kind": kind, "lr": 0.01, "warmup_steps": 3, "decay_steps": STEPS, "average_from": 3}
        | ({"muon": {"row_beta": 0.9}} if kind == "muon" else {}),
        "run": {
            "steps": STEPS,
            "precision": precision,
            "global_batch": 8,
            "bucket_mb": 0.01,
            "timeout_s": 30.0,
            "checkpoint": {"dir": str(directory), "every": every, "keep": 2},
        },
    }


def ranks(settings: dict[str, Any]) -> int:
    return small_runs.ranks(settings["layout"])


def train(farm: Farm, settings: dict[str, Any], attempt: int = 0, out: Path | None = None) -> Finished:
    return farm.train(settings, ranks(settings), out=out, attempt=attempt)


def doom(farm: Farm, function: str, settings: dict[str, Any], **arguments: Any) -> Finished:
    """Train with one of the ``doomed`` functions, until its end."""
    out = farm.folder()
    path = out / "call.json"
    path.write_text(json.dumps({"call": f"checkpoint.doomed:{function}", "arguments": {"config": settings, **arguments}}))
    return farm.wait(farm.start(path, ranks(settings), out))


def saved(directory: Path, step: int = STEPS) -> dict[str, torch.Tensor]:
    """Weights and moments after ``step`` steps, whole."""
    found = next(f for f in Folder(directory, "", 0, "").found() if f.step == step)
    reader, state = Reader(found.path, read_manifest(found)), {}
    for name, shape in reader.shapes.items():
        for kind in STATES:
            state[f"{kind} of {name}"] = torch.empty(whole(name, shape).numel, dtype=torch.float64)
            reader.read(whole(name, shape), {kind: state[f"{kind} of {name}"]})
    return state


def steps(directory: Path) -> list[int]:
    return [found.step for found in Folder(directory, "", 0, "").found()]


Straight = Callable[..., tuple[Path, Finished]]


@pytest.fixture(scope="module")
def straight(farm: Farm, tmp_path_factory: pytest.TempPathFactory) -> Straight:
    """Trainings that several tests begin with, each run once: ``straight(**options of config)`` has its checkpoints and its results."""
    known: dict[str, tuple[Path, Finished]] = {}

    def of(**options: Any) -> tuple[Path, Finished]:
        key = json.dumps(options, sort_keys=True)
        if key not in known:
            folder = tmp_path_factory.mktemp("straight")
            known[key] = folder, train(farm, config(folder, **options)).checked()
        return known[key]

    return of


def copied(source: Path, target: Path, only: int | None = None) -> Path:
    """``target`` with the checkpoints of ``source``, or the one of step ``only``."""
    for path in source.glob("step-*" if only is None else f"step-{only:08}-*"):
        shutil.copytree(path, target / path.name)
    return target


SAME = [
    {"tensor": 2, "data": 2, "sharding": (1, 1, 2), "sequence_parallel": True},
    {"pipeline": 2, "data": 2, "sharding": (2, 2, 2)},
]


@pytest.mark.parametrize("layout", SAME, ids=str)
def test_killed_and_resumed_is_bit_for_bit_the_run_that_was_not(farm: Farm, tmp_path: Path, layout: dict[str, Any]) -> None:
    straight = train(farm, config(tmp_path / "a", "fp32", **layout)).checked()
    settings = config(tmp_path / "b", "fp32", **layout)
    killed = doom(farm, "killed_in_step", settings, step=4, wait_for=f"step-{HALF:08}-start-0")
    assert -9 in killed.codes.values() and steps(tmp_path / "b") == [HALF]
    resumed = train(farm, settings, attempt=1, out=killed.directory).checked()
    for key in ("losses", "grad_norms"):
        assert len(resumed.result[key]) == STEPS and resumed.result[key] == straight.result[key]
    first, second = saved(tmp_path / "a"), saved(tmp_path / "b")
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


PAIRS = [
    ("gpt", {}, {"tensor": 2, "pipeline": 2, "data": 2}),
    ("gpt", {"data": 4, "sharding": (2, 2, 4)}, {"tensor": 2, "sequence_parallel": True}),
    ("llama", {"tensor": 2, "data": 2, "sharding": (1, 2, 2)}, {"pipeline": 4}),
    ("llama", {"context": 2, "data": 2, "sharding": (2, 2, 4)}, {"tensor": 2, "context": 2}),
    ("bloom", {"pipeline": 2, "virtual_pipeline": 2, "schedule": "interleaved"}, {"data": 2, "sharding": (2, 2, 2)}),
]
"""Family (gpt and bloom tie the head to the embedding), layout before, layout after. No tensor degree divides the 101 tokens."""


@pytest.mark.parametrize(
    ("family", "before", "after"),
    [
        pytest.param(*pair, marks=[pytest.mark.campaign("checkpoints")] * (pair[0] == "bloom" or not pair[1] or "context" in pair[1]))
        for pair in PAIRS
    ],
    ids=str,
)
def test_another_layout_resumes_where_the_first_stopped(
    farm: Farm, tmp_path: Path, family: str, before: dict[str, Any], after: dict[str, Any]
) -> None:
    model = {"family": family, "layers": 4}
    straight = train(farm, config(tmp_path / "a", model=model, **before)).checked()
    copied(tmp_path / "a", tmp_path / "b", HALF)
    resumed = train(farm, config(tmp_path / "b", model=model, **after)).checked()
    assert resumed.result["losses"] == pytest.approx(straight.result["losses"][HALF:], rel=1e-10)
    assert resumed.result["grad_norms"] == pytest.approx(straight.result["grad_norms"][HALF:], rel=1e-10)
    first, second = saved(tmp_path / "a"), saved(tmp_path / "b")
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(second[name], first[name], rtol=1e-10, atol=1e-12, msg=name)


def test_a_killed_muon_resumes_where_matrices_are_cut_in_another_way(farm: Farm, tmp_path: Path) -> None:
    before, after = {"tensor": 2, "sequence_parallel": True}, {"data": 4, "sharding": (1, 2, 4)}
    model = {"family": "llama"}
    straight = train(farm, config(tmp_path / "a", model=model, kind="muon")).checked()
    killed = doom(
        farm, "killed_in_step", config(tmp_path / "b", model=model, kind="muon", **before), step=4, wait_for=f"step-{HALF:08}-start-0"
    )
    assert -9 in killed.codes.values() and steps(tmp_path / "b") == [HALF]
    resumed = train(farm, config(tmp_path / "b", model=model, kind="muon", **after), attempt=1, out=killed.directory).checked()
    assert resumed.result["losses"] == pytest.approx(straight.result["losses"], rel=1e-10)
    first, second = saved(tmp_path / "a"), saved(tmp_path / "b")
    assert not first["exp_avg_sq of blocks.0.mlp.up.weight"].count_nonzero(), "a second moment that nobody needs"
    for name in first:
        torch.testing.assert_close(second[name], first[name], rtol=1e-10, atol=1e-12, msg=name)


PHASES = [{"until": 96, "global_batch": 4, "seq": 8}, {"until": 160, "global_batch": 4, "seq": 16, "lr": 0.5}]
"""Three steps of 4 x 8 tokens, one of 4 x 16, then 8 x 16."""


@pytest.mark.parametrize(("every", "step"), [(3, 5), pytest.param(2, 4, marks=pytest.mark.campaign("checkpoints"))])
def test_a_killed_run_resumes_in_its_phase_under_another_layout(farm: Farm, tmp_path: Path, every: int, step: int) -> None:
    """The checkpoint is of a border, or of the middle of a phase; then the run ends at a border, and goes on from there."""

    def of(folder: str, steps: int = STEPS, **layout: Any) -> dict[str, Any]:
        data = config(tmp_path / folder, every=every, **layout)
        return data | {"run": data["run"] | {"phases": PHASES, "steps": steps}, "optimizer": data["optimizer"] | {"eps": 1e-4}}

    straight = train(farm, of("a")).checked()
    before, between, after = {"tensor": 2, "sequence_parallel": True}, {"pipeline": 2, "data": 2, "sharding": (1, 2, 2)}, {"data": 2}
    killed = doom(farm, "killed_in_step", of("b", **before), step=step, wait_for=f"step-{every:08}-start-0")
    assert -9 in killed.codes.values() and steps(tmp_path / "b") == [every]
    train(farm, of("b", steps=4, **between), attempt=1, out=killed.directory).checked()
    resumed = train(farm, of("b", **after), attempt=2, out=killed.directory).checked()
    for key in ("losses", "grad_norms"):
        assert resumed.result[key] == pytest.approx(straight.result[key], rel=1e-10)
    lines = [{line["step"]: line for line in map(json.loads, (run.directory / "metrics.jsonl").open())} for run in (straight, resumed)]
    for name in ("lr", "global_batch", "seq"):
        assert [lines[0][step][name] for step in range(1, STEPS + 1)] == [lines[1][step][name] for step in range(1, STEPS + 1)]
    first, second = saved(tmp_path / "a"), saved(tmp_path / "b")
    for name in first:
        torch.testing.assert_close(second[name], first[name], rtol=1e-10, atol=1e-12, msg=name)


MIXTURE = {"family": "llama", "layers": 4, "experts": {"count": 4, "ffn": 16, "correction": 0.01, "balance_loss": 0.1}}


def drawn_layout(dice: random.Random) -> dict[str, Any]:
    """A layout of 1 to 4 ranks whose experts and context ranks may be any."""
    degrees: dict[str, int] = {}
    while math.prod(degrees.values()) not in (1, 2, 4) or not degrees:
        degrees = {name: dice.choice([1, 1, 2, 4]) for name in ("tensor", "context", "data", "pipeline")}
    shared, folded = degrees["context"] * degrees["data"], degrees["context"] * degrees["data"] * degrees["tensor"]
    params, grads, optimizer = sorted(dice.choice([n for n in (1, 2, 4) if n <= shared]) for _ in range(3))
    schedule = dice.choice(["1f1b", "zero_bubble"])
    return {
        **degrees,
        "expert": dice.choice([n for n in (1, 2, 4) if n <= folded]),
        "sharding": (params, grads, optimizer),
        "schedule": schedule,
    }


@pytest.mark.parametrize("number", [0, *(pytest.param(n, marks=pytest.mark.campaign("checkpoints")) for n in range(1, 40))])
def test_a_killed_mixture_resumes_under_other_context_and_expert_ranks(
    farm: Farm, tmp_path: Path, number: int, pytestconfig: pytest.Config
) -> None:
    dice = random.Random(f"{pytestconfig.getoption('--layout-seed')}/{number}")
    before, after = drawn_layout(dice), drawn_layout(dice)
    straight = train(farm, config(tmp_path / "a", model=MIXTURE)).checked()
    killed = doom(farm, "killed_in_step", config(tmp_path / "b", model=MIXTURE, **before), step=4, wait_for=f"step-{HALF:08}-start-0")
    assert -9 in killed.codes.values() and steps(tmp_path / "b") == [HALF], before
    resumed = train(farm, config(tmp_path / "b", model=MIXTURE, **after), attempt=1, out=killed.directory).checked()
    assert resumed.result["losses"] == pytest.approx(straight.result["losses"], rel=1e-9), (before, after)
    assert resumed.result["grad_norms"] == pytest.approx(straight.result["grad_norms"], rel=1e-9), (before, after)
    first, second = saved(tmp_path / "a"), saved(tmp_path / "b")
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(second[name], first[name], rtol=1e-9, atol=1e-11, msg=f"{name}: {before}, {after}")


@pytest.mark.parametrize(
    ("rank", "moment"), [pytest.param(0, "file", marks=pytest.mark.campaign("checkpoints")), (1, "file"), (0, "commit")]
)
def test_a_kill_while_writing_loses_nothing_older(farm: Farm, straight: Straight, tmp_path: Path, rank: int, moment: str) -> None:
    settings = config(tmp_path / "b", every=3, data=2, sharding=(1, 1, 2))
    killed = doom(farm, "killed_while_writing", settings, step=6, rank=rank, moment=moment)
    assert -9 in killed.codes.values() and steps(tmp_path / "b") == [3]
    resumed = train(farm, settings, attempt=1, out=killed.directory).checked()
    assert resumed.result["losses"] == straight(data=2, sharding=(1, 1, 2))[1].result["losses"]
    assert not list((tmp_path / "b").glob(".writing-*"))


def test_a_stopped_run_saves_at_once_and_goes_on_from_there(farm: Farm, straight: Straight, tmp_path: Path) -> None:
    settings = config(tmp_path / "b", every=100, data=2)
    stopped = doom(farm, "stopped_in_step", settings, step=2)
    assert set(stopped.codes.values()) == {75} and stopped.result["status"] == "stopped"
    (step,) = steps(tmp_path / "b")
    assert 3 <= step <= 5
    resumed = train(farm, settings, attempt=1, out=stopped.directory).checked()
    assert resumed.result["losses"] == straight(data=2)[1].result["losses"]


def damaged(straight: Straight, tmp_path: Path) -> dict[str, Any]:
    """Settings of a run with two checkpoints, of which the newest lacks a shard."""
    settings = config(copied(straight(data=2)[0], tmp_path / "c"), data=2)
    (tmp_path / "c" / f"step-{STEPS:08}-start-0" / "rank-00000.bin").unlink()
    return settings


def test_a_damaged_checkpoint_is_reported_and_the_one_before_is_loaded(farm: Farm, straight: Straight, tmp_path: Path) -> None:
    settings = damaged(straight, tmp_path)
    resumed = train(farm, settings, attempt=1).checked()
    assert len(resumed.result["losses"]) == STEPS - HALF
    assert "rank-00000.bin is missing; trying the previous checkpoint" in resumed.logs


def test_when_none_is_whole_the_run_does_not_start_over_silently(farm: Farm, straight: Straight, tmp_path: Path) -> None:
    settings = damaged(straight, tmp_path)
    path = tmp_path / "c" / f"step-{HALF:08}-start-0" / "rank-00000.bin"
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    refused = train(farm, settings, attempt=1)
    assert set(refused.codes.values()) == {2}
    assert "rank-00000.bin is missing, and no older one is complete" in refused.failure(1)["message"]
    settings["run"]["checkpoint"]["resume"] = False
    assert len(train(farm, settings, attempt=2).checked().result["losses"]) == STEPS


def test_a_checkpoint_of_another_model_is_refused_by_name(farm: Farm, straight: Straight, tmp_path: Path) -> None:
    refused = train(farm, config(copied(straight()[0], tmp_path / "c"), model={"hidden": 64}), attempt=1)
    assert refused.codes == {0: 2}
    assert "is of another model: model.hidden=32 there, 64 here" in refused.failure(0)["message"]
    assert refused.failure(0)["reason"] == "configuration"


def test_a_run_that_saves_nothing_leaves_the_folder_to_the_one_that_does(farm: Farm, tmp_path: Path) -> None:
    """It starts from the checkpoint of another run, which goes on saving; stopped, it leaves nothing there."""
    settings = config(tmp_path / "c", every=2)
    settings["run"]["steps"] = 4
    train(farm, settings).checked()
    before = sorted(path.name for path in (tmp_path / "c").iterdir())
    settings = config(tmp_path / "c", every=0)
    settings["run"]["steps"] = 100
    stopped = doom(farm, "stopped_in_step", settings, step=5)
    assert set(stopped.codes.values()) == {75} and len(stopped.result["losses"]) >= 2
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == before


def test_an_older_attempt_is_turned_away(farm: Farm, tmp_path: Path) -> None:
    newer = train(farm, config(tmp_path / "c", data=2), attempt=2).checked()
    refused = train(farm, config(tmp_path / "c", data=2), attempt=1, out=newer.directory)
    assert set(refused.codes.values()) == {2}
    assert "attempt 2 of this run has started there already, so attempt 1 may not" in refused.failure(0)["message"]


def test_imported_weights_are_where_a_run_starts(farm: Farm, tmp_path: Path) -> None:
    """Weights that went to the Hugging Face layout and back train like the checkpoint that they came from, moments forgotten."""
    scratch = train(farm, config(tmp_path / "c", "fp32")).checked().result
    half = tmp_path / "c" / f"step-{HALF:08}-start-0"
    export_weights(half, tmp_path / "hf")
    import_weights(tmp_path / "hf", tmp_path / "imported")
    manifest = json.loads((half / "manifest.json").read_text())
    for piece in manifest["pieces"]:
        piece["crc32"] = {"weight": piece["crc32"]["weight"]}
    (half / "manifest.json").write_text(json.dumps(manifest | {"step": 0, "extra": {"samples": 0, "updates": 0}}))
    (tmp_path / "forgetful").mkdir()
    half.rename(tmp_path / "forgetful" / "step-00000000-start-0")
    runs = [train(farm, config(tmp_path / name, "fp32", every=0, tensor=2)).checked().result for name in ("forgetful", "imported")]
    assert len(runs[0]["losses"]) == STEPS and runs[0]["losses"] == runs[1]["losses"]
    assert abs(runs[0]["losses"][0] - scratch["losses"][0]) > 1e-3
    assert steps(tmp_path / "imported") == [0], "a run that is not asked to save only reads"


def test_another_global_batch_goes_on_with_the_sample_after_the_last_one(farm: Farm, straight: Straight, tmp_path: Path) -> None:
    """3 steps of 8 and 3 of 4 see what 3 of 8 and 6 of 2 see: as many samples, none twice."""
    seen = []
    for batch in (4, 2):
        settings = config(copied(straight()[0], tmp_path / f"batch{batch}", HALF))
        settings["layout"]["micro_batch"] = 2
        settings["optimizer"]["lr"] = 0.0  # the loss of a step is then that of its samples
        settings["optimizer"]["min_lr"] = 0.0
        settings["run"] |= {"global_batch": batch, "steps": HALF + 12 // batch}
        run = train(farm, settings).checked()
        assert f"note: run.global_batch was 8 and is {batch} now; the data continues with sample 24" in run.logs
        seen.append(run.result["losses"])
    assert seen[0] == pytest.approx([(a + b) / 2 for a, b in zip(seen[1][::2], seen[1][1::2])], rel=1e-10)


def test_a_decay_that_branches_from_a_stable_trunk_is_the_run_that_had_its_schedule_from_the_beginning(farm: Farm, tmp_path: Path) -> None:
    """To the bit, from a checkpoint that is not the newest, and beside others that branch from the same trunk."""

    def of(steps: int, stable: int, **checkpoint: Any) -> dict[str, Any]:
        settings = config(tmp_path / "trunk", "fp32", every=2)
        settings["optimizer"] |= {"warmup_steps": 1, "stable_steps": stable, "decay_steps": steps, "decay_style": "linear", "min_lr": 0.0}
        settings["optimizer"] |= {"average_from": None}
        settings["run"] |= {"steps": steps, "checkpoint": settings["run"]["checkpoint"] | {"keep": 3} | checkpoint}
        return settings

    train(farm, of(6, 5)).checked()
    for start, steps in ((2, 4), (4, 7)):
        branch = train(farm, of(steps, start - 1, every=0, at=start)).checked().result["losses"]
        whole = train(farm, of(steps, start - 1, dir=None, every=0)).checked().result["losses"]
        assert len(branch) == steps - start and branch == whole[start:]
    assert {found.step for found in Folder(tmp_path / "trunk", "", 0, "").found()} == {2, 4, 6}
    missing = train(farm, of(7, 4, every=0, at=5))
    assert missing.codes == {0: 2} and "has no checkpoint after 5 steps, but 2, 4, 6; give one" in missing.failure(0)["message"]


def test_another_seed_is_refused_unless_new_data_is_meant(farm: Farm, straight: Straight, tmp_path: Path) -> None:
    settings = config(copied(straight(data=2)[0], tmp_path / "c"), data=2)
    settings["run"] |= {"seed": 5, "steps": STEPS + 2}
    refused = train(farm, settings, attempt=1)
    assert set(refused.codes.values()) == {2}
    message = refused.failure(1)["message"]
    assert "is of other data: run.seed was 1234 and is 5 now" in message and "run.checkpoint.new_data=true" in message
    settings["run"]["checkpoint"]["new_data"] = True
    assert len(train(farm, settings, attempt=2).checked().result["losses"]) == 2
    manifest = json.loads((next((tmp_path / "c").glob(f"step-{STEPS + 2:08}-*")) / "manifest.json").read_text())
    assert manifest["data"]["seed"] == 5 and manifest["extra"]["samples"] == 16, "the samples of the new data are counted from its first"


def prepared(data: dict[str, Any], line: str) -> str:
    """Prepare a corpus of many times ``line``; how a message names it."""
    Path(data["source"]).write_text(line * 200)
    prepare(DataConfig(**data), force=True)
    return read_index(DataConfig(**data)).sha256[:12]


def test_another_corpus_is_refused_unless_new_data_is_meant(farm: Farm, tmp_path: Path) -> None:
    """It lies where the first one lay: its content decides."""
    settings = config(tmp_path / "c", model={"vocab": 300}, data=2)
    settings["data"] = {"source": str(tmp_path / "text.txt"), "path": str(tmp_path / "corpus"), "vocab": 300}
    was = prepared(settings["data"], "the cat sat on the mat\n")
    train(farm, settings).checked()
    settings["run"]["steps"] = STEPS + 2
    now = prepared(settings["data"], "a rose is a rose\n")
    refused = train(farm, settings, attempt=1)
    assert set(refused.codes.values()) == {2} and refused.result["reason"] == "configuration"
    message = refused.failure(1)["message"]
    assert f"is of other data: the checksum of data.path was {was} and is {now} now" in message
    assert "run.checkpoint.new_data=true" in message
    settings["run"]["checkpoint"]["new_data"] = True
    assert len(train(farm, settings, attempt=2).checked().result["losses"]) == 2


def test_another_layout_continues_a_run_that_was_started_again(farm: Farm, tmp_path: Path) -> None:
    """Attempts count the starts of one run; the checkpoints of one that had several are open to the first start of another."""
    longer = config(tmp_path / "a", data=2), config(tmp_path / "b", tensor=2, pipeline=2)
    for settings in longer:
        settings["run"]["steps"] = STEPS + 2
    straight = train(farm, longer[0]).checked()
    settings = config(tmp_path / "b", data=2)
    killed = doom(farm, "killed_in_step", settings, step=4, wait_for=f"step-{HALF:08}-start-0")
    train(farm, settings, attempt=1, out=killed.directory).checked()
    other = train(farm, longer[1]).checked()
    assert other.result["losses"] == pytest.approx(straight.result["losses"][STEPS:], rel=1e-10)
