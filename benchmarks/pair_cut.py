"""A step of an encoder and its decoder cut into stages by the work of blocks, against half and half.

    python benchmarks/pair_cut.py [--stages 4] [--rounds 3] [--share 0.45]

An encoder's block reads four times as many tokens as its decoder writes, so that stages of equally many blocks wait for those of
the encoder. Both cuts train alternately; a step's time is the median of a run's. Every rank has ``--share`` of a core to itself, as
it would have a device (control groups of Linux, as root; their sum must leave some processor over).
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

ROOT = Path(__file__).parents[1]
GROUPS = Path("/sys/fs/cgroup")
PERIOD_US = 20_000
CUTS = ("equal", "cost")
BLOCKS = 8
"""Of each stack."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--share", type=float, default=0.45, help="of a core, for each rank")
    given = parser.parse_args()
    groups = [limited(f"pair_cut_{rank}", given.share) for rank in range(given.stages)]
    ratios = []
    for _ in range(given.rounds):
        half, cost = (step_seconds(cut, groups) for cut in CUTS)
        ratios.append(half / cost)
        print(f"half and half {half:.2f} s, by work {cost:.2f} s: {ratios[-1]:.3f}", flush=True)
    print(f"half and half takes {statistics.median(ratios):.2f} times as long ({min(ratios):.2f} to {max(ratios):.2f})")
    for group in groups:
        group.rmdir()
    return 0


def limited(name: str, share: float) -> Path:
    """A control group whose processes get that share of a core."""
    first = not (GROUPS / "cgroup.controllers").exists()
    group = (GROUPS / "cpu" if first else GROUPS) / name
    group.mkdir(exist_ok=True)
    quota = int(share * PERIOD_US)
    if first:
        (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(quota))
    else:
        (group / "cpu.max").write_text(f"{quota} {PERIOD_US}")
    return group


def step_seconds(cut: str, groups: list[Path]) -> float:
    """Median seconds of a step with a rank in each group."""
    out = Path(tempfile.mkdtemp())
    model = {
        "family": "t5",
        "layers": 2 * BLOCKS,
        "encoder_layers": BLOCKS,
        "hidden": 256,
        "heads": 4,
        "ffn": 688,
        "vocab": 1024,
        "seq": 256,
    }
    config = {
        "model": model,
        "layout": {"pipeline": len(groups), "micro_batch": 1, "balance": cut},
        "data": {"kind": "synthetic"},
        "run": {"steps": 5, "warmup_steps": 2, "global_batch": 8},
    }
    (out / "config.yaml").write_text(json.dumps(config))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    meeting = {"WORLD_SIZE": str(len(groups)), "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ranks = []
    for rank, group in enumerate(groups):
        command = [
            "sh",
            "-c",
            'echo $$ > "$0/cgroup.procs" && exec "$@"',
            str(group),
            sys.executable,
            "-m",
            "trainer",
            str(out / "config.yaml"),
        ]
        ranks.append(subprocess.Popen(command, env=os.environ | meeting | {"RANK": str(rank)}, stdout=subprocess.DEVNULL))
    if any(rank.wait() for rank in ranks):
        raise SystemExit(f"the cut {cut} failed")
    return statistics.median(json.loads((out / "result.json").read_text())["step_times_s"])


if __name__ == "__main__":
    sys.exit(main())
