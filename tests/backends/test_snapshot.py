"""The copy of the code that jobs run: what is in it, from a checkout and from installed packages."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.backends import snapshot
from launcher.backends.snapshot import CodeSnapshot
from tests.sweep.test_full_disk import small_disk  # noqa: F401
from trainer.shared.run.errors import ConfigError


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A small project under git: one commit, and a file that git ignores."""
    folder = tmp_path / "checkout"
    for name, text in {
        "trainer/a.py": "1",
        "trainer/b.py": "1",
        "trainer/c.jinja": "1",
        "launcher/e.py": "1",
        "tests/t.py": "1",
        "README.md": "1",
        ".gitignore": "*.log\n",
    }.items():
        write(folder, name, text)
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "first")
    write(folder, "trainer/x.log", "ignored")
    return folder


def write(folder: Path, name: str, text: str) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", "-C", folder, *arguments], check=True)


def copied(folder: Path, root: Path) -> dict[str, str]:
    target = CodeSnapshot(folder).write(root)
    return {
        str(path.relative_to(target)): path.read_text() for path in target.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    }


def test_a_checkout_gives_what_git_tracks_as_it_is_now_and_new_sources_of_the_packages(
    checkout: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write(checkout, "trainer/a.py", "changed")
    write(checkout, "trainer/new/d.py", "new")
    for name in ("core.1234", "trainer/core.77", "trainer/notes.txt", "notes/mine.py"):
        write(checkout, name, "not code")
    (checkout / "trainer" / "c.jinja").unlink()
    assert copied(checkout, tmp_path / "runs") == {"trainer/a.py": "changed", "trainer/new/d.py": "new", "trainer/b.py": "1"}
    said = capfd.readouterr().err
    assert said.count("\n") == 1 and "left out: trainer/" in said and "and 1 more" in said
    copied(checkout, tmp_path / "runs")
    assert not capfd.readouterr().err, "said once for each copy"


def test_what_is_left_out_does_not_change_the_name_of_the_copy(checkout: Path) -> None:
    before = CodeSnapshot(checkout).digest
    for name in ("core.1234", "trainer/core.77", "README.md", "tests/t.py"):
        write(checkout, name, "not code of a rank")
    assert CodeSnapshot(checkout).digest == before
    write(checkout, "trainer/e.py", "code")
    assert CodeSnapshot(checkout).digest != before


def test_code_that_is_too_large_is_refused_with_its_largest_file(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "LARGEST_BYTES", 2**20)
    CodeSnapshot(checkout).check()
    write(checkout, "trainer/weights.py", "x" * 2**21)
    with pytest.raises(ConfigError) as error:
        CodeSnapshot(checkout).check()
    assert "trainer/weights.py, 2.0 MiB" in str(error.value) and "; " in str(error.value) and "\n" not in str(error.value)


def test_installed_packages_give_all_that_the_ranks_import(tmp_path: Path) -> None:
    """As a wheel unpacks them: beside packages of others, with the configuration groups inside the launcher's."""
    site = tmp_path / "site-packages"
    for name in ("trainer", "launcher"):
        shutil.copytree(Path(snapshot.__file__).parents[2] / name, site / name, ignore=shutil.ignore_patterns("__pycache__"))
    write(site, "launcher/conf/config.yaml", "")
    write(site, "other/module.py", "")
    program = "import sys; from launcher.backends.snapshot import CodeSnapshot; from pathlib import Path; print(CodeSnapshot().write(Path(sys.argv[1])))"
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "runs"], env=os.environ | {"PYTHONPATH": str(site)}, cwd=tmp_path,
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    target = Path(done.stdout.strip())
    assert {path.name for path in target.iterdir()} == {"trainer"}
    subprocess.run([sys.executable, "-P", "-c", "import trainer.__main__"], env=os.environ | {"PYTHONPATH": str(target)}, check=True)


def test_a_copy_without_room_leaves_nothing_and_names_its_own_place(checkout: Path, small_disk: Path) -> None:  # noqa: F811
    write(checkout, "trainer/large.py", "#" * 3 * 2**20)
    for _ in range(3):
        with pytest.raises(OSError, match="No space left on device") as error:
            CodeSnapshot(checkout).write(small_disk)
        assert error.value.filename == str(CodeSnapshot(checkout).folder(small_disk))
        assert list((small_disk / "code").iterdir()) == []
    write(checkout, "trainer/large.py", "# there is room again")
    assert "trainer/large.py" in copied(checkout, small_disk)


def test_code_that_cannot_be_read_is_named(checkout: Path, tmp_path: Path) -> None:
    snapshot_of = CodeSnapshot(checkout)
    assert snapshot_of.digest
    (checkout / "trainer" / "b.py").unlink()
    with pytest.raises(FileNotFoundError) as error:
        snapshot_of.write(tmp_path / "runs")
    assert error.value.filename == str(checkout / "trainer" / "b.py")
    assert list((tmp_path / "runs" / "code").iterdir()) == []
