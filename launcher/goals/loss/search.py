"""A search for the soonest loss: the results of its arms, what can be told of them, the winner as a recipe."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.config import Config, compose
from launcher.config.hardware import hardware_files, typed
from launcher.goals.goal import Asked, GoalSearch, Wanted, Written
from launcher.goals.loss.arms import problem
from launcher.goals.views import Entry, GoalColumn, Line, Listing, View
from launcher.labels import amount, duration, money, percent, plural, seconds
from launcher.planning.layout_names import name_of
from launcher.planning.recipe import recipe
from launcher.search.arms import LogMean
from launcher.search.loss import LossPolicy, LossProblem
from launcher.search.policy import SearchTrial, TrialObservation
from launcher.trials.store import Record

if TYPE_CHECKING:
    from launcher.sweep.search import SearchOutcome

FASTEST, UNTOLD, LEADS, SLOWER, MISSED, NOTHING = "fastest", "cannot tell", "leads", "slower", "not reached", "no run"
"""Verdicts on an arm."""


def ends(form: Any) -> Any:
    """Returns a form of an interval; its upper end may not be known."""
    return lambda pair: "-" if pair is None else f"{form(pair[0])}-{'?' if pair[1] is None else form(pair[1])}"


def least(name: str, form: Any) -> Any:
    """Returns a form of the value ``name`` of an arm, which is the least that it may be if a run missed the loss, and else the most if a
    shortest branch had it."""

    def written(one: Entry) -> str:
        mark = ">" if one["reached"] != one["runs"] else "<" if one["at_most"] else ""
        return (mark if one[name] is not None else "") + str(form(one[name]))

    return written


def span(value: float | None) -> str:
    """``12 s``, ``34 minutes``; ``-`` when unknown."""
    return "-" if value is None else seconds(value) if value < 600 else duration(value)


COLUMNS = (
    GoalColumn("arm", "arm", least=12, right=False),
    GoalColumn("reached", "", lambda one: f"{one['reached']}/{one['runs']}", keep=1),
    GoalColumn("steps", "", least("steps", amount)),
    GoalColumn("between", "steps_interval", ends(amount), keep=3),
    GoalColumn("a step", "step_time_s", seconds, keep=4),
    GoalColumn("time", "", least("time_s", span)),
    GoalColumn("between", "time_interval_s", ends(span), keep=5),
    GoalColumn("GPU-hours", "", least("gpu_hours", amount), keep=6),
    GoalColumn("price", "", least("price", money), keep=7),
    GoalColumn("over first", "", lambda one: ends("{:.2f}".format)(one["over_first_interval"]), keep=2),
    GoalColumn("told", "told", right=False),
)


@dataclass(frozen=True)
class LossSearch(GoalSearch):
    """The arms of a search, each with its runs."""

    problem: LossProblem
    teaches: bool = False

    def size(self) -> str:
        return f"{plural(len(self.problem.arms), 'arm')} of {plural(self.problem.config.search.seeds, 'seed')}"

    def line(self, trial: SearchTrial, record: Record, measured: TrialObservation) -> str:
        last = f", validation loss {measured.losses[-1][1]:.4f} after {measured.losses[-1][0]} steps" if measured.losses else ""
        took = f"{seconds(measured.seconds)} a step" if measured.ran else measured.reason.value
        arm, run = self.problem.arm_of(trial), self.problem.trial_config(trial).run
        piece = "" if arm.trunk is None else f", {'the trunk of' if not self.problem.piece_of(trial) else 'a branch of'} {run.steps} steps"
        return f"{record.id}  {arm.name}, seed {run.seed}{piece}: {took}{last}"

    def won(self, found: SearchOutcome[LossPolicy]) -> bool:
        return found.policy.evidence.winner is not None

    def front(self, found: SearchOutcome[LossPolicy]) -> dict[str, Any]:
        """Returns the arms with their curves, for report and MLflow."""
        return {
            "target_loss": self.problem.target_loss,
            "arms": [dict(one) for one in self._arms(found)],
            "words": list(told(self._told(found))),
        }

    def recipes(self, found: SearchOutcome[LossPolicy], default: Config) -> dict[str, tuple[dict[str, Any], str]]:
        if (winner := found.policy.evidence.winner) is None:
            return {}
        arm, entry = self.problem.arms[winner], self._arms(found)[0]
        if self.problem.predicts:
            default = compose([f"cluster={arm.asked.cluster.backend}"])
        took = f"{arm.name}, loss {self.problem.target_loss:g} in {span(entry['time_s'])}, the fastest of {len(self.problem.arms)} arms"
        return {"": (recipe(arm.asked, default, hardware_files()), took)}

    def document(self, name: str, found: SearchOutcome[LossPolicy], written: Written) -> dict[str, Any]:
        """Returns each arm's result, and the fastest if it can be told."""
        made = written.recipes.get("")
        return {
            "search": name,
            "reason": found.reason,
            "interrupted": found.unfinished,
            **self._told(found),
            "arms": self._arms(found),
            "failed": [
                {"arm": self.problem.arm_of(t).name, "reason": m.reason.value, "detail": r.detail, "trial": r.id}
                for t, r, m in found.trials
                if not m.ran
            ],
            "trials": found.policy.trials,
            "trial_gpu_hours": found.policy.gpu_hours,
            "recipe": str(made) if made else None,
        }  # fmt: skip

    def _told(self, found: SearchOutcome[LossPolicy]) -> dict[str, Any]:
        """Returns the decision, and what it holds for."""
        evidence, cluster, names = found.policy.evidence, self.problem.cluster, [arm.name for arm in self.problem.arms]
        return {
            "target_loss": self.problem.target_loss,
            "confidence": evidence.confidence,
            "seeds": evidence.seeds,
            "cluster": f"{cluster.nodes} x {cluster.gpus_per_node} {typed(cluster.hardware.name)}",
            "step_times": "predicted" if self.problem.predicts else "measured",
            "complete": evidence.complete,
            "winner": None if evidence.winner is None else names[evidence.winner],
            "first": None if evidence.leader is None else names[evidence.leader],
            "rivals": [names[arm] for arm in evidence.rivals],
            "seeds_wanted": evidence.seeds_wanted,
            "bounded": [name for number, name in enumerate(names) if any(run.most for run in evidence.reaches(number))],
        }

    def _arms(self, found: SearchOutcome[LossPolicy]) -> list[dict[str, Any]]:
        """Returns each arm's result, the fastest first."""
        evidence = found.policy.evidence
        rest = [arm for arm in range(len(self.problem.arms)) if arm not in evidence.order]
        return [self._arm(found.policy, arm) for arm in (*evidence.order, *rest)]

    def _arm(self, policy: LossPolicy, number: int) -> dict[str, Any]:
        arm, evidence, cluster = self.problem.arms[number], policy.evidence, self.problem.cluster
        runs = evidence.reaches(number)
        level, missed = (1 - evidence.confidence) / 2, bool(evidence.misses(number))
        steps, time = _figure(evidence.steps(number), level, missed), _figure(evidence.time(number), level, missed)
        lead = None if evidence.leader in (None, number) else evidence.lead(number, evidence.leader)
        over = _figure(lead, evidence.level, missed)
        hours = cluster.world_size / 3600
        price = None if cluster.price_per_gpu_hour is None else hours * cluster.price_per_gpu_hour
        return {
            "arm": arm.name,
            "overrides": list(arm.words),
            "layout": name_of(arm.asked.layout if arm.fastest else arm.config.layout),
            "told": self._verdict(policy, number),
            "runs": len(evidence.runs[number]),
            "reached": sum(not run.missed for run in runs),
            "at_most": any(run.most for run in runs),
            "dropped_after": evidence.dropped.get(number),
            "steps": steps[0],
            "steps_interval": steps[1],
            "tokens": None if steps[0] is None else arm.tokens(steps[0]),
            "step_time_s": evidence.step_time(number),
            "time_s": time[0],
            "time_interval_s": time[1],
            "gpu_hours": _times(time[0], hours),
            "gpu_hours_interval": _both(time[1], hours),
            "price": _times(time[0], price),
            "price_interval": _both(time[1], price),
            "over_first": over[0],
            "over_first_interval": over[1],
            "curves": {str(arm.config.run.seed + seed): [list(point) for point in curve] for seed, curve in policy.curves[number].items()},
        }  # fmt: skip

    def _verdict(self, policy: LossPolicy, number: int) -> str:
        evidence, runs = policy.evidence, policy.evidence.reaches(number)
        if not runs or all(run.missed for run in runs):
            return MISSED if runs else NOTHING
        if number == evidence.leader:
            return FASTEST if evidence.winner == number else LEADS
        return UNTOLD if number in evidence.rivals else SLOWER


