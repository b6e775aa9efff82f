"""What the tests of results share: a ready MLflow database, a real MLflow server, a real browser."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from launcher.tracking.database import database_uri, make_database, open_client
from launcher.tracking.server import LocalServer, server_port
from launcher.trials.lock import Locks
from tests.tracking.headless import CHROMIUM, Page


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose ``mlflow.db`` has its tables and its default experiment."""
    root = tmp_path_factory.mktemp("database")
    make_database(root)
    open_client(database_uri(root))
    return root


@pytest.fixture
def root(tmp_path: Path, empty_database: Path) -> Path:
    """A folder for trials and sweeps with an empty, ready MLflow database."""
    shutil.copy(empty_database / "mlflow.db", tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> Iterator[str]:
    """The address of a real MLflow server."""
    root = tmp_path_factory.mktemp("server")
    shutil.copy(empty_database / "mlflow.db", root)
    with LocalServer(root, server_port()) as running:
        running.wait_ready()
        yield running.url


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    """A tab of a headless Chromium."""
    if CHROMIUM is None:
        pytest.skip("needs a browser: apt-get install --no-install-recommends chromium fonts-dejavu-core")
    with Page(tmp_path / "profile") as tab:
        yield tab


@contextmanager
def at_work(root: Path) -> Iterator[None]:
    """This process is the folder's copier, and copies nothing: those that launchers start leave their sweeps to it, and import nothing."""
    locks = Locks(root / "copier.lock")
    assert locks.take("copier")
    try:
        yield
    finally:
        locks.close()
