"""One step of all ranks on a common clock; the report draws it next to the simulated schedule.

``python -m trainer.measure.timeline timeline.json > trace.json`` turns it into a trace for Perfetto or chrome://tracing.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from trainer.comm.collectives import Group
from trainer.shared.records.trial_files import TIMELINE
from trainer.shared.run.files import write_json

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
ROUNDS = 5


def align(world: Group) -> float:
    """Returns seconds from this rank's ``time.perf_counter`` to rank 0's. Collective. Ranks of one host share it; between hosts it is the
    median difference after several barriers, to a fraction of a barrier's time."""
    if world.size == 1:
        return 0.0
    readings = []
    barrier = torch.zeros(1, device="cuda" if torch.distributed.get_backend(world.handle) == "nccl" else "cpu")
    for _ in range(ROUNDS):
        world.all_reduce(barrier).wait()
        barrier.item()
        readings.append(time.perf_counter())
    boot = BOOT_ID.read_text().strip() if BOOT_ID.exists() else str(world.rank)
    everyone = world.gather_objects((boot, readings))
    if everyone[0][0] == boot:
        return 0.0
    return statistics.median(first - own for first, own in zip(everyone[0][1], readings))


def write_timeline(out: Path, step: int, rank: Any, clock_offset: float) -> None:
    """``timeline.json`` of the step that has just ended. Collective."""
    world, layout, recorder = rank.groups.world, rank.config.layout, rank.recorder
    begins = world.gather_objects(recorder.host_start + clock_offset)
    shift = recorder.host_start + clock_offset - min(begins)
    events = recorder.events(world.rank, rank.groups.at["pipeline"], layout.pipeline, shift)
    everyone = world.gather_objects(events)
    if world.index == 0:
        write_json(out / TIMELINE, {"step": step, "schedule": layout.schedule, "events": [e for own in everyone for e in own]})


def chrome_trace(timeline: dict[str, Any]) -> dict[str, Any]:
    """Returns the Chrome trace of a timeline: a process per rank, with one row for computation and one for overlapping work."""
    events = []
    for event in timeline["events"]:
        overlapped = event["kind"] in ("send", "receive", "gather", "reduce")
        label = event["kind"] + (f" {event['chunk']}.{event['micro_batch']}" if event["micro_batch"] >= 0 else "")
        events.append(
            {
                "ph": "X",
                "name": label,
                "cat": event["kind"],
                "pid": event["rank"],
                "tid": int(overlapped),
                "ts": event["start_s"] * 1e6,
                "dur": (event["end_s"] - event["start_s"]) * 1e6,
                "args": event,
            }
        )
    ranks = sorted({event["rank"] for event in timeline["events"]})
    names = [{"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}} for rank in ranks]
    about = {"step": timeline["step"], "schedule": timeline["schedule"]}
    return {"traceEvents": names + events, "displayTimeUnit": "ms", "otherData": about}


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python -m trainer.measure.timeline timeline.json > trace.json", file=sys.stderr)
        return 2
    print(json.dumps(chrome_trace(json.loads(Path(sys.argv[1]).read_text()))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
