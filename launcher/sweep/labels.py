"""Short words for a person: a layout, a length of time, a trial's state. Shared by progress, status and tables."""

from __future__ import annotations

import time
from typing import Any

from launcher.sweep.store import Record


def short_layout(layout: dict[str, Any]) -> str:
    """``t2 p2 d2 b1 1f1b +sp recompute=full zero=1/1/2``: degrees and micro-batch always, the rest where it differs from plain."""
    if not layout:
        return "?"
    words = [f"t{layout['tensor']}", f"p{layout['pipeline']}", f"d{layout['data']}", f"b{layout['micro_batch']}"]
    if layout["virtual_pipeline"] > 1:
        words.insert(2, f"v{layout['virtual_pipeline']}")
    if layout["pipeline"] > 1:
        words.append(layout["schedule"])
    if layout["sequence_parallel"]:
        words.append("+sp")
    if layout["recompute"] != "none":
        words.append(f"recompute={layout['recompute']}")
    sharding = layout["sharding"]
    if sharding["optimizer"] > 1:
        words.append(f"zero={sharding['params']}/{sharding['grads']}/{sharding['optimizer']}")
    return " ".join(words)


def seconds(value: float | None) -> str:
    """``0.0123`` as ``12.3 ms``, 75 as ``1:15``, 3700 as ``1:01:40``; empty for None."""
    if value is None:
        return ""
    if value < 1:
        return f"{value * 1000:.3g} ms"
    if value < 60:
        return f"{value:.3g} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes}:{rest:02}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def elapsed(record: Record) -> float | None:
    """Seconds from the start (or submission) of the newest attempt to its end, or to now."""
    began = record.started or record.submitted
    return None if began is None else max(0.0, (record.ended or time.time()) - began)


def state(record: Record) -> str:
    """``failed (out of memory)``."""
    return record.status.value + (f" ({record.reason.value})" if record.reason else "")


def total_steps(record: Record) -> int | None:
    """Steps that the trial is to make."""
    steps = record.config.get("run", {}).get("steps")
    return steps if isinstance(steps, int) else None
