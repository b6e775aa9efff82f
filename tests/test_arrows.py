"""The directions in which rooms may use each other (ARCHITECTURE.md). Read from the source, so that lazy imports count too."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("torch", "mlflow", "kubernetes", "submitit", "plotly", "tokenizers", "safetensors", "transformers")


def imports(path: Path) -> set[str]:
    """Modules that a file imports, as dotted names; ``from a import b`` counts as ``a.b``."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the arrows"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def files(*places: str) -> list[Path]:
    found = [p for place in places for p in ([ROOT / place] if place.endswith(".py") else sorted((ROOT / place).rglob("*.py")))]
    assert found, f"no source in {places}"
    return found


def offenders(paths: list[Path], forbidden: tuple[str, ...], allowed: tuple[str, ...] = ()) -> list[str]:
    def hit(name: str, prefixes: tuple[str, ...]) -> bool:
        return any(name == p or name.startswith(p + ".") for p in prefixes)

    return [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in paths
        for name in sorted(imports(path))
        if hit(name, forbidden) and not hit(name, allowed)
    ]


def test_launcher_uses_only_the_trainers_data_types() -> None:
    assert offenders(files("launcher", "hydra_plugins"), ("trainer",), ("trainer.config", "trainer.layout")) == []


def test_trainer_knows_nothing_of_the_launcher() -> None:
    assert offenders(files("trainer"), ("launcher", "hydra", "omegaconf", "hydra_plugins")) == []


def test_shared_data_is_free_of_torch() -> None:
    assert offenders(files("trainer/config", "trainer/layout"), (*HEAVY, "trainer.parallel", "trainer.models", "trainer.data")) == []


def test_cost_search_and_ranking_do_no_input_or_output() -> None:
    io = ("os", "subprocess", "socket", "shutil", "pathlib", "tempfile", "yaml", "csv", "mlflow", "hydra", "requests", "launcher.backends")
    pure = files("launcher/cost", "launcher/planning", "launcher/search", "launcher/results/ranking.py")
    assert offenders(pure, io) == []
    assert [f"{p.relative_to(ROOT)} opens files" for p in pure if calls_open(p)] == []


def calls_open(path: Path) -> bool:
    return any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "open"
        for node in ast.walk(ast.parse(path.read_text()))
    )


ROOMS = {
    "config": (), "cost": ("config",), "tables": ("config", "cost"), "planning": ("config", "cost", "labels"),
    "search": ("config", "cost", "planning", "tables", "labels"),
    "backends": ("config", "sweep.files", "sweep.store"), "results": ("config", "cost", "labels", "sweep"),
    "sweep": ("config", "cost", "planning", "search", "backends", "results", "labels", "interrupt"),
}  # fmt: skip
"""Rooms of the launcher, and what else of it each may use."""


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_uses_no_other_than_those_named(room: str) -> None:
    assert offenders(files(f"launcher/{room}"), ("launcher",), tuple(f"launcher.{name}" for name in (room, *ROOMS[room]))) == []


COST = {"inputs": (), "time": ("inputs", "parts"), "memory": ("inputs", "time", "parts")}
"""Rooms of the cost model: what is asked, then seconds, then bytes."""


@pytest.mark.parametrize("room", COST)
def test_inside_the_cost_model_no_arrow_runs_back(room: str) -> None:
    assert (
        offenders(files(f"launcher/cost/{room}"), ("launcher.cost",), tuple(f"launcher.cost.{name}" for name in (room, *COST[room]))) == []
    )


def test_every_room_is_named() -> None:
    assert {path.name for path in (ROOT / "launcher").iterdir() if (path / "__init__.py").exists()} == {*ROOMS, "cli"}


def test_cost_model_knows_no_backend_and_ranking_no_slurm() -> None:
    assert offenders(files("launcher/cost"), ("launcher.backends", "launcher.sweep", "launcher.cli", "launcher.results")) == []
    assert offenders(files("launcher/results/ranking.py"), ("launcher.backends", "launcher.cli", "submitit")) == []


def test_no_verb_loads_a_heavy_library_before_it_is_used() -> None:
    """Most verbs answer at once, and a site needs only the libraries of its own backend."""
    code = (
        "import sys; from importlib import import_module; from launcher.cli.main import VERBS\n"
        "for verb in VERBS: import_module(f'launcher.cli.{verb}')\n"
        "import launcher.sweep.multirun, launcher.sweep.run, hydra_plugins.trireme\n"
        f"print(sorted(set({HEAVY!r}) & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
