"""Names that somebody gave a device, a source or a trainer are shown as they are: no markup, nothing that steers a terminal."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from launcher.cli.main import main
from launcher.labels import shown

pytestmark = pytest.mark.slow

TABLE = Path(__file__).parents[1] / "search" / "layouts_13b.csv"
NAMES = ["x [/foo]", "H100 [sxm]", "[bold]x[/bold]", "a :smile:"]
SMALL = ["model=gpt_tiny", "hardware=a100_80", "cluster.gpus_per_node=4"]
SERVED = [*SMALL[:2], "task=inference", "model.seq=1024", "workload=chat"]


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def table_of(source: str) -> str:
    """The table with another source, in the current folder."""
    rows = list(csv.DictReader(TABLE.read_text().splitlines()))
    with open("t.csv", "w", newline="") as file:
        lines = csv.DictWriter(file, rows[0])
        lines.writeheader()
        lines.writerows(row | {"source": source} for row in rows)
    return "t.csv"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("more", [["--top", "1"], ["--explain", "1"], ["--measure", "1"]], ids=" ".join)
def test_a_plan_shows_the_name_of_a_device_as_it_is(name: str, more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *SMALL, f"cluster.hardware.name='{name}'", *more]) == 0
    assert capsys.readouterr().out.splitlines()[0].endswith(f" 1 x 4 {name}")


@pytest.mark.parametrize("more", [[], ["--explain", "1"]], ids=" ".join)
def test_a_plan_of_inference_shows_the_name_of_a_device_as_it_is(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *SERVED, f"cluster.hardware.name='{NAMES[0]}'", *more]) == 0
    assert NAMES[0] in capsys.readouterr().out.splitlines()[0]


@pytest.mark.parametrize(
    ("verb", "source"),
    [*((["validate"], name) for name in NAMES), (["validate", "--sweeps"], NAMES[0]), (["search", "--replay"], NAMES[2])],
)
def test_tables_show_a_source_as_it_is(source: str, verb: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*verb, table_of(source)]) == 0
    assert source in capsys.readouterr().out


@pytest.mark.parametrize("verb", [["validate"], ["search", "--replay"]], ids=" ".join)
def test_what_steers_a_terminal_does_not_reach_it(verb: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    main([*verb, table_of("red\x1b[31m\x07\r\u202e")])
    out, err = capsys.readouterr()
    assert "red?[31m? ?" in out and not {"\x1b", "\x07", "\r", "\u202e"} & set(out + err)


def test_an_error_does_not_steer_a_terminal_either(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "model=\x1b[31m"]) == 2
    assert "\x1b" not in capsys.readouterr().err


def test_shown_text_keeps_its_lines_and_its_letters() -> None:
    assert shown("a\nb\u00e9 \u4e2d [x]\t\x1b[0m\udc80") == "a\nb\u00e9 \u4e2d [x] ?[0m?"


@pytest.mark.parametrize("columns", ["0", ""])
def test_a_terminal_without_a_width_has_a_table_all_the_same(
    columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert main(["plan", *SMALL, "--top", "1"]) == 0
    assert "mostly" in capsys.readouterr().out
