"""Idle time of a measured pipeline against what its schedule predicts, for every schedule.

    python benchmarks/pipeline_idle.py [--stages 2] [--micro-batches 8] [--rounds 3]

Each schedule trains a model whose stages are equally heavy, and records one step's timeline; the shortest step of some rounds counts.
The prediction is the simulation of the same list of actions (``trainer.shared.parallel.simulate``) with the mean time of each kind of
action on each stage. Needs a core per stage that nobody else uses: on a busy machine, put ``chrt --fifo 20`` before it (as root).
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero_bubble": 1}
COMPUTE = ("forward", "backward", "input_grad", "weight_grad")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    print(f"{'schedule':14}{'predicted':>10}{'measured':>10}{'difference':>12}")
    for schedule, chunks in SCHEDULES.items():
        rounds = [trace(schedule, arguments.stages, chunks, arguments.micro_batches) for _ in range(arguments.rounds)]
        events = min(rounds, key=makespan)
        predicted = prediction(events, schedule, arguments.stages, chunks, arguments.micro_batches)
        measured = idle(events, arguments.stages)
        print(f"{schedule:14}{predicted:10.3f}{measured:10.3f}{measured / predicted - 1:+12.1%}")
    return 0


def trace(schedule: str, stages: int, chunks: int, micro_batches: int) -> list[dict[str, Any]]:
    """Train two steps on as many processes as stages; the computations of the second."""
    out = Path(tempfile.mkdtemp())
    config = {
        "model": {"layers": 4 * stages, "hidden": 384, "heads": 6, "vocab": 512, "seq": 256, "tied": False},
        "layout": {"pipeline": stages, "virtual_pipeline": chunks, "schedule": schedule, "micro_batch": 4},
        "data": {"kind": "synthetic"},
        "run": {"steps": 2, "warmup_steps": 0, "global_batch": 4 * micro_batches},
    }
    (out / "config.yaml").write_text(json.dumps(config))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    meeting = {"WORLD_SIZE": str(stages), "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "trainer", str(out / "config.yaml")]
    ranks = [subprocess.Popen(command, env=os.environ | meeting | {"RANK": str(rank)}, stdout=subprocess.DEVNULL) for rank in range(stages)]
    if any(rank.wait() for rank in ranks):
        raise SystemExit(f"{schedule} failed")
    events = json.loads((out / "timeline.json").read_text())["events"]
    return [event for event in events if event["kind"] in COMPUTE and event["micro_batch"] >= 0]


def prediction(events: list[dict[str, Any]], schedule: str, stages: int, chunks: int, micro_batches: int) -> float:
    """Idle share of the simulated schedule with the measured mean times."""
    sys.path.insert(0, str(ROOT))
    from trainer.shared.parallel.schedule import build
    from trainer.shared.parallel.simulate import Times, idle_fraction, simulate

    times = {}
    for kind in COMPUTE:
        lengths = [[e["end_s"] - e["start_s"] for e in events if (e["kind"], e["stage"]) == (kind, s)] for s in range(stages * chunks)]
        times[kind] = [statistics.mean(each) if each else 0.0 for each in lengths]
    return idle_fraction(simulate(build(schedule, stages, chunks, micro_batches), Times(**times)))


def idle(events: list[dict[str, Any]], ranks: int) -> float:
    """Share of ranks x makespan in which no rank computed."""
    return 1 - sum(e["end_s"] - e["start_s"] for e in events) / (ranks * makespan(events))


def makespan(events: list[dict[str, Any]]) -> float:
    """Seconds from the first computation to the end of the last."""
    return max(e["end_s"] for e in events) - min(e["start_s"] for e in events)


if __name__ == "__main__":
    sys.exit(main())
