"""What tests of several rooms share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def farm(tmp_path_factory: pytest.TempPathFactory) -> Iterator["Farm"]:  # noqa: F821
    """Ranks at no cost: ``farm.train(config, world_size)``, ``farm.call("module:function", world_size, ...)``."""
    from farm import Farm

    nursery = Farm(tmp_path_factory.mktemp("farm"))
    yield nursery
    nursery.close()
