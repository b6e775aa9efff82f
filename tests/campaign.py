"""Runs the longer proofs, one area after the other: ``python -m tests.campaign [AREA ...] [--out FILE]``.

The gate (``make test``) has the smallest real form of every promise. Here are its wider forms: tests marked ``campaign("AREA")``, and tests
of the gate with more draws, from a seed that no run before had. Each area adds a line to benchmarks/history/campaign.json: commit, date,
counts, worst figures, seconds; the documentation shows the newest line of each. Exit code 1 if anything failed.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
HISTORY = ROOT / "benchmarks" / "history" / "campaign.json"
SEED = "{seed}"

FRESH = ["--hypothesis-profile", "fresh", "--hypothesis-seed", SEED, "--layout-seed", SEED, "-o", "timeout=7200"]
"""Words of every run: examples that no run before had, and time for them."""
AREAS = {
    "layouts": "drawn layouts, of training and of tuning, against one process",
    "compiler": "every compiled form with the real compiler",
    "checkpoints": "kills and power cuts while checkpoints are written",
    "generate": "generation and serving under more layouts",
    "draws": "properties of pure functions with new examples",
    "words": "every sentence about wrong input, through the whole program",
    "launchers": "launchers killed at random moments, full disks, Ctrl-C, other trainers",
    "tracking": "MLflow: databases, servers and pages that fail",
    "slurm": "drills on a real Slurm",
    "kubernetes": "drills on a real Kubernetes",
    "docs": "the wheel, a corpus of the whole library",
    "planted": "planted defects, each of which the gate must catch",
}
"""What each proves."""
WORDS = {"layouts": ["--layouts", "400"], "draws": ["-m", "not slow"]}
"""What an area's run is told beside FRESH. Draws are those of the gate's tests; all others run the tests that are marked for them."""


def run_area(area: str, seed: int, workers: int) -> dict[str, Any]:
    """Run one area whole; its line of the history."""
    began, before = time.monotonic(), _processor_seconds()
    if area == "planted":
        found = {"tests": _planted(workers), "worst": {}}
    else:
        words = [*([] if area == "draws" else ["--campaign", area]), *WORDS.get(area, []), *FRESH]
        found = _pytest(["tests", *(word.replace(SEED, str(seed)) for word in words), "-n", str(workers), "--dist", "loadgroup"])
    return {
        "area": area,
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "commit": _commit(),
        "seed": seed,
        "tests": dict(sorted(found["tests"].items())),
        "worst": found["worst"],
        "seconds": round(time.monotonic() - began),
        "cpu_seconds": round(_processor_seconds() - before),
    }


def _pytest(words: list[str]) -> dict[str, Any]:
    """One run of pytest: what tests/accounting.py writes of it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "summary.json"
        done = subprocess.run([sys.executable, "-m", "pytest", *words, "--summary", str(path)], cwd=ROOT)
        if done.returncode == 5:  # nothing is marked for this area
            return {"tests": {}, "worst": {}}
        if not path.exists():
            return {"tests": {"error": 1}, "worst": {}}
        return dict(json.loads(path.read_text()))


def _planted(workers: int) -> dict[str, int]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "planted.json"
        subprocess.run([sys.executable, "-m", "tests.planted", "--jobs", str(workers), "--json", str(path)], cwd=ROOT)
        verdicts = json.loads(path.read_text()) if path.exists() else []
    return planted_counts(verdicts)


def planted_counts(verdicts: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Defects that were caught, those that escaped (``failed``), and tests that fail without any (``error``)."""
    defects = Counter("caught" if verdict["caught"] else "failed" for verdict in verdicts if verdict["room"])
    spoilt = sum(verdict["caught"] for verdict in verdicts if not verdict["room"])
    return dict(defects) | ({"error": spoilt} if spoilt else {}) if defects else {"error": 1}


def failed(line: dict[str, Any]) -> bool:
    """True if anything of an area failed, or nothing of it ran."""
    return not line["tests"] or any(line["tests"].get(word) for word in ("failed", "error"))


def _commit() -> str:
    """The commit, with a plus where the tree has changes."""
    found = subprocess.run(["git", "describe", "--always", "--dirty=+"], cwd=ROOT, capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


def _processor_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def history(path: Path = HISTORY) -> list[dict[str, Any]]:
    """All lines, the oldest first."""
    return list(json.loads(path.read_text())) if path.exists() else []


def newest(lines: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The newest line of each area."""
    return {line["area"]: line for line in lines}


def add(line: dict[str, Any], path: Path = HISTORY) -> None:
    """Append to the history: a list with one line per area and run, so that a change reads well."""
    lines = [*history(path), line]
    path.write_text("[\n" + ",\n".join(json.dumps(one) for one in lines) + "\n]\n")


def page(lines: list[dict[str, Any]]) -> str:
    """The page of the documentation: the newest line of each area."""
    found = newest(lines)
    text = [
        "# Campaign",
        "",
        "Every change passes the gate, `make test`. `make campaign` runs the longer proofs: more draws, more kills, larger sweeps, the real",
        "compiler, planted defects. The newest run of each area:",
        "",
        "| area | what it proves | date | commit | tests | worst | time |",
        "|---|---|---|---|---|---|---|",
    ]
    for area, what in AREAS.items():
        line = found.get(area)
        cells = [line["date"], f"`{line['commit']}`", _counts(line), _figures(line), _minutes(line)] if line else ["not yet run", *[""] * 4]
        text.append(f"| {area} | {what} | " + " | ".join(cells) + " |")
    return "\n".join(text) + "\n"


def _counts(line: dict[str, Any]) -> str:
    return ", ".join(f"{count:,} {word}" for word, count in line["tests"].items())


def _figures(line: dict[str, Any]) -> str:
    return "; ".join(f"{name} {value:.2g}" for name, value in sorted(line["worst"].items()))


def _minutes(line: dict[str, Any]) -> str:
    return f"{line['seconds'] / 60:.0f} min ({line['cpu_seconds'] / 60:.0f} of processors)"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("python -m tests.campaign", description="Run the longer proofs.")
    parser.add_argument("areas", nargs="*", metavar="AREA", help=f"one or more of {', '.join(AREAS)}; all by default")
    parser.add_argument("--workers", type=int, default=3, help="test processes")
    parser.add_argument("--seed", type=int, default=None, help="of draws; by default the seconds of today's clock")
    parser.add_argument("--out", type=Path, default=HISTORY, help="the history that lines are added to")
    options = parser.parse_args(argv)
    if unknown := sorted(set(options.areas) - set(AREAS)):
        parser.error(f"AREA {', '.join(unknown)} is not known; choose from {', '.join(AREAS)}")
    seed, bad = options.seed or int(time.time()) % 1_000_000, []
    for area in options.areas or AREAS:
        line = run_area(area, seed, options.workers)
        add(line, options.out)
        print(f"campaign {area}: {_counts(line) or 'nothing ran'}; {_minutes(line)}", flush=True)
        bad += [area] * failed(line)
    print(f"campaign: {', '.join(bad)} failed (draw again with --seed {seed})" if bad else "campaign: all areas passed")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
