"""What scripts may import from ``launcher``."""

from __future__ import annotations

import doctest
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import launcher
from launcher import ConfigError, frames, plan, rank, search, size
from launcher.cli.main import main
from tests.results.trial_files import demo_sweep
from tests.tracking.fixtures import at_work
from tests.warm import forked

__all__ = ["forked"]

pytestmark = pytest.mark.slow
TINY = ["model=gpt_tiny", "data=synthetic", "cluster.gpus_per_node=2", "run.global_batch=4", "run.steps=4", "sweep.mlflow_wait_s=0"]


def test_the_examples_of_the_facade_are_true() -> None:
    outcome = doctest.testmod(launcher)
    assert outcome.attempted > 0
    assert outcome.failed == 0


def test_every_public_name_can_be_imported() -> None:
    assert all(callable(getattr(launcher, name)) for name in launcher.__all__)


def test_packages_say_that_they_are_typed() -> None:
    from importlib.resources import files

    assert all((files(package) / "py.typed").is_file() for package in ("launcher", "trainer"))


@pytest.mark.parametrize("first", ["", "import launcher.sweep.run, launcher.search.policy"])
def test_verbs_that_share_a_name_with_a_room_are_both_whichever_comes_first(first: str) -> None:
    code = f"""{first}
from launcher import search, sweep
assert callable(search) and callable(sweep)
from launcher.sweep import run
import launcher.search.policy as policy
from launcher import search, sweep
for verb in (search, sweep):
    try:
        verb("layout.tensr=3", "data=synthetic")
    except launcher.ConfigError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", "import launcher\n" + code], capture_output=True, text=True, timeout=600)
    assert done.stdout.count("layout.tensr") == 2, done.stderr


def test_a_table_has_the_rows_of_the_document_and_the_rest_of_it_beside(capsys: pytest.CaptureFixture[str]) -> None:
    for words, called, row, rest in (
        (["plan", "recipe=gpt3_5b", "--top=4"], lambda: plan("recipe=gpt3_5b", top=4), "layouts", "considered"),
        (["size", "--parameters=1e9", "--compute-optimal"], lambda: size(parameters=1e9, compute_optimal=True), "choice", "optimizer"),
    ):
        assert main([*words, "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        found: Any = called()
        first = document[row][0] if isinstance(document[row], list) else document[row]
        assert found["name"].iloc[0] == first["name"] and found.attrs["document"][rest] == document[rest]
        assert any("." in name for name in found.columns) and capsys.readouterr().out == ""


def test_without_pandas_a_table_is_dicts_with_all_columns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pandas = rank("planted", str(demo_sweep(tmp_path).store.root))
    monkeypatch.setitem(sys.modules, "pandas", None)
    plain = rank("planted", str(tmp_path))
    assert isinstance(plain, list) and [*plain[0]] == [*pandas.columns] and {len(row) for row in plain} == {len(plain[0])}
    assert [row["trial"] for row in plain] == [*pandas["trial"]] and plain[0]["place"] == 1
    assert frames.table([], {}) == []


def test_a_search_gives_the_trials_that_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    arguments = [*sys.argv]
    with at_work(tmp_path / "there"):
        found = search(*TINY, "hardware=v100_16", "search.max_trials=1", "sweep.name=found", "sweep.dir=there")
    assert [*found["status"]] == ["done"] and found["predicted_step_time_s"].notna().all() and sys.argv == arguments
    assert found.attrs["document"]["search"] == "found" and found.equals(rank("found", "there"))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plan("recipe=nobody"), "nobody"),
        (lambda: plan(top=0), "--top=0 must be 1 or more"),
        (lambda: plan(tpo=3), "unrecognized arguments: --tpo=3; did you mean --top"),
        (lambda: size(gpus=8), "--tokens is missing"),
        (lambda: rank("nobody", "nowhere"), "nowhere"),
        (lambda: launcher.sweep("model=gpt_tiny", "layout.tensr=2"), "layout.tensr"),
    ],
)
def test_wrong_input_is_an_error_of_its_own(call: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        call()
    assert not [*tmp_path.iterdir()]
