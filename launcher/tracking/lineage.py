"""Records a pipeline's stage in MLflow beside its run: its model, its input text and model, and scores.

A checkpoint or a folder of weights is a LoggedModel, READY and with the digest of its content; the weights stay where they are. A corpus is
a dataset with our digest: nothing of it is read. Writing twice adds nothing.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.tracking.names import accepted
from trainer.shared.records.artifacts import METRICS_FILE, Artifact, ArtifactKind, find_artifact, newest_checkpoint
from trainer.shared.records.stage_run import StageRun, stage_in
from trainer.shared.records.trial_files import number
from trainer.shared.run.files import read_json
from trainer.shared.run.read import flatten

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from launcher.trials.store import Record

MODELS = (ArtifactKind.CHECKPOINT, ArtifactKind.HUGGINGFACE, ArtifactKind.GGUF)
DIGEST_LETTERS = 36
"""MLflow's limit for a dataset's digest."""
STAGE = "stage_id"
"""Tag of a LoggedModel: the stage that made it."""


class Lineage:
    """Writes it for stages of one pipeline."""

    def __init__(self, client: MlflowClient, experiment: str, pipeline: str, owner: str):
        self._client, self._experiment, self._pipeline, self._owner = client, experiment, pipeline, owner

    def write(self, run: str, record: Record) -> None:
        """Records a finished stage, whose MLflow run is ``run``."""
        stage = stage_in(record.config)
        made = stage.made if stage is not None else None
        if stage is None or made is None:
            return
        if made.kind in MODELS:
            self._write_model(run, stage, made, record)
        taken = {name: (Path(folder), find_artifact(Path(folder))) for name, folder in stage.sources.items()}
        for name, (folder, found) in taken.items():
            if found is not None and found.kind is ArtifactKind.CORPUS:
                self._client.log_inputs(run, datasets=[_dataset(stage, name, folder, found)])
        if made.kind is ArtifactKind.METRICS:
            self._write_scores(run, stage, record)

    def _write_model(self, run: str, stage: StageRun, made: Artifact, record: Record) -> None:
        from mlflow.entities import LoggedModelOutput

        if self._model(stage.id) is not None:
            return
        family = record.config.get("model", {}).get("family") if made.kind is ArtifactKind.CHECKPOINT else made.kind.value
        params = {"digest": made.digest, "folder": stage.folder}  # the page of a model shows its parameters, not its tags
        params |= {name: str(value) for name, value in flatten(record.config.get("model", {}), "model.").items()}
        tags = {STAGE: stage.id, "owner": self._owner, "digest": made.digest, "kind": made.kind.value}
        name = f"{self._pipeline}-{stage.name}".replace(".", "-")
        tags |= {f"input.{source}": identity for source, identity in stage.inputs.items()}
        model = self._client.create_logged_model(self._experiment, name, run, tags, params, family)
        newest = newest_checkpoint(Path(stage.folder))
        steps = None if newest is None else (read_json(newest / "manifest.json") or {}).get("step")
        self._client.log_outputs(run, [LoggedModelOutput(model.model_id, steps if isinstance(steps, int) else 0)])
        self._client.finalize_logged_model(model.model_id, "READY")

    def _write_scores(self, run: str, stage: StageRun, record: Record) -> None:
        """The figures, tied to the model and to the text that it was asked about."""
        from mlflow.entities import LoggedModelInput, Metric

        model = self._model(stage.inputs.get("model", ""))
        figures = read_json(Path(stage.folder) / METRICS_FILE) or {}
        known = {f"score/{name}": value for name, given in flatten(figures, "").items() if (value := number(given)) is not None}
        text = _dataset_name(stage, "data", Path(stage.sources.get("data", "")))
        corpus = find_artifact(Path(stage.sources.get("data", "")))
        tied: dict[str, Any] = {"model_id": model} if model is not None else {}
        if corpus is not None:
            tied |= {"dataset_name": text, "dataset_digest": corpus.digest[:DIGEST_LETTERS]}
        now = int(1000 * (record.ended or time.time()))
        self._client.log_batch(run, [Metric(name, value, now, 0, **tied) for name, value in accepted(known).items()])
        if model is not None:
            self._client.log_inputs(run, models=[LoggedModelInput(model)])

    def _model(self, stage: str) -> str | None:
        query = f"tags.`{STAGE}` = '{stage}' and tags.owner = '{self._owner}'"
        found = self._client.search_logged_models([self._experiment], query, max_results=1)
        return None if not found else str(found[0].model_id)


def _dataset(stage: StageRun, name: str, folder: Path, found: Artifact) -> Any:
    from mlflow.entities import Dataset, DatasetInput, InputTag

    source = json.dumps({"folder": str(folder)})
    dataset = Dataset(_dataset_name(stage, name, folder), found.digest[:DIGEST_LETTERS], "local", source)
    return DatasetInput(dataset, [InputTag("mlflow.data.context", stage.verb)])


def _dataset_name(stage: StageRun, name: str, folder: Path) -> str:
    return stage.made_by.get(name) or folder.name
