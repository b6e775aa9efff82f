"""``trireme train --keys``: every key can be found by the words that a person has for it."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from launcher.cli import main

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("word", "key"), [("slurm", "cluster.partition"), ("Kubernetes", "cluster.namespace"), ("seed", "run.seed")])
def test_a_key_is_found_by_its_name_its_meaning_and_its_backend(capsys: pytest.CaptureFixture[str], word: str, key: str) -> None:
    assert main.main(["train", "--keys", word]) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith(f"{key} ")]


def test_words_that_no_key_has_to_do_with_are_one_plain_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["train", "--keys", "slrum"]) == 2
    assert capsys.readouterr().err == "error: no key matches 'slrum'; 'trireme train --keys' lists all\n"


@pytest.mark.parametrize("extra", ["slurm", "kubernetes"])
def test_the_page_of_a_queue_names_the_packages_that_it_needs(extra: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    page = (ROOT / "docs" / "how-to" / f"{extra}.md").read_text()
    assert all(f"pip install '{package}'" in page for package in project["optional-dependencies"][extra])
