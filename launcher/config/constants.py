"""The constants of the cost model as they ship: conf/constants.yaml, those of inference conf/inference.yaml."""

from __future__ import annotations

from typing import Any

from launcher.config.folders import shipped


def constant_entries(file: str = "constants") -> dict[str, dict[str, Any]]:
    """By name: value, default, spread, kind (pinned, fitted or set) and source."""
    return shipped(file)


def constant_values(file: str = "constants") -> dict[str, float]:
    """Values by name."""
    return {name: float(entry["value"]) for name, entry in shipped(file).items()}
