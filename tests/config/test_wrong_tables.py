"""A cell that is wrong gets one plain error with its row, its column and its value, whichever verb reads the table."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from launcher.cli.main import main
from launcher.tables.inference import COLUMNS as REQUESTS

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


@pytest.mark.parametrize("words", ["nrm=layer", "norm", "norm=soft", "biases=[qvk]", "hidden=64", "norm=["])
def test_wrong_changes_of_a_model_name_their_row(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", planted("model_changes", words)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: row 2: ") and f"model_changes: model.{words.split('=')[0]}" in err.replace(" has ", ": model.")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("column", "value", "most"), [("gpus", "1000000000000000", "below 1e+09"), ("step_time_s", "1e308", "below 1e+18")]
)
def test_a_number_that_is_too_large_is_told_the_limit(column: str, value: str, most: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", planted(column, value)]) == 2
    assert f"has {column}={value}; give a" in (err := capsys.readouterr().err) and most in err


def test_a_table_without_a_row_is_one_plain_error(capsys: pytest.CaptureFixture[str]) -> None:
    Path("t.csv").write_text(TABLE.read_text().splitlines()[0] + "\n")
    Path("r.csv").write_text(",".join(REQUESTS) + "\n")
    for name in ("t.csv", "r.csv"):
        assert main(["validate", name]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith(f"error: {name} has a line of column names and no row")


def test_columns_are_listed_whatever_else_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "--columns", str(TABLE)]) == 0 and capsys.readouterr().out.startswith("training:")
    assert main(["validate"]) == 2 and capsys.readouterr().err.startswith("error: which table?")


def test_a_change_of_a_stage_that_cannot_be_read_is_one_plain_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "pipeline=gpt_tiny", "stages.base.run.steps=[", "--dry-run"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1