def search_loss(config: Config, wanted: Wanted, asked: Asked) -> LossSearch:
    """Returns the search of the arms of ``config``."""
    return LossSearch(problem(config, wanted, asked))


def _figure(log: LogMean | None, level: float, missed: bool) -> tuple[float | None, list[float | None] | None]:
    """Returns a value and its interval. If runs missed the loss, both are the least that it may be."""
    if log is None:
        return None, None
    low, high = (math.exp(min(end, 700.0)) for end in log.bounds(level))
    return math.exp(log.mean), [low, None if missed or math.isinf(log.margin(level)) else high]


def _times(value: float | None, factor: float | None) -> float | None:
    return None if value is None or factor is None else value * factor


def _both(pair: list[float | None] | None, factor: float | None) -> list[float | None] | None:
    return None if pair is None or factor is None else [_times(end, factor) for end in pair]


def shown(result: Mapping[str, Any]) -> Iterator[View]:
    """Yields the document of a search for people."""
    yield Listing(COLUMNS, result["arms"])
    for row in result["failed"]:
        yield f"{row['trial']}  {row['arm']}: {row['reason']} {row['detail']}".rstrip()
    yield from told(result)
    yield f"{plural(result['trials'], 'trial')}, {result['trial_gpu_hours']:.3g} GPU-hours; stopped: {result['reason']}"
    if result["recipe"]:
        yield Line(f"the winner is a recipe, {result['recipe']}: trireme train recipe={Path(result['recipe']).stem}")


def told(result: Entry) -> Iterator[str]:
    """Yields what can be told of the arms, in words."""
    for name in result["bounded"]:
        yield f"the shortest branch of {name} has the loss, so it needs no more steps than it counts with: lower search.target_loss"
    sure, first = percent(result["confidence"], digits=0), result["first"]
    yield (
        f"time to validation loss {result['target_loss']:g} on {result['cluster']}, by {result['step_times']} step times; means over seeds "
        f"and {sure} intervals"
    )
    if first is None:
        yield "no run reached the loss: raise search.target_loss or run.steps"
        return
    if result["winner"]:
        yield f"{first} is the fastest ({sure} confidence over all arms)"
        return
    if not result["complete"]:
        yield f"{first} is first so far; runs are missing"
        return
    yield f"these runs cannot tell {first} from {', '.join(result['rivals'])}"
    wanted = result["seeds_wanted"]
    if wanted is None:
        yield "further seeds would hardly tell: the arms are too close, or their step times are not known well enough"
    else:
        more = max(wanted - result["seeds"], 1)
        whole = f"search.seeds={result['seeds'] + more}"
        yield f"{plural(more, 'further seed')} would probably tell, if the differences stay as they are: {whole}"
