"""A backend is one folder and one file of conf/cluster: what is added is found, checked and shown like those that ship."""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import launcher.backends
from launcher.backends import backend_for
from launcher.cli.main import main
from launcher.config.clusters import backend_names, cluster_class
from launcher.config.compose import compose, known_keys, register_schema
from launcher.config.text_keys import type_of_key
from tests.backends.conformance import Ground, PureConformance, closing
from tests.sources import nodes

ADDED = Path(__file__).parent / "added"
ROOT = Path(__file__).parents[2]
SHORT = f"--config-dir {ADDED / 'conf'} model=gpt_tiny data=synthetic cluster=toy".split()


@pytest.fixture(scope="module", autouse=True)
def toy() -> Iterator[None]:
    """The folder beside those of ``launcher/backends``, as an installed package could bring one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launcher.backends, "__path__", [*launcher.backends.__path__, str(ADDED)])
        forget()
        yield
    for name in [name for name in sys.modules if name.startswith("launcher.backends.toy")]:
        del sys.modules[name]
    forget()


def forget() -> None:
    for known in (backend_names, register_schema, known_keys, type_of_key):
        known.cache_clear()


@pytest.fixture(scope="module")
def ground(toy: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    cluster = compose(["cluster=toy"], ADDED / "conf").cluster
    yield from closing(Ground(lambda: backend_for(cluster), cluster, tmp_path_factory.mktemp("trials")))


class TestAdded(PureConformance): ...


def test_a_dry_run_shows_what_an_added_backend_would_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *SHORT, f"sweep.dir={tmp_path}", "cluster.hosts=[north,south]", "--dry-run"]) == 0
    lines = [line.partition(" python")[0] for line in capsys.readouterr().out.splitlines() if "-m trainer" in line]
    assert lines == ["north: RANK=0", "north: RANK=1", "south: RANK=2", "south: RANK=3"]


def test_the_keys_of_an_added_backend_are_checked_and_documented(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *SHORT, "cluster.host=[north]", "--dry-run"]) == 2
    assert "did you mean 'cluster.hosts'" in capsys.readouterr().err
    assert main(["train", "--schema", "cluster"]) == 0
    assert "names of the hosts" in [
        each.get("description") for schema in json.loads(capsys.readouterr().out)["anyOf"] for each in schema["properties"].values()
    ]


@pytest.mark.xdist_group("sources")
def test_no_name_of_a_backend_decides_anything_outside_of_its_folder() -> None:
    """What a backend can do is asked of its cluster's class."""
    names, own = set(backend_names()), ROOT / "launcher" / "backends"
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sorted((ROOT / "launcher").rglob("*.py"))
        if not path.is_relative_to(own)
        for node in nodes(path)
        if isinstance(node, ast.Compare) and names & {each.value for each in ast.walk(node) if isinstance(each, ast.Constant)}
    ]
    assert found == []


def test_each_backend_is_the_default_of_its_own_settings_and_allows_no_other() -> None:
    for name in backend_names():
        assert cluster_class(name)().backend == name and type_of_key("cluster.backend", name)[1]["choices"] == (name,)
