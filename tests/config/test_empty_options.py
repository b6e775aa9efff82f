"""An option without a word, as a script's unset variable leaves it, is refused and never taken for an option that was not given."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.cli.main import main

TABLE = str(Path(__file__).parents[1] / "search" / "layouts_13b.csv")
SMALL = ["model=gpt_tiny", "cluster.gpus_per_node=2", "data=synthetic"]
CASES = [
    ["search", *SMALL, "--replay", ""],
    ["search", *SMALL, "--replay="],
    ["search", "--replay", TABLE, "--only", ""],
    *([verb, *SMALL, "--config-dir", ""] for verb in ("plan", "search", "train")),
    ["run", "pipeline=gpt_tiny", "--dry-run", "--config-dir", ""],
    *(["run", "pipeline=gpt_tiny", "--dry-run", option, ""] for option in ("--until", "--from", "--only", "--in-cluster")),
    ["validate", TABLE, "--out", ""],
    ["calibrate", TABLE, "--out", ""],
    ["calibrate", "--show", ""],
    ["size", "--parameters", "1e9", "--tokens", "1e9", "--out", ""],
    ["plan", *SMALL, "--explain", "1", "--svg", ""],
    *([verb, option, ""] for verb in ("rank", "report", "status") for option in ("--dir",)),
    ["rank", "--csv", ""],
    ["report", "-o", ""],
]


@pytest.mark.parametrize("argv", CASES, ids=" ".join)
def test_an_option_without_a_word_is_refused_before_anything_is_done(
    argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, (out, err) = main(argv), capsys.readouterr()
    option = next(word for word in reversed(argv) if word.startswith("-")).rstrip("=")
    assert (code, out, list(tmp_path.iterdir())) == (2, "", [])
    assert err.startswith(f"error: {option}= is empty (unset shell variable?); give a") and err.count("\n") == 1
