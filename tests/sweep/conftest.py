"""Queues whose jobs outlive the launcher, as tests of the loop use them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sweep.support import Place
from tests.warm import forked

__all__ = ["forked"]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """A queue in which nothing runs unless the test plays it."""
    place = Place(tmp_path)
    yield place
    place.playing = False


@pytest.fixture
def cluster(place: Place) -> Place:
    """A queue in which everything runs."""
    threading.Thread(target=place.serve, daemon=True).start()
    return place
