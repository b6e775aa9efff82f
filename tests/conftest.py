"""What tests of several rooms share."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator

import pytest
from hypothesis import HealthCheck, settings

os.environ.pop("COLUMNS", None)  # pytest-xdist gives it to its workers: tables would be as narrow as its idea of a terminal

from tests.clusters.kubernetes.build import built
from tests.clusters.kubernetes.fixture import kubernetes, namespace, played_nodes, real_node
from tests.clusters.slurm.fixture import slurm, whole
from trainer.testing import Farm

# Here and nowhere below: every place that imports them would start clusters of its own.
__all__ = ["kubernetes", "namespace", "played_nodes", "real_node", "slurm", "whole"]

# Every run draws the same examples, so that what has passed passes again; others are drawn by hand: --hypothesis-profile fresh
settings.register_profile("fresh", deadline=None, suppress_health_check=[HealthCheck.too_slow])  # no test depends on the time it takes
settings.register_profile("same", settings.get_profile("fresh"), derandomize=True)
settings.load_profile("same")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--layouts", type=int, default=40, help="layouts that the matrix draws (tests/numerics/test_matrix.py)")
    parser.addoption("--long", action="store_true", help="also the tests that download a model")
    parser.addoption("--tuned-layouts", type=int, default=24, help="layouts that tuning draws (tests/tuning/test_tuned_layouts.py)")
    parser.addoption(
        "--kills", type=int, default=0, help="launchers of pipelines that are killed at random moments, on each backend (tests/stages)"
    )
    parser.addoption("--layout-seed", type=int, default=1, help="seed of the matrix")


STARTS_PROCESSES = ("farm", "slurm", "kubernetes", "server", "empty_database", "page")
"""Fixtures of tests that are not pure: ``make test-fast`` leaves them out."""
TAKES_LONG = ("checkpoint", "convert", "generate", "numerics", "observe", "published", "stages", "sweep", "tracking", "trainer", "tuning")
"""Folders of tests that train, start launchers, or read whole tables: left out too, as are the files below."""
TAKE_LONG = (
    *("test_docs.py", "test_examples.py", "test_facade.py", "test_imports.py", "test_wheel.py", "test_local.py", "test_jobs.py"),
    *(
        "test_any_override_list.py",
        "test_calibrate.py",
        "test_doctor.py",
        "test_published.py",
        "test_unseen.py",
        "test_search.py",
        "test_search_commands.py",
    ),
    *("test_plan_command.py", "test_recipes.py", "test_replay.py", "test_size.py", "test_policy.py", "test_report.py", "test_tables.py"),
    *("test_preparation.py", "test_silent_places.py", "test_kubernetes_entry.py", "test_named_files.py", "test_damage.py"),
    "test_inference_tables.py",
    "test_slurm_odd_answers.py",
    "test_serving.py",
)


CLUSTERS = ("slurm", "kubernetes")
"""Fixtures that are whole clusters: their tests make a group each."""
BUILDING = 3600
"""Seconds that a test of Kubernetes may take where its programs are yet to be built: the first one waits for that, thirteen minutes on a
busy machine."""


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Which tests one process runs when several share the work: those of a cluster, else those of a file; drawn layouts go anywhere."""
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        cluster = next((name for name in CLUSTERS if name in fixtures), None)
        pure = item.path.parent.name not in TAKES_LONG and item.path.name not in TAKE_LONG
        if not pure or any(name in fixtures for name in STARTS_PROCESSES):
            item.add_marker(pytest.mark.slow)
        if cluster == "kubernetes" and not built():
            item.add_marker(pytest.mark.timeout(BUILDING))
        if "case_index" not in fixtures:
            item.add_marker(pytest.mark.xdist_group(cluster or item.path.name))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Function, nextitem: pytest.Function | None) -> Generator[None, object, object]:
    """A process that shares the work is through with a cluster after the last of its group: one that stands idle takes a tenth of a
    processor from all other tests."""
    result = yield
    if nextitem is not None and hasattr(item.config, "workerinput"):
        for name in {*CLUSTERS} & {*item.fixturenames} - {*getattr(nextitem, "fixturenames", ())}:
            for definition in item._fixtureinfo.name2fixturedefs[name]:
                definition.finish(item._request)  # type: ignore[arg-type]
    return result


@pytest.fixture(scope="session")
def farm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Farm]:
    """Ranks at no cost: ``farm.train(config, world_size)``, ``farm.call(function, world_size, ...)``."""
    ranks = Farm(tmp_path_factory.mktemp("farm"))
    yield ranks
    ranks.close()
