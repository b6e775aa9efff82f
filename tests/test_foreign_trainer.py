"""Another package called ``trainer`` does not get in the way, wherever it is found; one that was installed over ours is named."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parent.parent
THEIRS = 'raise SystemExit("the trainer of somebody else")\n'
SCRIPT = "import sys\nfrom launcher.__main__ import main\nsys.exit(main())\n"
"""A console script, as pip writes it."""
PROGRAM = """
import os
assert "libtorch" not in open(f"/proc/{os.getppid()}/maps").read(), "the rank that watches has imported what it does not need"
for step in (1, 2, 3):
    print(f"it {step} took 1 ms")
"""
TINY = (
    *("train", "model=gpt_tiny", "data=synthetic", "cluster.gpus_per_node=2", "run.global_batch=2", "run.steps=3"),
    *("trainer.launch.program=command", "trainer.launch.script=train.py", "trainer.launch.command=['{python}','{script}']"),
    r"trainer.launch.log=['it (?P<step>\d+) took (?P<milliseconds>\d+) ms']",
)
"""Ranks that watch another program, for which no torch is imported; tests/sweep/test_multirun.py has one that train."""


def foreign(folder: Path) -> Path:
    package = folder / "trainer"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(THEIRS)
    return folder


def on_the_path(folder: Path) -> tuple[str, dict[str, str]]:
    """Python, and an environment in which PYTHONPATH names a folder with another ``trainer`` before ours."""
    return sys.executable, {"PYTHONPATH": os.pathsep.join([str(foreign(folder / "path")), str(ROOT)])}


def in_site_packages(folder: Path) -> tuple[str, dict[str, str]]:
    """An environment in which another ``trainer`` is installed, and this project as an editable installation has it: behind that."""
    venv.create(folder / "env", symlinks=True)
    python = folder / "env" / "bin" / "python"
    (packages,) = (folder / "env" / "lib").glob("python*/site-packages")
    foreign(packages)
    (packages / "editable.pth").write_text(f"{sysconfig.get_path('purelib')}\n{ROOT}\n")
    return str(python), {"PYTHONPATH": ""}


@pytest.mark.parametrize(("place", "trained_by"), [(on_the_path, "module"), (in_site_packages, "script")])
def test_launcher_and_ranks_find_ours(place: Callable[[Path], tuple[str, dict[str, str]]], trained_by: str, tmp_path: Path) -> None:
    python, environment = place(tmp_path)
    (tmp_path / "trireme").write_text(SCRIPT)
    (tmp_path / "train.py").write_text(PROGRAM)
    entrances = {"script": ["trireme"], "module": ["-m", "launcher"]}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([python, *words], cwd=tmp_path, env=os.environ | environment, capture_output=True, text=True, timeout=300)

    assert "the trainer of somebody else" in run("-c", "import trainer").stderr
    for words in entrances.values():
        assert run(*words, "--version").stdout.startswith("trireme ")
    done = run(*entrances[trained_by], *TINY)
    assert done.returncode == 0 and "somebody else" not in done.stderr + done.stdout, done.stderr
    (result,) = tmp_path.glob("runs/trials/*/result.json")
    assert json.loads(result.read_text())["status"] == "done"


@pytest.mark.parametrize("left", [THEIRS, None], ids=["installed over ours", "uninstalled with our file"])
def test_files_of_theirs_in_place_of_ours_are_one_line(left: str | None, tmp_path: Path) -> None:
    for package in ("launcher", "trainer"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    path = tmp_path / "trainer" / "__init__.py"
    path.write_text(left) if left else path.unlink()
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-m", "launcher", "rank"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith(f"error: {path} is of another package called trainer, installed over Trireme's")
    assert done.stderr.count("\n") == 1
    script = subprocess.run(
        [sys.executable, "-c", "from launcher import plan"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert "ImportError" in script.stderr.splitlines()[-1] and "uninstall that" in script.stderr


def test_a_program_that_imported_another_one_first_is_told(tmp_path: Path) -> None:
    (tmp_path / "trainer.py").touch()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    code = "import trainer\nfrom launcher import compose"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stderr.endswith(
        f"{tmp_path / 'trainer.py'}, another package called trainer, was imported first; import launcher before it\n"
    )
