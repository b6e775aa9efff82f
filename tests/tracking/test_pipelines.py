"""What MLflow is told of a pipeline: a run per stage under one of the pipeline, the models, the text that they were made of, their scores."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest

from launcher.results.report import render
from launcher.tracking import database
from launcher.tracking.mirror import PARENT, MlflowSweep
from launcher.trials.store import Point, Store
from tests.results.trial_files import point
from tests.tracking.headless import Page
from tests.tracking.mirrored import runs
from tests.tracking.test_ui import Ui
from trainer.shared.records.artifacts import ArtifactKind, read_artifact, write_artifact
from trainer.shared.records.outcome import Status
from trainer.shared.records.stage_run import StageRun
from trainer.shared.run.files import write_json

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("tracking")]
STAGES = (
    ("data", "prepare", ArtifactKind.CORPUS, {}, {"tokens.bin": b"text"}),
    ("base", "train", ArtifactKind.CHECKPOINT, {"data": "data"}, {"checkpoints/step-00000004/manifest.json": b'{"step": 4, "model": {}}'}),
    (
        "score",
        "evaluate",
        ArtifactKind.METRICS,
        {"model": "base", "data": "data"},
        {"metrics.json": b'{"loss": 2.5, "tasks": {"sums": {"acc": 0.5, "acc,strict": 0.25, "acc;strict": 0.75}}}'},
    ),
    ("hf", "convert", ArtifactKind.HUGGINGFACE, {"model": "base"}, {"model.safetensors": b"weights"}),
)
IDS = {name: f"{number:012x}" for number, (name, *_) in enumerate(STAGES, 1)}


@pytest.fixture
def pipeline(root: Path) -> Path:
    """A pipeline that was run, as its files have it."""
    store, records = Store(root), []
    for name, verb, kind, inputs, files in STAGES:
        folder = root / "stages" / IDS[name] / "artifact"
        for path, content in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)
        identities = {role: IDS[source] for role, source in inputs.items()}
        sources = {role: str(root / "stages" / IDS[source] / "artifact") for role, source in inputs.items()}
        stage = StageRun(name, verb, IDS[name], str(folder), kind.value, identities, sources, dict(inputs))
        write_artifact(folder, kind, IDS[name], identities)
        record = store.plan(Point((), point(1, 1).config, stage=stage), "life")
        record.status, record.started, record.ended = Status.DONE, time.time() - 1, time.time()
        write_json(record.directory / "result.json", {"status": "done", "attempt": 0, "world_size": 1})
        store.save(record)
        records.append(record)
    store.write_sweep("life", records, "a test")
    return root


def test_models_text_and_scores_are_tied_together_and_no_weights_are_sent(pipeline: Path) -> None:
    for _ in range(2):  # the second time from files alone: nothing is there twice
        MlflowSweep(pipeline, "life").update()
    found = {run.data.tags.get("stage", "pipeline"): run for run in runs(pipeline)}
    assert set(found) == {"pipeline", *IDS}
    assert {run.data.tags[PARENT] for name, run in found.items() if name != "pipeline"} == {found["pipeline"].info.run_id}
    client = database.open_client(database.database_uri(pipeline))
    models: Any = client.search_logged_models([found["base"].info.experiment_id])
    by_stage = {model.tags["stage_id"]: model for model in models}
    assert set(by_stage) == {IDS["base"], IDS["hf"]} and {str(model.status) for model in models} == {"READY"}
    base = by_stage[IDS["base"]]
    made = read_artifact(pipeline / "stages" / IDS["base"] / "artifact")
    assert made is not None and base.tags["digest"] == made.digest
    assert {(metric.key, metric.value) for metric in base.metrics} == {
        *(("score/loss", 2.5), ("score/tasks.sums.acc", 0.5), ("score/tasks.sums.acc_strict", 0.25)),
        ("score/tasks.sums.acc_strict_2", 0.75),
    }
    assert {metric.dataset_name for metric in base.metrics} == {"data"}
    inputs = client.get_run(found["score"].info.run_id).inputs  # a search leaves them out
    assert [given.model_id for given in inputs.model_inputs] == [base.model_id]
    assert [given.dataset.name for given in found["base"].inputs.dataset_inputs] == ["data"]
    assert not [path for path in (pipeline / "mlartifacts").rglob("*") if path.name in ("model.safetensors", "tokens.bin")]


@pytest.mark.campaign("tracking")
def test_a_browser_sees_pipeline_model_scores_and_lineage(pipeline: Path, page: Page) -> None:
    running = Ui(pipeline)
    try:
        address = running.address()
        experiment = re.search(r"experiments/(\d+)", address)
        assert experiment is not None, address
        server = address.partition("/#")[0]
        page.open(f"{server}/#/experiments/{experiment[1]}/models")
        page.wait_for("document.body.innerText.includes('life-base') && document.body.innerText.includes('life-hf')")
        client = database.open_client(database.database_uri(pipeline))
        models: Any = client.search_logged_models([experiment[1]], f"tags.`stage_id` = '{IDS['base']}'")
        page.open(f"{server}/#/experiments/{experiment[1]}/models/{models[0].model_id}")
        page.wait_for("['score/loss', '2.5', 'digest', 'Datasets used'].every(word => document.body.innerText.includes(word))")
        found = {run.data.tags.get("stage", "pipeline"): run for run in runs(pipeline)}
        page.open(f"{server}/#/experiments/{experiment[1]}/runs/{found['pipeline'].info.run_id}")
        page.wait_for("['evaluate', 'base, data', 'convert'].every(word => document.body.innerText.includes(word))")
        page.open(f"{server}/#/experiments/{experiment[1]}/runs/{found['score'].info.run_id}")
        page.wait_for("['score/loss', 'life-base'].every(word => document.body.innerText.includes(word))")
    finally:
        running.process.terminate()
        running.process.wait(300)


def test_the_report_draws_each_stage_below_what_it_takes(pipeline: Path) -> None:
    page = render(Store(pipeline).sweep("life"))
    picture = page[page.index('id="lineage"') : page.index('id="ranking"')]
    heights = {name: float(y) for y, name in re.findall(r'<text x="[\d.]+" y="([\d.]+)" class="name">(\w+) ·', picture)}
    assert heights["data"] < heights["base"] < heights["score"] == heights["hf"]
    assert picture.count('class="edge"') == 4 and "loss 2.5" in picture
