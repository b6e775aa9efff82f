"""The directions in which rooms may use each other (ARCHITECTURE.md). Read from the source, so that lazy imports count too."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.sources import nodes, nodes_in

pytestmark = pytest.mark.xdist_group("sources")  # one process parses them
ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("torch", "gguf", "mlflow", "kubernetes", "plotly", "tokenizers", "safetensors", "transformers", "scipy")

TRAINER = {
    "shared": (),
    "launch": ("shared",),
    "data": ("shared",),
    "models": ("shared",),
    "comm": ("shared", "launch"),
    "state": ("shared", "comm", "models"),
    "tensor": ("shared", "comm", "models", "state"),
    "measure": ("shared", "launch", "comm"),
    "pipeline": ("shared", "comm", "models", "state", "tensor", "measure"),
    "checkpoint": ("shared", "comm", "state"),
    "convert": ("shared", "data", "models", "checkpoint"),
    "build": ("shared", "comm", "models", "state", "tensor", "measure", "pipeline"),
    "prompts": ("shared",),
    "batches": ("shared", "data", "tensor", "pipeline", "build", "prompts"),
    "step": ("shared", "launch", "data", "models", "comm", "state", "pipeline", "batches", "build"),
    "validation": ("shared", "data", "measure", "pipeline", "batches", "build"),
    "loop": ("shared", "launch", "data", "comm", "measure", "pipeline", "checkpoint", "step", "validation"),
    "probe": ("shared", "launch", "data", "models", "comm", "state", "step", "loop", "generate"),
    "coordinates": ("shared", "data", "models", "comm", "step"),
    "evaluate": ("shared", "launch", "data", "comm", "checkpoint", "build", "validation", "loop"),
    "generate": ("shared", "launch", "data", "models", "comm", "state", "tensor", "pipeline", "checkpoint", "convert", "build", "loop"),
    "stages": ("shared", "launch", "data", "convert", "generate"),
    "health": ("launch",),
    "observe": ("shared", "launch"),
    "__main__": ("shared", "launch", "measure", "loop", "probe", "evaluate", "generate", "stages", "observe"),
    "fork_server": ("shared", "__main__"),
}
"""Rooms of the trainer (folders, and files at its top), and what else of it each may use."""

SHARED = {
    "families": (),
    "run": ("families",),
    "parallel": ("run",),
    "corpora": ("run",),
    "records": ("run", "corpora", "families"),
}
"""Rooms of the language that both programs share."""

LAUNCHER = {
    "own_python": (),
    "labels": (),
    "console": (),
    "interrupt": (),
    "ports": (),
    "config": ("own_python",),
    "named_files": (),
    "cost": ("config",),
    "tables": ("config", "cost"),
    "planning": ("config", "cost", "labels"),
    "trials": ("config", "labels"),
    "search": ("config", "cost", "planning", "labels"),
    "backends": ("config", "trials", "ports", "own_python"),
    "results": ("cost", "trials", "labels"),
    "tracking": ("config", "trials", "results", "labels", "console", "ports", "own_python"),
    "sweep": ("config", "cost", "trials", "search", "backends", "results", "tracking", "console", "interrupt", "named_files", "labels"),
    "goals": ("config", "cost", "planning", "tables", "trials", "search", "results", "sweep", "labels", "named_files"),
    "stages": ("config", "cost", "trials", "backends", "sweep"),
    "cli": (
        *("config", "cost", "planning", "tables", "trials", "search", "backends", "results", "tracking", "sweep", "goals", "stages"),
        *("labels", "interrupt", "named_files", "own_python"),
    ),
    "frames": ("trials", "results", "sweep", "cli"),
    "__main__": ("cli", "own_python"),
}  # fmt: skip
"""Rooms of the launcher, likewise."""

COST = {
    "thresholds": (),
    "recomputing": ("thresholds",),
    "inputs": (),
    "parts": ("inputs",),
    "time": ("inputs", "parts"),
    "memory": ("inputs", "time", "parts"),
    "calibration": ("inputs", "time"),
    "inference": ("inputs", "time", "parts"),
    "model": ("inputs", "time", "memory", "parts"),
    "phases": ("parts", "model"),
    "normal": (),
    "uncertainty": ("parts", "normal"),
    "known": ("inputs", "uncertainty"),
    "prediction": ("inputs", "memory", "model", "phases", "calibration", "known", "uncertainty"),
    "timeline": ("inputs", "time", "model"),
}
"""Rooms of the cost model: what is asked, then seconds, then bytes."""

ORDERS = {"trainer": TRAINER, "trainer/shared": SHARED, "launcher": LAUNCHER, "launcher/cost": COST}


def imports(path: Path) -> frozenset[str]:
    """Modules that a file imports, as dotted names; ``from a import b`` counts as ``a.b``."""
    return imports_in(path.read_text())


@cache
def imports_in(text: str) -> frozenset[str]:
    """By text: most tests read the same files."""
    found: set[str] = set()
    for node in nodes_in(text):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"from {'.' * node.level}{node.module or ''} import ...: relative imports hide the arrows"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(found)


def files(*places: str, root: Path = ROOT) -> list[Path]:
    found = [p for place in places for p in ([root / place] if place.endswith(".py") else sorted((root / place).rglob("*.py")))]
    assert found, f"no source in {places}"
    return found


def inside(name: str, packages: Iterable[str]) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def prefixes(name: str) -> Iterable[str]:
    """The packages that a module is in, and the module."""
    parts = name.split(".")
    return (".".join(parts[:count]) for count in range(1, len(parts) + 1))


def offenders(paths: list[Path], forbidden: tuple[str, ...], allowed: tuple[str, ...] = ()) -> list[str]:
    return [
        f"{path.name} imports {name}"
        for path in paths
        for name in sorted(imports(path))
        if inside(name, forbidden) and not inside(name, allowed)
    ]


def rooms_of(package: str, root: Path = ROOT) -> dict[str, list[Path]]:
    """The files of each room of a package: a folder is a room, a file at the top is one too. The package's own face is none."""
    rooms: dict[str, list[Path]] = {}
    for path in files(package, root=root):
        parts = path.relative_to(root / package).with_suffix("").parts
        if parts != ("__init__",):
            rooms.setdefault(parts[0], []).append(path)
    return rooms


