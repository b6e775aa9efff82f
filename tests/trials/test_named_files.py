"""Files and folders that a person names: written through links, never in the place of something else; refused in one line, before all else."""

from __future__ import annotations

import itertools
import os
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from launcher.cli import main
from launcher.cli.machines import FOLDER
from tests.sweep.support import PROJECT, trial
from tests.sweep.support import sweep as run_points

pytestmark = pytest.mark.slow

TABLE = PROJECT / "tests" / "search" / "layouts_13b.csv"

WRITERS: dict[str, list[str]] = {
    "report": ["report", "--output"],
    "validate": ["validate", str(TABLE), "--out"],
    "size": ["size", "--parameters", "1e9", "--tokens", "3e9", "--out"],
    "plan": ["plan", "recipe=gpt3_1.3b", "--explain", "1", "--svg"],
    "rank": ["rank", "--csv"],
}
"""Every command line that writes a file which it is given the name of, up to that name."""


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a measured sweep."""
    runs = tmp_path_factory.mktemp("measured") / "runs"
    run_points(runs, trial("ok"))
    return runs


@pytest.fixture
def place(measured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder that holds a measured sweep and nothing else."""
    shutil.copytree(measured, tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def in_campaign(*commands: list[str]) -> list[Any]:
    return [pytest.param(command, marks=pytest.mark.campaign("words")) for command in commands]


def once_each(second: Iterable[str]) -> list[Any]:
    """Every verb with every one of ``second``: those that have each of both at least once in the gate, the others in the campaign."""
    names = list(second)
    pairs = itertools.product(enumerate(WRITERS), enumerate(names))
    return [
        pytest.param(verb, name, marks=() if i % len(names) == j or j % len(WRITERS) == i else pytest.mark.campaign("words"))
        for (i, verb), (j, name) in pairs
    ]


def write(verb: str, path: object) -> int:
    return main.main([*WRITERS[verb], str(path)])


@pytest.mark.parametrize("verb", WRITERS)
def test_a_link_stays_a_link_and_what_it_leads_to_is_written(place: Path, verb: str) -> None:
    target = place / "elsewhere" / "file"
    target.parent.mkdir()
    target.touch()
    target.chmod(0o600)
    (place / "link").symlink_to(target)
    (place / "new").symlink_to(place / "elsewhere" / "not yet")
    assert write(verb, "link") == 0 and write(verb, "new") == 0
    assert (place / "link").is_symlink() and target.stat().st_size
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    assert (place / "new").is_symlink() and (place / "elsewhere" / "not yet").stat().st_size
    assert sorted(path.name for path in target.parent.iterdir()) == ["file", "not yet"]


@pytest.mark.parametrize("verb", WRITERS)
def test_a_file_that_another_command_or_person_wrote_stays(place: Path, capsys: pytest.CaptureFixture[str], verb: str) -> None:
    others = {"notes.txt": "notes\n", "measured.csv": TABLE.read_text(), "mine.svg": "<svg xmlns='x'><g/></svg>", "binary": "\x00\n"}
    for name, text in others.items():
        (place / name).write_text(text)
        assert write(verb, name) == 2
        out, err = capsys.readouterr()
        assert out == "" and f"={name} exists and stays what it is" in err and err.count("\n") == 1
        assert (place / name).read_text() == text


@pytest.mark.parametrize("verb", WRITERS)
def test_a_command_may_be_repeated(place: Path, verb: str) -> None:
    assert write(verb, "file") == 0
    first = (place / "file").read_text()
    assert write(verb, "file") == 0 and len((place / "file").read_text()) == len(first)


def a_device(path: Path) -> None:
    try:
        os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 7))
    except PermissionError:
        path.symlink_to("/dev/full")


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path.name)


NO_FILES: dict[str, Callable[[Path], None]] = {
    "a device": a_device, "a pipe": os.mkfifo, "a socket": a_socket, "a folder": Path.mkdir,
}  # fmt: skip


@pytest.mark.parametrize(("verb", "kind"), once_each(NO_FILES))
def test_what_is_no_file_is_refused_and_stays(place: Path, capsys: pytest.CaptureFixture[str], verb: str, kind: str) -> None:
    NO_FILES[kind](place / "named")
    (place / "link").symlink_to("named")
    before = os.lstat(place / "named")
    for name in ("named", "link"):
        assert write(verb, name) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and f"={name} is {kind}, not a file" in error
    assert os.lstat(place / "named") == before and (place / "link").is_symlink()


