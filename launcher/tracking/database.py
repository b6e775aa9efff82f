"""MLflow without a service: one SQLite file and an artifact folder next to the trials, opened by one process at a time.

MLflow creates and migrates its tables at first use and breaks when several processes do that at once, or when one is killed meanwhile.
So the tables are made elsewhere and put in place whole, and every user of the file takes the lock first, for as long as one trial
takes. mlflow itself is imported only here and in ``mirror.py``, inside functions: it costs a second.

Making the tables costs another second, for they are those of MLflow's first release brought up to date by all its migrations. It is done
once for each release: an empty database is kept in the user's cache, and copied.
"""

from __future__ import annotations

import gc
import os
import shutil
import sqlite3
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
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


UNUSED = ("pandas", "numpy", "pyarrow")
"""Optional packages of MLflow (mlflow-skinny lacks them) that take a third of its import and nothing here needs."""


def environment() -> dict[str, str]:
    return {**QUIET, **os.environ}


def database_uri(root: Path) -> str:
    """The address of the folder's database. ``%41`` or ``?`` in a folder's name are taken literally."""
    path = str(root.absolute() / "mlflow.db")
    if not {"?", "%"} & set(path):
        return f"sqlite:///{path}"
    from sqlalchemy import URL

    # Named with its driver: of what begins with "sqlite:///" MLflow makes the folder, by its escaped name.
    return URL.create("sqlite+pysqlite", database=path).render_as_string()


def artifact_folder(root: Path) -> Path:
    return root.absolute() / "mlartifacts"


PLACES = {"experiments": "artifact_location", "runs": "artifact_uri", "logged_models": "artifact_location"}
"""Tables in which MLflow keeps where files are, with the whole path."""


def follow_move(root: Path) -> None:
    """Rewrites the paths of a moved or copied folder in the database, which names the old place. Needs the lock."""
    here = artifact_folder(root).as_uri()
    with closing(sqlite3.connect(root / "mlflow.db", timeout=20)) as database, database:
        query = "SELECT DISTINCT artifact_location FROM experiments WHERE artifact_location LIKE 'file:%/mlartifacts'"
        for old in {old for (old,) in database.execute(query)} - {here}:
            for table, column in PLACES.items():
                database.execute(
                    f"UPDATE {table} SET {column} = ? || substr({column}, ?) WHERE {column} = ? OR substr({column}, 1, ?) = ?",
                    (here, len(old) + 1, old, len(old) + 1, f"{old}/"),
                )


@contextmanager
def exclusively(root: Path) -> Iterator[None]:
    """Holds the folder's MLflow lock, waiting as long as another process holds it; a dead one holds none."""
    locks = Locks(root / "mlflow.lock")
    try:
        while not locks.take("mlflow"):
            time.sleep(0.05)
        yield
    finally:
        locks.close()


def make_database(root: Path) -> None:
    """Makes ``mlflow.db`` unless it exists, locking only the last step: making tables may take minutes."""
    path = root / "mlflow.db"
    if path.exists():
        return
    with tempfile.TemporaryDirectory(prefix="trireme-mlflow-") as folder:
        made = _empty_database(Path(folder))
        with exclusively(root):
            if not path.exists():
                _put(made, path)


def cached_database() -> Path | None:
    """Returns the path of the empty database for the installed MLflow; None for a user without a home."""
    import_mlflow()
    import mlflow

    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    return cache / "trireme" / f"mlflow-{mlflow.__version__}.db" if cache.is_absolute() else None


def _empty_database(folder: Path) -> Path:
    """A database with all tables and no row: that of the cache, or one that is made in ``folder``, and kept if the cache can be written."""
    cached = cached_database()
    if cached is not None and _has_tables(cached):
        return cached
    from mlflow.db import commands

    made = folder / "mlflow.db"
    commands.main(["upgrade", database_uri(folder)], standalone_mode=False)  # `mlflow db upgrade`
    with suppress(OSError):
        if cached is not None:
            cached.parent.mkdir(parents=True, exist_ok=True)
            _put(made, cached)
    return made


def _has_tables(path: Path) -> bool:
    """Returns whether the file is a complete, fully migrated database."""
    with suppress(OSError, sqlite3.Error), closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as database:
        whole = database.execute("PRAGMA quick_check").fetchone() == ("ok",)
        return whole and database.execute("SELECT version_num FROM alembic_version").fetchone() is not None
    return False


def _put(source: Path, path: Path) -> None:
    new = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        shutil.copyfile(source, new)
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


@contextmanager
def _uncollected() -> Iterator[None]:
    """No look for garbage: of the many objects that an import makes none is any, and looking through them takes a fifth of the time."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def import_mlflow() -> None:
    """Imports MLflow, without the packages that it does not need here unless this process has them already."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    hidden = [name for name in UNUSED if name not in sys.modules and "mlflow" not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None: as if it were not installed
    try:
        with _uncollected():
            import mlflow  # noqa: F401
    finally:
        for name in hidden:
            del sys.modules[name]


def open_client(uri: str) -> MlflowClient:
    """Returns a client of ``uri``; for SQLite it creates or upgrades tables. Needs the lock."""
    import_mlflow()
    from mlflow import MlflowClient

    with _uncollected():  # the first one imports the kind of store that it needs
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
