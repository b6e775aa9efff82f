"""A real search on this machine against the exhaustive grid of the same layouts.

    python -m benchmarks.search [--hardware NAME] [--ranks 4] [KEY=VALUE ...]

Searches a small grid of layouts on local CPU (or GPU) ranks, then runs what is left of the grid, and prints how far the found layout
is behind the grid's best and how many trials each took. ``--hardware``: a file with rates measured on this machine, for honest predictions.
A busy machine disturbs the timings: run it on a quiet one.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile

from launcher.config import compose, resolve
from launcher.search.contest import Contest, contest
from launcher.search.naming import name_of, overrides_of
from launcher.search.plan import plan
from launcher.search.policy import Trial
from launcher.search.wanted import columns_wanted
from launcher.sweep.run import Point, run_sweep
from launcher.sweep.search import measured_steps, measurement, noise_of, search

GRID = {
    "layout.tensor": [1, 2, 4],
    "layout.pipeline": [1, 2, 4],
    "layout.micro_batch": [1, 2, 4],
    "layout.schedule": ["1f1b"],
    "layout.recompute": ["none"],
    "layout.sequence_parallel": [False],
    "layout.sharding.params": [1],
    "layout.sharding.grads": [1],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--hardware", default="cpu")
    parser.add_argument("--ranks", type=int, default=4)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        base = ["data=synthetic", "model=gpt_mini", "run.global_batch=16", "run.steps=12", "search.start_s=5", f"sweep.dir={folder}"]
        place = [f"hardware={arguments.hardware}", f"cluster.gpus_per_node={arguments.ranks}"]
        config = compose([*base, *place, *arguments.overrides])
        candidates = contest(config, plan(config), columns_wanted(GRID))
        found = search("search", candidates)
        measured = exhaustive(candidates)
    report(candidates, [trial.index for trial, _, _ in found.trials], measured)


def exhaustive(candidates: Contest) -> dict[int, tuple[float, float]]:
    """Step time and relative noise of every layout; those that the search has measured are not run again."""
    configs = [resolve(candidates.trial_config(Trial(i, True, None))) for i in range(len(candidates.candidates))]
    points = [Point(tuple(overrides_of(c.layout)), c) for c in configs]
    settings = dataclasses.replace(candidates.config.sweep, max_parallel=1)
    records = run_sweep("grid", points, settings)
    return {i: (measurement(record, 0.0).seconds, noise_of(measured_steps(record))) for i, record in enumerate(records)}


def report(candidates: Contest, searched: list[int], measured: dict[int, tuple[float, float]]) -> None:
    order = sorted(measured, key=lambda i: measured[i][0])
    for i in order:
        seconds, noise = measured[i]
        predicted = candidates.candidates.seconds[i]
        mark = f"trial {searched.index(i) + 1}" if i in searched else ""
        print(f"{seconds:9.4f} s ±{noise:.1%}  predicted {predicted:9.4f} s  {name_of(candidates.layout(i)):<40} {mark}")
    chosen = min((i for i in searched), key=lambda i: measured[i][0])
    behind = measured[chosen][0] / measured[order[0]][0] - 1
    print(f"search: {len(searched)} trials of {len(measured)}; its best is {behind:.1%} behind the grid's best")


if __name__ == "__main__":
    main()
