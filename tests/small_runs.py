"""The smallest run that is still a transformer, as plain data, and how many ranks a layout takes."""

from __future__ import annotations

from typing import Any


def small(
    steps: int = 3,
    precision: str = "fp64",
    model: dict[str, Any] | None = None,
    run: dict[str, Any] | None = None,
    optimizer: dict[str, Any] | None = None,
    **layout: Any,
) -> dict[str, Any]:
    """A run of 2 blocks and batches of 4; keyword arguments are the layout."""
    return {
        "model": {"layers": 2, "hidden": 32, "heads": 4, "vocab": 101, "seq": 16} | (model or {}),
        "layout": {"micro_batch": 1} | layout,
        "data": {"kind": "synthetic"},
        "optimizer": {"lr": 0.01, "warmup_steps": 3} | (optimizer or {}),
        "run": {"steps": steps, "warmup_steps": 1, "precision": precision, "global_batch": 4, "bucket_mb": 0.05} | (run or {}),
    }


def ranks(layout: dict[str, Any]) -> int:
    """Ranks that a layout takes."""
    return layout.get("tensor", 1) * layout.get("context", 1) * layout.get("pipeline", 1) * layout.get("data", 1)
