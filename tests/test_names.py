"""Nothing in the tool rests on the name of a source, a model, a trainer or a device: those are data."""

from __future__ import annotations

import ast
import csv
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.config.hardware import shipped_hardware
from launcher.config.trainers import OWN, engine, engine_names, profile, profile_names
from tests.sources import nodes

pytestmark = pytest.mark.xdist_group("sources")  # one process parses them
ROOT = Path(__file__).resolve().parent.parent
RAW = sorted((ROOT / "benchmarks" / "published").glob("*data/*.csv"))


def names() -> set[str]:
    """Names of trainers, devices, sources and models, as files and tables have them."""
    rows = [row for path in RAW for row in csv.DictReader(path.open())]
    devices = {word for stem, device in shipped_hardware().items() if not device.host for word in (stem, device.name)}
    trainers = {word for name in profile_names() for word in (name, profile(name).name)}
    engines = {word for name in engine_names() for word in (name, engine(name).name)}
    sources = {row.get("source", "").split(" (")[0] for row in rows} | {row.get("model") or row["model_path"] for row in rows}
    return {word.lower() for word in devices | trainers | engines | sources} - {OWN, "unknown", ""}


def literals(path: Path) -> Iterator[str]:
    """Strings of a file that are compared or looked up: all but documentation and sentences."""
    for node in nodes(path):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_no_literal_of_the_tool_is_such_a_name() -> None:
    known = names()
    assert len(known) > 60
    found = [
        f"{path.relative_to(ROOT)}: {text!r}"
        for path in sorted((ROOT / "launcher").rglob("*.py"))
        for text in literals(path)
        if text.strip("\\b^$").lower() in known
    ]
    assert found == []


def test_rooms_that_predict_match_no_patterns() -> None:
    imports = [
        f"{path.relative_to(ROOT)}"
        for room in ("cost", "tables", "search", "planning")
        for path in sorted((ROOT / "launcher" / room).rglob("*.py"))
        for node in nodes(path)
        if isinstance(node, ast.Import) and any(alias.name in ("re", "fnmatch") for alias in node.names)
    ]
    assert [name for name in imports if name != "launcher/planning/layout_names.py"] == [], "words of layouts are parsed in naming.py alone"
