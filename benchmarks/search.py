"""A real search on this machine against the exhaustive grid of the same layouts.

    python -m benchmarks.search [--ranks 4] [--rounds 2] [--busy] [--hardware NAME] [KEY=VALUE ...]

Measures the machine as ``trireme doctor`` does (or takes ``--hardware``), searches a grid of a few dozen layouts of a small GPT on local
ranks, then runs the whole grid, each layout as often as ``--rounds`` says, and prints both: the layouts they find, how many trials and
rank-seconds they took, and what was predicted. A layout's time is the shortest of its rounds; the rounds' differences are the noise.

Who else uses the machine slows some layouts more than others. ``--busy`` runs the grid once more with two steps only: what longer trials
take of the processor besides, over the cores, is the step time of a machine that the ranks fill and that nobody else uses.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil

from launcher.backends.pool import Backends
from launcher.cli.doctor import asked
from launcher.config import Config, compose, resolve
from launcher.cost.calibration import hardware
from launcher.planning.layout_filter import columns_wanted, widen_space
from launcher.planning.layout_names import name_of, overrides_of
from launcher.planning.plan import plan
from launcher.search.policy import SearchTrial
from launcher.search.problem import SearchProblem, search_problem
from launcher.sweep.oneoff import run_job
from launcher.sweep.run import Point, run_sweep
from launcher.sweep.search import SearchOutcome, measurement, search
from launcher.trials.store import Record

GRID: dict[str, list[Any]] = {
    "layout.tensor": [1, 2, 4],
    "layout.pipeline": [1, 2, 4],
    "layout.micro_batch": [1, 2, 4],
    "layout.schedule": ["1f1b"],
    "layout.recompute": ["none"],
    "layout.sequence_parallel": [False],
    "layout.sharding.params": [1],
    "layout.sharding.grads": [1],
}
MODEL = ["model=gpt_tiny", "model.vocab=2048", "run.global_batch=16"]
RUN = ["data=synthetic", "run.steps=12", "run.warmup_steps=2", "run.timeline=false", "search.start_s=2"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--hardware", help="a hardware file; without one the machine is measured first")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--busy", action="store_true", help="also by processor seconds, for machines that others use")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = [f"cluster.gpus_per_node={arguments.ranks}", f"sweep.dir={folder}"]
        place += [f"hardware={arguments.hardware}"] if arguments.hardware else []
        config = compose([*MODEL, *RUN, *place, *arguments.overrides])
        if not arguments.hardware:
            config = measured(config)
        wanted = columns_wanted(GRID)
        candidates = search_problem(config, plan(config, widen_space(wanted, config.search.space), wanted))
        with Backends() as backends:
            found = search("search", candidates, backends)
            rounds = [exhaustive(candidates, number, backends) for number in range(arguments.rounds)]
            busy = busy_steps(candidates, rounds, backends) if arguments.busy else None
    report(candidates, found, rounds, busy)


def measured(config: Config) -> Config:
    """``config`` on this machine as the probe finds it."""
    print("measuring the machine", file=sys.stderr)
    figures = run_job(asked(config), "doctor", lambda *_: None)["probe"]
    return dataclasses.replace(config, cluster=dataclasses.replace(config.cluster, hardware=hardware("here", figures)))


@dataclass(frozen=True)
class Round:
    """One run of the whole grid."""

    seconds: list[float]  # of a step, by layout
    rank_seconds: float
    busy: list[float]  # processor seconds of a trial, by layout


@dataclass
class Processor:
    """Adds up what the ranks of each trial have taken of the processor, as the process that starts them is told when they end."""

    before: float = 0.0
    trials: dict[str, float] = field(default_factory=dict)

    def begin(self) -> None:
        """Nothing has run yet."""

    def on_trial(self, record: Record) -> None:
        if record.status.final:
            parents = psutil.Process().children()
            now = sum(times.children_user + times.children_system for times in (parent.cpu_times() for parent in parents))
            self.trials[record.id], self.before = now - self.before, now

    def on_poll(self, records: Sequence[Record]) -> None:
        """Only ends count."""

    def close(self) -> None:
        """Nothing is held."""


def exhaustive(candidates: SearchProblem, number: int, backends: Backends) -> Round:
    """Run every layout once."""
    configs = [resolve(candidates.trial_config(SearchTrial(i, True, None))) for i in range(len(candidates.candidates))]
    points = [Point(tuple(overrides_of(c.layout)), c) for c in configs]
    settings = dataclasses.replace(candidates.config.sweep, max_parallel=1, rerun=True)
    processor = Processor()
    records = run_sweep(f"grid{number}", points, settings, backends, [processor])
    results = [measurement(record, 0.0) for record in records]
    rank_seconds = 3600 * sum(result.gpu_hours for result in results)
    return Round([result.seconds for result in results], rank_seconds, [processor.trials.get(record.id, math.nan) for record in records])


def busy_steps(candidates: SearchProblem, rounds: list[Round], backends: Backends) -> list[float]:
    """Processor seconds of a step over the cores, by layout: those of whole trials less those of two steps."""
    run = dataclasses.replace(candidates.config.run, steps=2, warmup_steps=0)
    short = exhaustive(dataclasses.replace(candidates, config=dataclasses.replace(candidates.config, run=run)), len(rounds), backends)
    more, cores = candidates.config.run.steps - 2, len(os.sched_getaffinity(0))
    return [(min(each) - less) / more / cores for *each, less in zip(*(each.busy for each in rounds), short.busy, strict=True)]


def report(candidates: SearchProblem, found: SearchOutcome, rounds: list[Round], busy: list[float] | None) -> None:
    """Every layout, then the two results side by side."""
    by_layout = list(zip(*(each.seconds for each in rounds), strict=True))
    best = [min(times) for times in by_layout]
    noise = statistics.median(max(times) / min(times) - 1 for times in by_layout)
    order = sorted(range(len(best)), key=lambda i: best[i])
    tried = {trial.index: place for place, (trial, _, _) in enumerate(found.trials, 1)}
    for i in order:
        predicted, says = candidates.candidates.seconds[i], found.policy.tried.get(i)
        words = f"{best[i]:9.4f} s  predicted {predicted:8.4f} s" + (f"  processor {busy[i]:8.4f} s" if busy else "")
        print(f"{words}  {name_of(candidates.layout(i)):<28} {f'trial {tried[i]}: {says:.4f} s' if says else ''}")
    compare("by the clock", candidates, found, best, f"noise between rounds {noise:.1%}")
    if busy:
        compare("by processor seconds", candidates, found, busy, "")
    spent, whole = 3600 * found.policy.gpu_hours, rounds[0].rank_seconds
    print(f"grid: {len(order)} trials, {whole:.0f} rank-seconds a round")
    print(
        f"search: {found.policy.trials} trials ({found.policy.trials / len(order):.0%}), {spent:.0f} rank-seconds "
        f"({spent / whole:.0%}); {found.reason}"
    )


def compare(how: str, candidates: SearchProblem, found: SearchOutcome, seconds: list[float], words: str) -> None:
    """How far the layout that the search found is behind the grid's best, and how well the first predictions did."""
    best, chosen = min(range(len(seconds)), key=lambda i: seconds[i]), found.policy.ranking()[0]
    errors = [abs(predicted / one - 1) for predicted, one in zip(candidates.candidates.seconds, seconds, strict=True)]
    print(
        f"{how}: grid's best {name_of(candidates.layout(best))}, {seconds[best]:.4f} s; search's {name_of(candidates.layout(chosen))}, "
        f"{seconds[chosen]:.4f} s, {seconds[chosen] / seconds[best] - 1:.1%} behind; "
        f"first predictions {statistics.median(errors):.1%} off in the median; {words}"
    )


if __name__ == "__main__":
    main()
