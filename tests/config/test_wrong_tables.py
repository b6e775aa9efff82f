"""A cell that is wrong gets one plain error with its row, its column and its value, whichever verb reads the table."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from launcher.cli.main import main

TABLE = Path(__file__).parents[1] / "search" / "layouts_13b.csv"
VERBS = (["validate"], ["search", "--replay"], ["calibrate", "--out", "mine"])


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def planted(column: str, value: str) -> str:
    """The table with another cell in its second row, in the current folder."""
    rows = list(csv.DictReader(TABLE.read_text().splitlines()))
    rows[1][column] = value
    with open("t.csv", "w", newline="") as file:
        lines = csv.DictWriter(file, rows[0])
        lines.writeheader()
        lines.writerows(rows)
    return "t.csv"


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
@pytest.mark.parametrize("value", ["[", "@x", "!!python/object:x", "{a: }}", "2001-99-99", "[" * 20000])
def test_changes_of_a_trainer_that_cannot_be_read_are_named(verb: list[str], value: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"overlap.gradients={value}"
    assert main([*verb, planted("trainer_changes", words)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"error: row 2: trainer_changes has {words.split()[0]}") and err.count("\n") == 1


@pytest.mark.parametrize("words", ["overlap.gradint=false", "overlap.gradients", "overlap.gradients=7"])
def test_wrong_changes_of_a_trainer_name_their_row(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", planted("trainer_changes", words)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: row 2: ") and "overlap.gradi" in err and err.count("\n") == 1


def test_a_change_of_a_stage_that_cannot_be_read_is_one_plain_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "pipeline=gpt_tiny", "stages.base.run.steps=[", "--dry-run"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1
