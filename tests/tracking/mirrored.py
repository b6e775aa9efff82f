"""What a folder's MLflow database holds, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from launcher.tracking import database
from launcher.tracking.mirror import PARENT


def runs(root: Path, order: str = "metrics.step_time_s ASC") -> list[Any]:
    client = database.open_client(database.database_uri(root))
    experiment = client.get_experiment_by_name("trireme")
    assert experiment is not None
    return list(client.search_runs([experiment.experiment_id], order_by=[order]))


def children(root: Path) -> dict[str, Any]:
    """Runs of trials, fastest first, by trial id; a trial with two runs fails here."""
    found = [run for run in runs(root) if PARENT in run.data.tags]
    assert len({run.data.tags["trial"] for run in found}) == len(found), "a trial has two runs"
    return {run.data.tags["trial"]: run for run in found}


def history(root: Path, run_id: str, metric: str = "train/loss") -> list[int]:
    client = database.open_client(database.database_uri(root))
    return sorted(m.step for m in client.get_metric_history(run_id, metric))
