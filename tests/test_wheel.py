"""The tool works installed as a wheel: configuration groups, recipes and Hydra's plugin travel with it."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parent.parent


def built(folder: Path) -> Path:
    """Builds the wheel and unpacks it."""
    subprocess.run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT], check=True, timeout=600)
    (wheel,) = folder.glob("trireme-*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "installed")
    return folder / "installed"


def declared(folder: Path) -> Path:
    """Copies the files that pyproject.toml declares for a wheel to where one is unpacked."""
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    for source, target in [(package, package) for package in wheel["packages"]] + [*wheel["force-include"].items()]:
        shutil.copytree(ROOT / source, folder / "installed" / target, ignore=shutil.ignore_patterns("__pycache__"))
    return folder / "installed"


@pytest.mark.parametrize("unpacked", [declared, pytest.param(built, marks=pytest.mark.campaign("docs"))])
def test_an_installed_wheel_composes_groups_and_recipes_without_the_checkout(unpacked: Callable[[Path], Path], tmp_path: Path) -> None:
    installed = unpacked(tmp_path)
    shipped = {p.relative_to(installed / "launcher").as_posix() for p in (installed / "launcher").rglob("*.yaml")}
    kept = {p.relative_to(ROOT).as_posix() for p in (ROOT / "conf").rglob("*.yaml") if not p.is_relative_to(ROOT / "conf/recipe")}
    recipes = {f"conf/recipe/{p.name}" for p in (ROOT / "recipes").glob("*.yaml")}
    assert recipes and kept | recipes <= shipped
    code = (
        "from launcher.config import compose, conf_dir; from launcher.cli.main import main\n"
        "print(conf_dir()); print(compose(['recipe=gpt3_126m']).model.hidden); main(['train', '--info', 'plugins'])"
    )
    env = os.environ | {"PYTHONPATH": str(installed)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=env, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[:2] == [str(installed / "launcher" / "conf"), "768"] and "TriremeLauncher" in done.stdout


def test_the_command_for_a_missing_package_installs_it_and_leaves_trireme_alone() -> None:
    """The command of the error message is run as it is printed, here with nothing to download: pip finds all that it names."""
    program = """if True:
        import sys
        sys.modules["kubernetes"] = None
        from launcher.backends import backend_for
        from launcher.config.clusters import cluster_class
        from trainer.shared.run.errors import ConfigError
        try:
            backend_for(cluster_class("kubernetes")(backend="kubernetes"))
        except ConfigError as error:
            print(error)"""
    said = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert (
        said.startswith(f"cluster.backend=kubernetes needs the Python package 'kubernetes'; run {sys.executable} ")
        and said.count("\n") == 1
    )
    command = shlex.split(said.partition("; run ")[2])
    done = subprocess.run([*command, "--dry-run", "--no-index"], capture_output=True, text=True)
    assert done.returncode == 0 and "Would install" not in done.stdout, done.stdout + done.stderr
    assert "kubernetes" in done.stdout and "trireme" not in done.stdout
