"""Fixtures of the backends' tests: a Slurm that answers oddly, and a place for pods that are played."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.backends.odd_slurm import odd
from tests.clusters.kubernetes.fixture import Kubernetes
from tests.clusters.kubernetes.stage import Stage

__all__ = ["odd"]


@pytest.fixture
def stage(played_nodes: Kubernetes, namespace: str, tmp_path: Path) -> Iterator[Stage]:
    """A namespace with played pods, and backends that are closed after the test."""
    made = Stage(played_nodes, namespace, tmp_path)
    yield made
    for backend in made.opened:
        backend.close()
