"""A kind of stage has one home: nothing else asks which one a stage is, and one that is added needs no line elsewhere."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.cli.main import main
from launcher.stages.graph import parse
from launcher.stages.kinds import KINDS
from launcher.stages.kinds.train import ChooseStage
from launcher.stages.plan import plan
from tests.convert.test_logits import MODELS, checkpoint, ours
from tests.stages.copying import CopyStage
from trainer.convert import export_weights
from trainer.shared.records.artifacts import read_artifact
from trainer.shared.run.derived import resolve_model

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
VERBS = {*KINDS, ChooseStage.verb, "serve"}


def ladders(text: str) -> Iterator[int]:
    """Finds lines that compare a verb with the name of a kind."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Compare):
            parts = [part for side in (node.left, *node.comparators) for part in ast.walk(side)]
            words = {part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)}
            asked = {getattr(part, "attr", getattr(part, "id", "")) for part in parts} | words
            if words & VERBS and "verb" in asked:
                yield node.lineno


def test_nothing_asks_which_kind_a_stage_is() -> None:
    for line in ('stage.verb == "tune"', 'verb in (*OTHERS, "choose")', 'config["stage"]["verb"] != "train"', '"serve" == stage.verb'):
        assert [*ladders(line)] == [1]
    files = [path for package in ("launcher", "trainer") for path in sorted((ROOT / package).rglob("*.py"))]
    assert [f"{path.relative_to(ROOT)}:{line}" for path in files for line in ladders(path.read_text())] == []


def test_a_stage_added_is_planned_checked_run_and_taken_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(KINDS, CopyStage.verb, CopyStage)
    model = resolve_model(MODELS["llama grouped tied"])
    checkpoint(ours(model, seed=1), model, tmp_path / "c")
    copied: dict[str, Any] = {"stage": "copy", "inputs": {"model": "./c"}, "note": "2026"}
    stages = {"copied": copied, "hf": {"stage": "convert", "inputs": {"model": "copied"}}}
    file = tmp_path / "conf" / "pipeline" / "copies.yaml"
    file.parent.mkdir(parents=True)

    def run(code: int, *words: str, **changed: Any) -> Any:
        file.write_text(yaml.safe_dump({"stages": stages | {"copied": copied | changed}}))
        assert main(["run", "pipeline=copies", "--config-dir", "conf", "--json", *words]) == code
        said = capsys.readouterr()
        return said.err if code else {stage["name"]: stage for stage in json.loads(said.out)["stages"]}

    assert "unknown key stages.copied.not; did you mean 'note'?" in run(2, **{"not": "x"})
    assert "stage copied: note= says nothing" in run(2, note="")
    assert "copied.inputs.model is missing: copy takes a checkpoint" in run(2, inputs={})
    made = run(0)
    assert {name: stage["status"] for name, stage in made.items()} == {"copied": "done", "hf": "done"}
    folder = Path(made["copied"]["folder"])
    artifact = read_artifact(folder)
    assert (folder / "note.txt").read_text() == "2026" and artifact is not None and artifact.made_by == made["copied"]["id"]
    assert {stage["status"] for stage in run(0).values()} == {"reused"}
    again = run(0, "--dry-run", "stages.copied.note=2027")
    assert all(again[name]["id"] != made[name]["id"] for name in made)


def test_text_is_made_of_a_hugging_face_folder_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = resolve_model(MODELS["llama grouped tied"])
    export_weights(checkpoint(ours(model, seed=1), model, tmp_path / "c"), tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    text = {"stage": "generate", "inputs": {"model": "./hf"}, "prompts": ["a"], "tokens": 2}
    (planned,) = plan(parse({"stages": {"text": text}}), ())
    assert planned.config.model == model and planned.run.settings["model"] == str(tmp_path / "hf")
