"""Shell commands that start an engine with a row of a plan, and the extra steps on several nodes."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from launcher.config.engine import EngineProfile, filled
from launcher.config.inference import WorkloadConfig
from launcher.planning.serving.plan import InferencePlan

MOST_AT_ONCE = 256
"""The most requests in flight per replica that a rendered command allows if they arrive at random."""


def across_nodes(planned: InferencePlan, row: int, each: int, engine: EngineProfile | None = None) -> str:
    """Returns the extra steps for a replica with more ranks than the ``each`` devices of a node; empty if one node is enough."""
    engine, layout = engine or planned.case.engine, planned.table[row]
    ranks = int(layout["tensor"]) * int(layout["pipeline"])
    if ranks <= each:
        return ""
    nodes = -(-ranks // each)
    needs = filled(engine, "across", {"nodes": nodes, "ranks": ranks, "each": each})
    return f"a replica is on {nodes} nodes, and needs {needs}"


def command(planned: InferencePlan, row: int, work: WorkloadConfig, checkpoint: str, engine: EngineProfile | None = None) -> str:
    """Returns the shell command that starts ``engine``, by default the plan's, with the layout of a row."""
    case = planned.case
    layout, engine = case.table[row], engine or case.engine
    batch, room = int(layout["batch"]), max(planned.estimate.room[row], 1)
    if work.rate is not None:  # arrivals are bursty: allow as many as fit, at least the mean number in flight
        batch = max(batch, int(min(room, MOST_AT_ONCE)))
    elif engine.batching == "continuous":  # requests beyond the room wait; a higher limit would not run more at once
        batch = int(min(batch, room))
    tensor, pipeline = int(layout["tensor"]), int(layout["pipeline"])
    words: Mapping[str, object] = {
        "model": shlex.quote(checkpoint),
        "tensor": tensor,
        "pipeline": pipeline,
        "ranks": tensor * pipeline,
        "batch": batch,
        "length": work.longest or int(case.input + case.output),
        "tokens": int(case.output),
        "weights": engine.formats.get(case.weights, ""),
        "kv": engine.kv_formats.get(case.kv, ""),
    }
    comes = work.rate is not None or work.concurrency is not None
    return filled(engine, "server" if comes and engine.server else "command", words)
