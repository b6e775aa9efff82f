"""The shipped constants of the cost model: conf/constants.yaml, and for inference conf/inference.yaml."""

from __future__ import annotations

from typing import Any

from launcher.config.folders import shipped


def constant_entries(file: str = "constants") -> dict[str, dict[str, Any]]:
    """Returns value, default, spread, kind (pinned, fitted or set) and source of each constant, by name."""
    return shipped(file)


def constant_values(file: str = "constants") -> dict[str, float]:
    """Returns the value of each constant, by name."""
    return {name: float(entry["value"]) for name, entry in shipped(file).items()}
