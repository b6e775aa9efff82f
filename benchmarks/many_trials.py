"""How long `rank`, `status` and `report` take for a sweep of many trials, as whole commands, and how large the report is.

    python -m benchmarks.many_trials [--trials 1000] [--rounds 3]

The trials are made by hand as launcher and trainer leave them, nine of ten measured, the others failed, over several layouts and seeds.
Nothing is trained. Processor seconds are those of the command's one process, and as good as its time on a machine that does nothing else;
exit code 1 where they, or the report's bytes, are above a limit.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.history.__main__ import ROOT
from launcher.trials.store import Point
from tests.results.trial_files import SweepOnDisk, point

LIMITS = {"rank": 2.0, "status": 2.0, "report": 10.0}
"""Processor seconds of each command."""
LARGEST = 5e6
"""Bytes of the report."""
LAYOUTS = ((1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4))


def make(folder: Path, trials: int) -> None:
    """Writes a sweep of so many trials."""
    sweep = SweepOnDisk(folder)
    for number in range(trials):
        planned = point(*LAYOUTS[number % len(LAYOUTS)], predicted={"step_time_s": 0.2, "interval_s": [0.1, 0.4], "memory_bytes": 3e7})
        assert planned.config is not None
        config = replace(planned.config, run=replace(planned.config.run, seed=number // len(LAYOUTS)))
        one = Point((*planned.overrides, f"run.seed={number // len(LAYOUTS)}"), config, predicted=planned.predicted)
        if number % 10 == 9:
            sweep.failed(one)
        else:
            sweep.done(one, 0.1 + 0.001 * (number * 37 % 101))


def main() -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.many_trials", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder, page = Path(temporary, "runs"), Path(temporary, "report.html")
        make(folder, options.trials)
        words = {verb: [verb, "--dir", str(folder)] for verb in LIMITS}
        words["report"] += ["-o", str(page)]
        slow = []
        print(f"{options.trials} trials, median of {options.rounds} whole commands{'':6} seconds   of a processor")
        for verb, limit in LIMITS.items():
            whole, own = map(statistics.median, zip(*(timed(words[verb]) for _ in range(options.rounds))))
            print(f"  {verb:44} {whole:8.2f} {own:16.2f}")
            slow += [verb] if own > limit else []
        print(f"  the report has {page.stat().st_size / 1e6:.2f} MB")
        return 1 if slow or page.stat().st_size > LARGEST else 0


def timed(words: list[str]) -> tuple[float, float]:
    """Returns the seconds of a command of this tree, and those of a processor."""
    begin, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "launcher", *words], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.perf_counter() - begin, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    sys.exit(main())