def broken_arrows(package: str, order: Mapping[str, tuple[str, ...]], root: Path = ROOT) -> list[str]:
    """Uses of a room that ``order`` does not name, and rooms that it does not know."""
    dotted = package.replace("/", ".")
    rooms = rooms_of(package, root)
    unknown = [f"{room} is a room without arrows" for room in rooms.keys() - order.keys()]
    known = {room: tuple(f"{dotted}.{name}" for name in (room, *order.get(room, ()))) for room in rooms}
    return unknown + [words for room, paths in rooms.items() for words in offenders(paths, (dotted,), known[room])]


def circle(graph: Mapping[str, Iterable[str]]) -> list[str]:
    """Some nodes that lead back to the first; empty when there is no circle."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def file_graph(package: str, root: Path = ROOT) -> dict[str, set[str]]:
    """Which file of a package imports which, by module. A package's ``__init__`` only gathers names, and is left out."""
    modules = {
        ".".join(path.relative_to(root).with_suffix("").parts): path for path in files(package, root=root) if path.name != "__init__.py"
    }
    named = {module: {above for name in imports(path) for above in prefixes(name)} for module, path in modules.items()}
    return {module: (named[module] & modules.keys()) - {module} for module in modules}


@pytest.mark.parametrize("package", ORDERS)
def test_the_rooms_of_a_package_are_in_a_strict_partial_order(package: str) -> None:
    assert circle(ORDERS[package]) == []


@pytest.mark.parametrize("package", ORDERS)
def test_no_room_uses_another_than_those_named(package: str) -> None:
    assert broken_arrows(package, ORDERS[package]) == []


@pytest.mark.parametrize("package", ORDERS)
def test_every_arrow_that_is_named_is_used(package: str) -> None:
    """An arrow that nobody uses would let somebody in unseen."""
    dotted = package.replace("/", ".")
    used = {room: {name for path in paths for name in imports(path)} for room, paths in rooms_of(package).items()}
    unused = {
        f"{room} -> {other}"
        for room, others in ORDERS[package].items()
        for other in others
        if not any(inside(name, (f"{dotted}.{other}",)) for name in used.get(room, ()))
    }
    assert unused == set()