@pytest.mark.parametrize(("verb", "path"), once_each(["file/in", "/proc/in", "loop", "", "x" * 300]))
def test_a_file_that_cannot_be_written_is_one_plain_error(place: Path, capsys: pytest.CaptureFixture[str], verb: str, path: str) -> None:
    (place / "file").write_text("")
    (place / "loop").symlink_to("loop")
    assert write(verb, path) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert sorted(p.name for p in place.iterdir()) == ["file", "loop", "runs"]


IMPOSSIBLE = ["file", "file/in", "/dev/null", "/proc/in", "nowhere"]
STARTERS = [
    ["train", "cluster.gpus_per_node=1"],
    ["train", "cluster.gpus_per_node=1", "--dry-run"],
    ["train", "-m", "cluster.gpus_per_node=1", "run.seed=1,2"],
    ["train", "-m", "cluster.gpus_per_node=1", "run.seed=1,2", "--dry-run"],
    ["search", "cluster.gpus_per_node=1", "hardware=h100"],
    ["search", "cluster.gpus_per_node=1", "hardware=h100", "dry_run=client"],
    ["doctor", "cluster.gpus_per_node=1"],
]


@pytest.mark.parametrize(
    ("number", "folder"),
    [
        pytest.param(number, folder, marks=() if number in (4, at, at + 5) else pytest.mark.campaign("words"))
        for number in range(len(STARTERS))
        for at, folder in enumerate(IMPOSSIBLE)
    ],
)
def test_a_folder_for_trials_that_cannot_be_made_is_refused_before_anything_starts(
    place: Path, capsys: pytest.CaptureFixture[str], number: int, folder: str
) -> None:
    (place / "file").write_text("kept")
    (place / "nowhere").symlink_to("gone")
    assert main.main([*STARTERS[number], "data=synthetic", f"sweep.dir={folder}"]) == 2
    captured = capsys.readouterr()
    last = captured.err.splitlines()[-1]
    assert last.startswith("error: ") and f"{folder}" in last and " cannot be " in last
    assert captured.out == "" and "Traceback" not in captured.err
    assert (place / "file").read_text() == "kept" and not (place / "gone").exists()


def test_hydras_own_folder_that_cannot_be_made_is_one_plain_error(place: Path) -> None:
    line = [sys.executable, "-m", "launcher", "train", "data=synthetic", "cluster.gpus_per_node=1", "hydra.run.dir=/dev/null"]
    done = subprocess.run(line, env=os.environ | {"PYTHONPATH": str(PROJECT)}, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("error: cannot use /dev/null: File exists")


@pytest.mark.parametrize("command", [["rank"], ["train", "--cfg", "job"], *in_campaign(["status", "--json"], ["--help"])], ids=" ".join)
def test_output_that_cannot_be_written_is_one_plain_error(place: Path, command: list[str]) -> None:
    with open("/dev/full", "w") as full:
        environment = os.environ | {"PYTHONPATH": str(PROJECT)}
        done = subprocess.run(
            [sys.executable, "-m", "launcher", *command], env=environment, stdout=full, stderr=subprocess.PIPE, text=True, timeout=600
        )
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and "No space left on device" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "command", [["plan", "recipe=gpt3_1.3b"], *in_campaign(["trainers"], ["rank", "--json"], ["--help"])], ids=" ".join
)
def test_a_reader_that_goes_away_ends_a_verb_in_silence(place: Path, command: list[str]) -> None:
    """As in `trireme plan ... | head`."""
    reader, writer = os.pipe()
    os.close(reader)
    line, environment = [sys.executable, "-m", "launcher", *command], os.environ | {"PYTHONPATH": str(PROJECT)}
    done = subprocess.run(line, env=environment, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=600)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_a_search_and_a_doctor_write_is_refused_before_they_measure(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    FOLDER.mkdir(parents=True)
    (FOLDER / "mine.yaml").mkdir()
    (place / "runs" / "recipe").write_text("")
    assert main.main(["doctor", "cluster.gpus_per_node=1"]) == 2
    assert "mine.yaml is a folder, not a file" in capsys.readouterr().err
    assert main.main(["search", "hardware=h100", "cluster.gpus_per_node=1", "data=synthetic", "search.recipe=x"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: search.recipe=runs/recipe/x.yaml cannot be written")
