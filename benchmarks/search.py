"""A real search on this machine against the exhaustive grid of the same layouts.

    python -m benchmarks.search [--ranks 4] [--rounds 2] [--hardware NAME] [KEY=VALUE ...]

Measures the machine as ``trireme doctor`` does (or takes ``--hardware``), searches a grid of a few dozen layouts of a small GPT on local
ranks, then runs the whole grid, each layout as often as ``--rounds`` says, and prints both: the layouts they find, how many trials and
rank-seconds they took, and what was predicted. A layout's time is the shortest of its rounds; the rounds' differences are the noise.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import tempfile

from launcher.cli.doctor import asked
from launcher.config import Config, compose, resolve
from launcher.cost.calibration import hardware
from launcher.search.contest import Contest, contest
from launcher.search.naming import name_of, overrides_of
from launcher.search.plan import plan
from launcher.search.policy import Trial
from launcher.search.wanted import columns_wanted
from launcher.sweep.errand import run_errand
from launcher.sweep.run import Point, run_sweep
from launcher.sweep.search import Found, measurement, search

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
MODEL = ["model=gpt_tiny", "model.hidden=192", "model.heads=4", "model.vocab=2048", "run.global_batch=16"]
RUN = ["data=synthetic", "run.steps=12", "run.warmup_steps=2", "run.timeline=false", "search.start_s=2"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--hardware", help="a hardware file; without one the machine is measured first")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = [f"cluster.gpus_per_node={arguments.ranks}", f"sweep.dir={folder}"]
        place += [f"hardware={arguments.hardware}"] if arguments.hardware else []
        config = compose([*MODEL, *RUN, *place, *arguments.overrides])
        if not arguments.hardware:
            config = measured(config)
        candidates = contest(config, plan(config), columns_wanted(GRID))
        found = search("search", candidates)
        rounds = [exhaustive(candidates, number) for number in range(arguments.rounds)]
    report(candidates, found, rounds)


def measured(config: Config) -> Config:
    """``config`` on this machine as the probe finds it."""
    print("measuring the machine", file=sys.stderr)
    figures = run_errand(asked(config), "doctor", lambda *_: None)["probe"]
    return dataclasses.replace(config, cluster=dataclasses.replace(config.cluster, hardware=hardware("here", figures)))


def exhaustive(candidates: Contest, number: int) -> tuple[list[float], float]:
    """Step time of every layout, and the rank-seconds that all of them took."""
    configs = [resolve(candidates.trial_config(Trial(i, True, None))) for i in range(len(candidates.candidates))]
    points = [Point(tuple(overrides_of(c.layout)), c) for c in configs]
    settings = dataclasses.replace(candidates.config.sweep, max_parallel=1, rerun=True)
    results = [measurement(record, 0.0) for record in run_sweep(f"grid{number}", points, settings)]
    return [result.seconds for result in results], 3600 * sum(result.gpu_hours for result in results)


def report(candidates: Contest, found: Found, rounds: list[tuple[list[float], float]]) -> None:
    """Every layout, then the two results side by side."""
    best = [min(times) for times in zip(*(seconds for seconds, _ in rounds), strict=True)]
    noise = statistics.median(max(times) / min(times) - 1 for times in zip(*(seconds for seconds, _ in rounds), strict=True))
    order = sorted(range(len(best)), key=lambda i: best[i])
    tried = {trial.index: place for place, (trial, _, _) in enumerate(found.trials, 1)}
    for i in order:
        predicted, measured_s = candidates.candidates.seconds[i], found.policy.tried.get(i)
        search_says = f"trial {tried[i]}: {measured_s:.4f} s" if measured_s else ""
        print(
            f"{best[i]:9.4f} s  predicted {predicted:9.4f} s ({predicted / best[i] - 1:+6.1%})  {name_of(candidates.layout(i)):<32} {search_says}"
        )
    chosen = found.policy.ranking()[0]
    errors = [abs(candidates.candidates.seconds[i] / best[i] - 1) for i in order]
    print(f"{len(order)} layouts; median error of the first predictions {statistics.median(errors):.1%}; noise between rounds {noise:.1%}")
    print(
        f"grid:   {name_of(candidates.layout(order[0]))}, {best[order[0]]:.4f} s; {len(order)} trials, {rounds[0][1]:.0f} rank-seconds a round"
    )
    spent = 3600 * found.policy.gpu_hours
    print(
        f"search: {name_of(candidates.layout(chosen))}, {best[chosen]:.4f} s, {best[chosen] / best[order[0]] - 1:.1%} behind; "
        f"{found.policy.trials} trials ({found.policy.trials / len(order):.0%}), {spent:.0f} rank-seconds ({spent / rounds[0][1]:.0%}); {found.reason}"
    )


if __name__ == "__main__":
    main()
