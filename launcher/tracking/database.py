"""MLflow without a service: one SQLite file and an artifact folder next to the trials, opened by one process at a time.

MLflow creates and migrates its tables at first use and breaks when several processes do that at once, or when one is killed meanwhile.
So the tables are made elsewhere and put in place whole, and every user of the file takes the lock first, for as long as one trial
takes. mlflow itself is imported only here and in ``mirror.py``, inside functions: it costs a second.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.trials.lock import Locks

if TYPE_CHECKING:
    from mlflow import MlflowClient

QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",  # the default, 7 with back-off, waits four minutes for a dead server
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "60",  # a slow one answers in the end
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
}
"""Settings of every MLflow process that the launcher starts, unless the user has set them."""


def environment() -> dict[str, str]:
    """This process's environment with ``QUIET`` filled in."""
    return {**QUIET, **os.environ}


def database_uri(root: Path) -> str:
    """The address of the folder's database. ``%41`` or ``?`` in a folder's name are no escapes and no options."""
    path = str(root.absolute() / "mlflow.db")
    if not {"?", "%"} & set(path):
        return f"sqlite:///{path}"
    from sqlalchemy import URL

    # Named with its driver: of what begins with "sqlite:///" MLflow makes the folder, by its escaped name.
    return URL.create("sqlite+pysqlite", database=path).render_as_string()


def artifact_folder(root: Path) -> Path:
    return root.absolute() / "mlartifacts"


@contextmanager
def exclusively(root: Path) -> Iterator[None]:
    """Hold the folder's MLflow lock. Waits as long as another process holds it: on a busy machine that may be long, and a dead one holds
    none."""
    locks = Locks(root / "mlflow.lock")
    try:
        while not locks.take("mlflow"):
            time.sleep(0.05)
        yield
    finally:
        locks.close()


def make_database(root: Path) -> None:
    """Make ``mlflow.db`` unless it is there. The lock is held for the last step alone: making tables takes seconds, or minutes on a busy
    machine."""
    path = root / "mlflow.db"
    if path.exists():
        return
    with tempfile.TemporaryDirectory(prefix="trireme-mlflow-") as folder:
        open_client(database_uri(Path(folder)))
        with exclusively(root):
            if not path.exists():
                shutil.copyfile(Path(folder) / "mlflow.db", root / ".mlflow.db.new")
                os.replace(root / ".mlflow.db.new", path)


def open_client(uri: str) -> MlflowClient:
    """A client of ``uri``. With the lock held: for SQLite this brings tables of an older MLflow up to date, and creates those that are
    missing."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    client.search_experiments(max_results=1)
    return client


def experiment_id(client: MlflowClient, name: str, artifacts: Path | None) -> str:
    """The experiment of that name, created or brought back from deletion. ``artifacts``: where its files lie; None: the server's choice."""
    from mlflow.entities import LifecycleStage

    found: Any = client.get_experiment_by_name(name)
    if found is None:
        kind = {"mlflow.experimentKind": "custom_model_development"}  # the page for training runs, not for language-model traces
        return str(client.create_experiment(name, artifacts.as_uri() if artifacts else None, kind))
    if found.lifecycle_stage == LifecycleStage.DELETED:
        client.restore_experiment(found.experiment_id)
    return str(found.experiment_id)
