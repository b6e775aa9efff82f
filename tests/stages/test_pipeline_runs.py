"""A pipeline on the real programs: everything is made once, a change makes only what follows from it, a failure stops only what needs it,
and whoever kills the launcher loses nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher.cli.main import main
from tests import warm
from tests.convert.test_logits import SMALL, checkpoint, ours
from tests.stages.conftest import GRAPH, kill_many, killed_at, write
from trainer.convert import export_gguf
from trainer.data.prepare import prepare
from trainer.shared.records.artifacts import ArtifactKind, read_artifact
from trainer.shared.run.derived import resolve_model
from trainer.shared.run.schema import DataConfig, ModelConfig

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def run(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict[str, dict[str, Any]]:
    """What the command says of each stage."""
    capsys.readouterr()
    assert main(["run", "pipeline=small", "--config-dir", "conf", "--json", *words]) == code
    return {stage["name"]: stage for stage in json.loads(capsys.readouterr().out)["stages"]}


def statuses(said: dict[str, dict[str, Any]]) -> dict[str, str]:
    return {name: stage["status"] for name, stage in said.items()}


def test_everything_is_made_once_and_a_change_makes_only_what_follows(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = run(capsys)
    assert set(statuses(first).values()) == {"done"}
    kinds = {name: getattr(read_artifact(Path(stage["folder"])), "kind", None) for name, stage in first.items()}
    assert kinds == {
        "data": ArtifactKind.CORPUS,
        "base": ArtifactKind.CHECKPOINT,
        "score": ArtifactKind.METRICS,
        "hf": ArtifactKind.HUGGINGFACE,
        "text": ArtifactKind.TEXT,
    }
    figures = json.loads((Path(first["score"]["folder"]) / "metrics.json").read_text())
    assert figures["read_in_training"] is False and 0 < figures["loss"] < 7
    completions = json.loads((Path(first["text"]["folder"]) / "completions.json").read_text())["completions"]
    assert [c["prompt"] for c in completions] == ["some", "text"] and all(c["tokens"] for c in completions)
    warm.run("-m", "trainer.generate", first["base"]["folder"], "--prompt", "some", "--tokens", "5", check=True)  # its tokenizer is with it

    capsys.readouterr()
    assert main(["status", "small", "--json"]) == 0
    assert [trial["stage"] for trial in json.loads(capsys.readouterr().out)["trials"]] == [*first]
    for name in ("text", "small.text", first["text"]["id"]):  # by its name, its pipeline's and its own, and its id
        assert main(["logs", name]) == 0 and "some" in capsys.readouterr().out
    assert main(["cancel", "hf"]) == 0 and "hf has ended" in capsys.readouterr().out

    made = {path: path.stat().st_mtime_ns for path in (folder / "runs").rglob("*") if path.is_file()}
    assert set(statuses(run(capsys)).values()) == {"reused"}
    assert {path: path.stat().st_mtime_ns for path in made} == made

    code = "import sys; from launcher.cli.main import main; main(['run', 'pipeline=small', '--config-dir', 'conf']); print(*sys.modules, file=sys.stderr)"
    told = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True
    )
    assert told.stdout.count("reused") == len(GRAPH) and not {"torch", "mlflow", "numpy", "kubernetes"} & set(told.stderr.split())

    changed = run(capsys, "stages.hf.dtype=bfloat16", "stages.text.layout.tensor=2", "stages.text.cluster.gpus_per_node=2")
    assert statuses(changed) == {"data": "reused", "base": "reused", "score": "reused", "hf": "done", "text": "done"}
    assert changed["text"]["ranks"] == 2 and (Path(changed["text"]["folder"]) / "completions.json").is_file()
    Path(first["score"]["folder"], "metrics.json").write_text("{}")  # damaged: it is made again, and nothing else
    assert statuses(run(capsys)) == {name: "done" if name == "score" else "reused" for name in GRAPH}
    (folder / "text.txt").write_text("other text\n" * 300)
    planned = run(capsys, "--dry-run")
    assert set(statuses(planned).values()) == {"to run"} and not {s["id"] for s in planned.values()} & {s["id"] for s in first.values()}


def test_what_needs_a_stage_that_failed_is_not_run_and_all_else_is(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = GRAPH | {"base": GRAPH["base"] | {"optimizer.lr": 1e30, "run.steps": 8}, "more": GRAPH["base"] | {"run.seed": 5}}
    write(folder, broken)
    said = run(capsys, code=1)
    failed = dict.fromkeys(("score", "hf", "text"), "upstream failed")
    assert statuses(said) == {"data": "done", "base": "failed", "more": "done"} | failed
    assert "numerics" in said["base"]["detail"] and said["hf"]["detail"] == "stage base failed"
    assert not Path(said["hf"]["folder"]).exists()
    write(folder, GRAPH)
    again = run(capsys, "--until", "hf")
    assert statuses(again) == {"data": "reused", "base": "done", "hf": "done"}


def test_a_training_over_several_values_goes_on_with_the_best_that_came_to_its_end(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    over = {"over": {"optimizer.lr": [1e30, 1e-9, 1e-2]}, "best": "loss", "run.steps": 8}
    write(folder, {"data": GRAPH["data"], "base": GRAPH["base"] | over, "hf": GRAPH["hf"]})
    said = run(capsys, code=1)
    trained = {"base-1": "failed", "base-2": "done", "base-3": "done"}
    assert statuses(said) == {"data": "done", **trained, "base": "done", "hf": "done"}
    choice = json.loads((Path(said["base"]["folder"]) / ".choice.json").read_text())
    losses = {name: figures["loss"] for name, figures in choice["figures"].items()}
    assert choice["chosen"] == "base-3" and losses["base-3"] < losses["base-2"]
    weights = [next(Path(said[name]["folder"]).glob("checkpoints/*/manifest.json")).read_text() for name in ("base", "base-3")]
    assert weights[0] == weights[1]
    again = run(capsys, "stages.base.over.optimizer.lr=[1e-9,1e-2]")
    assert {status for name, status in statuses(again).items() if name not in ("base", "hf")} == {"reused"}


def test_a_model_of_others_is_imported_and_goes_on(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("gguf", reason="GGUF files are not read: pip install -e '.[gguf]'")
    model = resolve_model(ModelConfig(family="llama", **(SMALL | {"vocab": 300})))  # type: ignore[arg-type]
    prepare(DataConfig(source="text.txt", path="corpus", vocab=300), False)
    export_gguf(checkpoint(ours(model, seed=4), model, folder / "c"), folder / "theirs.gguf", tokenizer=folder / "corpus/tokenizer.json")
    imported = {"stage": "convert", "format": "checkpoint"}
    graph = {
        "base": imported | {"inputs": {"model": "./theirs.gguf"}},
        "file": {"stage": "convert", "inputs": {"model": "base"}, "format": "gguf"},
        "text": GRAPH["text"] | {"inputs": {"model": "base"}},
    }
    write(folder, graph)
    said = run(capsys)
    assert set(statuses(said).values()) == {"done"}
    assert (Path(said["file"]["folder"]) / "model.gguf").read_bytes() == (folder / "theirs.gguf").read_bytes()
    completions = json.loads((Path(said["text"]["folder"]) / "completions.json").read_text())["completions"]
    assert [c["prompt"] for c in completions] == ["some", "text"] and all(c["tokens"] for c in completions)
    write(folder, graph | {"again": imported | {"inputs": {"model": "file"}}})
    assert statuses(run(capsys, "--dry-run")) == dict.fromkeys(graph, "there") | {"again": "to run"}
    os.utime(folder / "theirs.gguf", ns=(1, 1))  # another file, for all that is known of it
    assert set(statuses(run(capsys, "--dry-run")).values()) == {"to run"}


def test_a_model_is_tuned_between_two_scores_and_goes_on_merged(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever is made of it behind: the merged folder says what the tuned checkpoint does."""
    lines = [json.dumps({"question": f"text {n}", "answer": f"text {n}"}) for n in range(40)]
    (folder / "examples.jsonl").write_text("\n".join(lines))
    asked = {"data.kind": "instructions", "data.source": "examples.jsonl", "data.template": "{question} {answer}", "data.held_out": 0.2}
    one = {"cluster.gpus_per_node": 1, "run.global_batch": 8}
    tuned = {"stage": "tune", "inputs": {"model": "base"}, "tune.method": "lora", "run.steps": 12, "optimizer.lr": 0.02}
    score = {"stage": "evaluate", "inputs": {"model": "base"}} | asked | one
    rest = {"hf": GRAPH["hf"] | {"inputs": {"model": "tuned"}}, "text": GRAPH["text"]}
    graph = {"data": GRAPH["data"], "base": GRAPH["base"], "before": score, "tuned": tuned | asked | one, **rest}
    write(folder, graph | {"after": score | {"inputs": {"model": "tuned"}}})
    said = run(capsys)
    assert set(statuses(said).values()) == {"done"}
    before, after = (json.loads((Path(said[name]["folder"]) / "metrics.json").read_text()) for name in ("before", "after"))
    assert after["loss"] < before["loss"] and not after["read_in_training"] and 0 <= after["exact_match"] <= 1
    words = ["--prompt", "some", "--tokens", "5", "--json"]
    texts = [warm.run("-m", "trainer.generate", said[name]["folder"], *words, check=True).stdout for name in ("tuned", "hf")]
    assert texts[0] == texts[1] != ""
    (folder / "examples.jsonl").write_text("\n".join(lines[1:]))
    assert {name for name, stage in run(capsys, "--dry-run").items() if stage["status"] == "to run"} == {
        "tuned",
        "before",
        "after",
        "hf",
        "text",
    }
    (folder / "examples.jsonl").write_text("\n".join([json.dumps({"question": "text " * 900, "answer": "text"}), *lines]))
    assert main(["run", "pipeline=small", "--config-dir", "conf"]) == 2
    assert "examples.jsonl line 1: of the answer nothing is left" in capsys.readouterr().err


