"""A search for the fastest layout: its candidates, the results of its trials, the winner as a recipe and as its trainer's command."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from launcher.config import Config, locate_data, resolve
from launcher.config.command import command_of
from launcher.config.hardware import hardware_files
from launcher.goals.goal import GoalSearch, Wanted, Written
from launcher.goals.views import Entry, GoalColumn, Line, Listing, View
from launcher.labels import error_of, interval, percent, plural, seconds
from launcher.planning.layout_filter import widen_space
from launcher.planning.layout_names import name_of
from launcher.planning.plan import plan
from launcher.planning.recipe import recipe
from launcher.search.policy import Policy, SearchTrial, TrialObservation
from launcher.search.problem import SearchProblem, search_problem
from launcher.trials.store import Record
from launcher.trials.told import as_files
from trainer.shared.records.outcome import Reason
from trainer.shared.run.errors import ConfigError

if TYPE_CHECKING:
    from launcher.sweep.search import SearchOutcome

COLUMNS = (
    GoalColumn("layout", "layout", least=18, right=False),
    GoalColumn("step", "step_time_s", seconds),
    GoalColumn("predicted", "predicted_s", seconds, keep=1),
    GoalColumn("error", "", lambda row: percent(error_of(row["predicted_s"], row["step_time_s"]), signed=True), keep=3),
    GoalColumn("80 % now", "interval_s", lambda ends: interval((ends[0], ends[1])), keep=5),
    GoalColumn("fastest", "fastest", percent, keep=1),
    GoalColumn("size", "full_size", lambda full: "full" if full else "scaled up", keep=4, right=False),
    GoalColumn("trial", "trial", keep=2, right=False),
)


@dataclass(frozen=True)
class TrainingSearch(GoalSearch):
    """Candidates among that many ``layouts``. ``asked`` is the configuration before its data were located."""

    problem: SearchProblem
    layouts: int
    asked: Config
    teaches: bool = True

    def size(self) -> str:
        return f"{self.layouts:,} layouts, {len(self.problem.candidates):,} of them candidates"

    def most_gpu_hours(self) -> float | None:
        """Returns the GPU-hours of the slowest ``search.max_trials`` candidates at full size, which trials on fewer nodes do not reach."""
        config = self.problem.config
        search, step_s = config.search, np.sort(self.problem.candidates.parts.sum(axis=1))[::-1][: config.search.max_trials]
        whole = float((step_s * config.run.steps + search.start_s).sum()) * config.cluster.world_size / 3600
        return min(whole, math.inf if search.max_gpu_hours is None else search.max_gpu_hours)

    def line(self, trial: SearchTrial, record: Record, measured: TrialObservation) -> str:
        predicted = float(self.problem.predicted(trial)[0].sum())
        took = f"{measured.seconds:.4g} s a step" if measured.ran else measured.reason.value
        early = " (given up: cannot win)" if measured.ran and record.reason is Reason.CANNOT_WIN else ""
        early = f" ({record.detail})" if record.reason is Reason.MEASURED else early
        return f"{record.id}  {name_of(self.problem.trial_config(trial).layout)}: {took}, predicted {predicted:.4g} s{early}"

    def won(self, found: SearchOutcome[Policy]) -> bool:
        return bool(found.policy.ranking())

    def recipes(self, found: SearchOutcome[Policy], default: Config) -> dict[str, tuple[dict[str, Any], str]]:
        if not (ranking := found.policy.ranking()):
            return {}
        made = recipe(dataclasses.replace(self.asked, layout=self.problem.layout(ranking[0])), default, hardware_files())
        took = f"{seconds(found.policy.seconds_of(ranking[0]))} a step, the fastest of {plural(found.policy.trials, 'trial')}"
        return {"": (made, took)}

    def files(self, name: str, found: SearchOutcome[Policy]) -> dict[str, str]:
        winner = found.policy.ranking()[0]
        config = resolve(dataclasses.replace(self.problem.config, layout=self.problem.layout(winner)))
        if (command := command_of(config)) is None:
            return {}
        took = f"{name_of(config.layout)}: {seconds(found.policy.seconds_of(winner))} a step in {config.run.steps} steps of search {name}"
        return as_files(command, config.layout, config.cluster.gpus_per_node, took)

    def document(self, name: str, found: SearchOutcome[Policy], written: Written) -> dict[str, Any]:
        """Returns the ranking, predicted against measured, the cost of the search and that of the full grid."""
        problem, policy = self.problem, found.policy
        return {
            "search": name,
            "reason": found.reason,
            "doubt": found.doubt,
            "likeliest": None if found.likeliest is None else name_of(problem.layout(found.likeliest)),
            "interrupted": found.unfinished,
            "ranking": self._ranking(found),
            "failed": [
                {"layout": name_of(problem.trial_config(t).layout), "reason": m.reason.value, "detail": r.detail, "trial": r.id}
                for t, r, m in found.trials
                if not m.ran
            ],
            "other_losses": self._other_losses(found),
            "trials": policy.trials,
            "layouts": self.layouts,
            "candidates": len(problem.candidates),
            "gpu_hours": policy.gpu_hours,
            "grid_gpu_hours": policy.grid_gpu_hours(problem.config.run.steps, problem.config.cluster.world_size),
            "recipe": _text(written.recipes.get("")),
            "learnt": _text(written.learnt),
            "command": _text(written.command),
        }

    def _other_losses(self, found: SearchOutcome[Policy]) -> list[dict[str, Any]]:
        """Returns the trials whose losses differ from the others'. If most trials agree, those cannot win; if not, the correct ones are
        unknown."""
        from launcher.sweep.search import compared_losses

        return [
            {"layout": name_of(self.problem.layout(index)), "trial": one.trial, "step_time_s": one.step_time_s, "loss_gap": one.loss_gap,
             "cannot_win": index in found.policy.strangers}
            for index, one in compared_losses(found.trials)
            if one.other_model
        ]  # fmt: skip

    def _ranking(self, found: SearchOutcome[Policy]) -> list[dict[str, Any]]:
        """Returns predictions and measurements of each layout that ran, the fastest first."""
        policy, chances = found.policy, found.policy.fastest()
        low, high = policy.time.posterior().interval
        trials = {trial.index: record.id for trial, record, _ in found.trials}
        return [
            {
                "layout": name_of(self.problem.layout(index)),
                "step_time_s": policy.seconds_of(index),
                "full_size": index in policy.verified,
                "predicted_s": float(self.problem.candidates.seconds[index]),
                "corrected_s": policy.believed(index),
                "interval_s": [float(low[index]), float(high[index])],
                "fastest": float(chances[index]),
                "trial": trials[index],
            }
            for index in policy.ranking()
        ]


def search_training(config: Config, wanted: Wanted) -> TrainingSearch:
    """Returns the search of ``config`` among layouts that have the values ``wanted``."""
    if config.run.phases:
        raise ConfigError(
            "run.phases has steps of several sizes, and trials of a search measure one; use run.phases=[] to search for the layout of "
            "the last phase ('trireme plan' prices all of them)"
        )
    located = locate_data(config)
    planned = plan(located, widen_space(dict(wanted), located.search.space), wanted)
    return TrainingSearch(search_problem(located, planned), len(planned.space.table), config)


def shown(result: Mapping[str, Any]) -> Iterator[View]:
    """Yields the document of a search for people."""
    yield Listing(COLUMNS, result["ranking"])
    for row in result["failed"]:
        yield f"{row['trial']}  {row['layout']}: {row['reason']} {row['detail']}".rstrip()
    for row in result["other_losses"]:
        end = "it does not train the same model and cannot win" if row["cannot_win"] else "most trials disagree: see what their logs print"
        yield (
            f"{row['trial']}  {row['layout']}: {seconds(row['step_time_s'])} a step, losses of the first steps differ by "
            f"{percent(row['loss_gap'])}: {end}"
        )
    share = result["gpu_hours"] / result["grid_gpu_hours"] if result["grid_gpu_hours"] else 0.0
    yield (
        f"{plural(result['trials'], 'trial')} of {result['layouts']:,} layouts, {result['gpu_hours']:.3g} GPU-hours; "
        f"all candidates would take about {result['grid_gpu_hours']:.3g} ({percent(share)})"
    )
    yield f"stopped: {result['reason']}"
    if result["doubt"] is not None and result["doubt"] > 0 and "probability" not in result["reason"]:
        yield (
            f"left open: an untried layout is faster by more than the tolerance with a probability of {percent(result['doubt'])}; "
            f"the likeliest is {result['likeliest']}"
        )
    yield from _files(result)


def _files(result: Entry) -> Iterator[View]:
    """Yields the files that the search has written, and the command that uses each."""
    if result["learnt"]:
        file = Path(result["learnt"])
        yield Line(f"what it learnt of this machine is in {file}: the next search starts from it with hardware={file.stem}")
    if result["recipe"]:
        yield Line(f"the winner is a recipe, {result['recipe']}: trireme train recipe={Path(result['recipe']).stem}")
    if result["command"]:
        yield Line(f"\n{Path(result['command']).read_text()}")
        yield Line(f"the winner in the trainer's own words: {result['command']}")


def _text(path: Path | None) -> str | None:
    return str(path) if path else None
