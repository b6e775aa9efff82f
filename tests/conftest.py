"""What tests of several rooms share."""

from __future__ import annotations

import gc
import itertools
import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Read when torch and NumPy are imported, here and in all that tests start: threads that wait for one another without sleeping, in as many
# processes as share the processors, took up to ten times as long for the same.
os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
os.environ.pop("COLUMNS", None)  # pytest-xdist gives it to its workers: tables would be as narrow as its idea of a terminal

from tests import accounting
from tests.clusters import shared
from tests.clusters.kubernetes.control_plane import CURRENT
from tests.clusters.kubernetes.fixture import control, forgetful, kubernetes, namespace, played_nodes, quiet, real_node
from tests.clusters.slurm.fixture import idle, slurm, whole
from tests.farm import Farm

# Here and nowhere below: every place that imports them would start clusters of its own.
__all__ = ["control", "forgetful", "idle", "kubernetes", "namespace", "played_nodes", "quiet", "real_node", "slurm", "whole"]

# Ranks that tests crash leave no core files, of 200 MB each, in the folder that they happen to run in.
resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))

# Tests make and drop many objects: Python's collector looks at the young ones after 50,000 more, not 700.
gc.set_threshold(50_000, 20, 20)

# Every run draws the same examples, so that what has passed passes again; others are drawn by hand: --hypothesis-profile fresh
settings.register_profile("fresh", deadline=None, suppress_health_check=[HealthCheck.too_slow])  # no test depends on the time it takes
settings.register_profile("same", settings.get_profile("fresh"), derandomize=True)
settings.load_profile("same")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--layouts", type=int, default=40, help="layouts that the campaign draws (tests/numerics/test_matrix.py)")
    parser.addoption("--long", action="store_true", help="also the tests that download a model")
    parser.addoption(
        "--kills", type=int, default=0, help="launchers of pipelines that are killed at random moments, on each backend (tests/stages)"
    )
    parser.addoption("--as-drawn", action="store_true", help="show a layout that fails as it is, not as plain as it still fails")
    parser.addoption("--layout-seed", type=int, default=1, help="seed of the matrix")
    parser.addoption("--campaign", metavar="AREA", help="the tests marked for this area of the campaign, which the gate leaves out")
    parser.addoption("--summary", metavar="FILE", help="write counts, seconds and worst figures as JSON (tests/accounting.py)")


SLOW_FIXTURES = ("farm", "slurm", "kubernetes", "server", "empty_database", "page")
"""Fixtures that start processes: their tests are slow, as are those that say so."""
SLOW_FILE = re.compile(r"^pytestmark = \[?pytest\.mark\.slow\b", re.MULTILINE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out files that are slow as a whole where only quick tests are asked for: many import torch."""
    if config.option.markexpr != "not slow" or collection_path.suffix != ".py":
        return None
    return SLOW_FILE.search(collection_path.read_text()) is not None or None


def pytest_configure(config: pytest.Config) -> None:
    for module in (accounting, shared):
        config.pluginmanager.register(module)


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups, and before -m is looked at
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark, choose and order the tests: those on clusters first, since they mostly wait, and pure ones last. Several processes that share
    the work take whole files, or whole groups where a test names one; drawn layouts go anywhere."""
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        if any(name in fixtures for name in SLOW_FIXTURES):
            item.add_marker(pytest.mark.slow)
        alone = next((f"{kind}-alone" for kind, wanted in shared.kinds(item).items() if wanted), None)
        if "case_index" not in fixtures and not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(alone or item.path.name))
    chosen = [item for item in items if _belongs(item, config.getoption("--campaign"))]
    if len(chosen) < len(items):
        kept = set(chosen)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = _in_turn(chosen)


def pytest_collection_finish() -> None:
    """Python's collector looks no more at the thousands of objects that tests are made of: with them it takes a tenth of a test's time."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    """Leave what is still there to the end of the process: pytest and Python would look through all of it once more each."""
    gc.freeze()


def _belongs(item: pytest.Item, area: str | None) -> bool:
    """Whether a test is of this area of the campaign; without an area, of the gate. A Kubernetes of today has to pass the gate's, too."""
    marker = item.get_closest_marker("campaign")
    if marker:
        return bool(marker.args[0] == area)
    return area is None or (area == "kubernetes" and CURRENT and area in shared.kinds(item))


def _in_turn(items: list[pytest.Item]) -> list[pytest.Item]:
    """Groups on clusters, which mostly wait, between others that are slow, which compute; pure ones last, for they fill every gap."""
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        marker = item.get_closest_marker("xdist_group")
        groups.setdefault(str(marker.args[0]) if marker else item.nodeid, []).append(item)
    kinds: tuple[list[list[pytest.Item]], ...] = ([], [], [])
    for group in groups.values():
        kinds[min(0 if shared.kinds(item) else 1 if item.get_closest_marker("slow") else 2 for item in group)].append(group)
    clusters, slow, pure = (sorted(kind, key=len, reverse=True) for kind in kinds)
    pairs = itertools.zip_longest(clusters, slow[: 2 * len(clusters) : 2], slow[1 : 2 * len(clusters) : 2], fillvalue=[])
    order = [*itertools.chain(*pairs), *slow[2 * len(clusters) :], *pure]
    return [item for group in order for item in group]


@pytest.fixture(scope="session")
def farm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Farm]:
    """Ranks at no cost: ``farm.train(config, world_size)``, ``farm.call(function, world_size, ...)``."""
    ranks = Farm(tmp_path_factory.mktemp("farm"))
    yield ranks
    ranks.close()