def test_a_launcher_that_is_killed_loses_nothing_and_repeats_nothing_that_is_whole(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done: dict[Path, int] = {}
    for wanted in ("data", "base", "hf"):
        manifests = killed_at(wanted, folder)
        assert {path: manifests.get(path) for path in done} == done, "a stage that was whole has been made again"
        done = {path: time_ns for path, time_ns in manifests.items() if read_artifact(path.parent) is not None}
    said = run(capsys)
    assert set(statuses(said).values()) <= {"done", "reused"}
    assert all(read_artifact(Path(stage["folder"])) is not None for stage in said.values())
    assert {path: path.stat().st_mtime_ns for path in done} == done
    assert len(list((folder / "runs/stages").glob("*"))) == len(GRAPH)


def test_a_rank_that_dies_with_its_artifact_leaves_a_result_to_the_next_only_if_that_was_whole(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A launcher that comes later takes a result for the end of the stage, and would not make what is missing."""
    said = run(capsys)
    for name in ("base", "score", "text"):
        trial = folder / "runs/trials" / said[name]["id"]
        before = json.loads((trial / "result.json").read_text())
        (trial / "result.json").unlink()
        made = read_artifact(Path(said[name]["folder"]))
        ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(said[name]["ranks"])}
        warm.run("-m", "trainer", trial / "config.yaml", "--attempt", "1", env=os.environ | ranks, check=True)
        assert json.loads((trial / "result.json").read_text()) == before | {"attempt": 1}
        assert read_artifact(Path(said[name]["folder"])) == made
    dies = "import os, sys, trainer.stages.make as s; s.write_artifact = lambda *_: os._exit(9); from trainer.__main__ import main; main(sys.argv[1:])"
    for name in ("score", "text"):
        trial = folder / "runs/trials" / said[name]["id"]
        (trial / "result.json").unlink()
        shutil.rmtree(said[name]["folder"])
        assert warm.run("-c", dies, trial / "config.yaml").returncode == 9
        assert not (trial / "result.json").exists()
    assert statuses(run(capsys)) == dict.fromkeys(GRAPH, "reused") | {"score": "done", "text": "done"}


@pytest.mark.campaign("launchers")
def test_launchers_killed_at_random_moments_lose_nothing_and_make_nothing_twice(folder: Path, request: pytest.FixtureRequest) -> None:
    kill_many(request.config.getoption("--kills") or 17, 8.0, folder)