@pytest.mark.parametrize("package", ["trainer", "launcher"])
def test_no_files_import_each_other_in_a_circle(package: str) -> None:
    assert circle(file_graph(package)) == []


@pytest.mark.parametrize(
    ("package", "file", "line"),
    [
        ("trainer", "trainer/comm/groups.py", "from trainer.pipeline.runtime import PipelineRuntime"),
        ("trainer", "trainer/shared/parallel/mesh.py", "import trainer.step"),
        ("launcher", "launcher/trials/store.py", "from launcher.sweep.run import run_sweep"),
        ("launcher", "launcher/backends/contract.py", "from launcher.tracking import mirror"),
        ("launcher/cost", "launcher/cost/inputs/case.py", "from launcher.cost.memory.peak import peak_memory"),
    ],
)
def test_a_planted_back_arrow_is_found(tmp_path: Path, package: str, file: str, line: str) -> None:
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(f"{(ROOT / file).read_text()}\n\ndef _later():\n    {line}\n")
    assert len(broken_arrows(package, ORDERS[package], tmp_path)) == 1


def test_a_planted_circle_of_files_is_found(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "trainer/shared/run", tmp_path / "trainer/shared/run", ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "trainer/shared/run/errors.py").open("a") as stream:
        stream.write("\n\ndef _later():\n    from trainer.shared.run.rules import check\n")
    assert circle(file_graph("trainer", tmp_path)) != []


def test_launcher_uses_only_the_language_that_it_shares_with_the_trainer() -> None:
    assert offenders(files("launcher", "hydra_plugins"), ("trainer",), ("trainer.shared",)) == []


def test_trainer_knows_nothing_of_the_launcher() -> None:
    assert offenders(files("trainer"), ("launcher", "hydra", "omegaconf", "hydra_plugins")) == []


def test_the_shared_language_needs_the_standard_library_and_yaml_alone() -> None:
    allowed = (*sys.stdlib_module_names, "yaml", "trainer.shared")
    assert [f"{path.name} imports {name}" for path in files("trainer/shared") for name in imports(path) if not inside(name, allowed)] == []


def test_processes_and_slurm_jobs_need_no_package_of_their_own() -> None:
    """A script is text: a dry run prints it wherever the launcher itself is installed."""
    allowed = (*sys.stdlib_module_names, "launcher", "trainer", "jinja2", "psutil")
    places = files("launcher/backends/local", "launcher/backends/slurm")
    assert [f"{path.name} imports {name}" for path in places for name in imports(path) if not inside(name, allowed)] == []


def test_cost_search_and_ranking_do_no_input_or_output() -> None:
    io = ("os", "subprocess", "socket", "shutil", "pathlib", "tempfile", "yaml", "csv", "mlflow", "hydra", "requests", "launcher.backends")
    pure = files("launcher/cost", "launcher/planning", "launcher/search", "launcher/results/ranking.py")
    assert offenders(pure, io) == []
    assert [f"{p.relative_to(ROOT)} opens files" for p in pure if calls_open(p)] == []


def calls_open(path: Path) -> bool:
    return any(isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "open" for node in nodes(path))


def test_no_verb_loads_a_heavy_library_before_it_is_used() -> None:
    """Most verbs answer at once, and a site needs only the libraries of its own backend."""
    code = (
        "import sys; from importlib import import_module; from launcher.cli.main import VERBS\n"
        "for verb in VERBS: import_module(f'launcher.cli.{verb}')\n"
        "import launcher.sweep.multirun, launcher.sweep.run, hydra_plugins.trireme\n"
        f"print(sorted(set({HEAVY!r}) & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=600)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_a_plan_loads_no_heavy_library() -> None:
    code = (
        "import sys; from launcher.cli.main import main\n"
        "code = main(['plan', 'recipe=gpt3_175b', 'trainer=megatron_core'])\n"
        f"print(code, sorted(set({HEAVY!r}) & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=600)
    assert done.stdout.splitlines()[-1] == "0 []", done.stdout + done.stderr
