"""A search for the front of time against cost: its candidates, the results of its trials, recommendations as commands and recipes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.config import Config, locate_data
from launcher.config.hardware import hardware_files
from launcher.goals.goal import GoalSearch, Wanted, Written
from launcher.goals.serving.plan import ServingPlan, advised, plan_serving
from launcher.goals.views import GoalColumn, Line, Listing, View
from launcher.labels import amount, error_of, percent, plural, seconds
from launcher.planning.recipe import changes, recipe
from launcher.planning.serving.plan import DOMINATED
from launcher.planning.serving.space import name_of
from launcher.search.policy import SearchTrial, TrialObservation
from launcher.search.serving import ServingPolicy, ServingProblem, serving_problem
from launcher.trials.store import Record
from trainer.shared.run.schema import DataConfig, LayoutConfig

if TYPE_CHECKING:
    from launcher.sweep.search import SearchOutcome

MEASURED, SCALED = "measured", "scaled from measured"
"""Sources of a time: its trial, or a trial of fewer replicas, scaled by the predicted ratio."""
SCALING = (
    "~ scaled: the trial served fewer replicas than the way has, so its times are multiplied by the ratio of the predictions "
    "for all replicas and for those it had; limits and costs follow (search.nodes=full measures all)"
)
COLUMNS = (
    GoalColumn("", "front", lambda front: "*" if front else "", right=False),
    GoalColumn("layout", "name", least=14, right=False),
    GoalColumn("a request", "", lambda one: ("~" if one["kind"] == SCALED else "") + seconds(one["request_s"])),
    GoalColumn("measured", "measured_s", seconds),
    GoalColumn("predicted", "predicted_s", seconds, keep=1),
    GoalColumn("error", "", lambda one: percent(error_of(one["predicted_s"], one["measured_s"]), signed=True), keep=2),
    GoalColumn("p99", "latency_s", lambda shares: seconds(shares.get("p99")), keep=3),
    GoalColumn("first token", "ttft_s", lambda shares: seconds(shares["p50"]), keep=2),
    GoalColumn("per token", "tpot_s", lambda shares: seconds(shares["p50"]), keep=1),
    GoalColumn("requests/s", "requests_per_s", lambda shares: amount(shares["p50"]), keep=3),
    GoalColumn("trial", "trial", keep=4, right=False),
)


@dataclass(frozen=True)
class ServingSearch(GoalSearch):
    """The candidates of a search."""

    problem: ServingProblem
    teaches: bool = False

    def size(self) -> str:
        return f"{plural(len(self.problem.planned.table), 'way')} to serve, {len(self.problem.rows):,} of them may be on the front"

    def line(self, trial: SearchTrial, record: Record, measured: TrialObservation) -> str:
        predicted = float(self.problem.predicted(trial)[0].sum())
        took = f"measured {seconds(measured.seconds)} a request" if measured.ran else measured.reason.value
        given_up = " (given up: beaten in time and in cost)" if measured.ran and record.reason else ""
        return f"{record.id}  {self.problem.name(trial.index)}: {took}, predicted {seconds(predicted)}{given_up}"

    def won(self, found: SearchOutcome[ServingPolicy]) -> bool:
        return self._measured(found).found

    def front(self, found: SearchOutcome[ServingPolicy]) -> dict[str, Any]:
        """Returns the points that were measured or are near the predicted front, and the recommendations. ``kind``: the source of the
        measured times."""
        policy, planned = found.policy, ServingPlan(self.problem.config, self.problem.planned)
        done, believed = self._measured(found), policy.plan(measured_only=False)
        ids = {int(self.problem.rows[trial.index]): record.id for trial, record, _ in found.trials}
        points = []
        for row in dict.fromkeys([*ids, *map(int, planned.planned.front), *map(int, believed.front)]):
            measured = row in ids and bool(done.planned.possible[row])
            points.append(
                {
                    "name": name_of(planned.planned.table[row]),
                    "predicted": _point(planned, row),
                    "trial": ids.get(row),
                    "measured": _point(done, row) if measured else None,
                    "kind": self._kind(row) if measured else None,
                    "front": measured and row in done.planned.front,
                }
            )
        return {"points": points, "recommended": self._recommended(done, {})}

    def recipes(self, found: SearchOutcome[ServingPolicy], default: Config) -> dict[str, tuple[dict[str, Any], str]]:
        """Returns the recipe of each recommendation, whose space has one row, and a description."""
        done = self._measured(found).planned
        made = {}
        for goal, row in done.recommended.items():
            if row is not None:
                took = f"{seconds(done.values['latency_ms'][row] / 1e3)} a request, {amount(done.values['throughput'][row])} requests/s"
                made[goal] = (self._recipe(row, default), f"{goal}, {name_of(done.table[row])}, {took}")
        return made

    def document(self, name: str, found: SearchOutcome[ServingPolicy], written: Written) -> dict[str, Any]:
        problem, planned, done = self.problem, self.problem.planned, self._measured(found)
        out = {reason: count for reason, count in planned.out.items() if reason != DOMINATED} | planned.dropped
        return {
            "search": name,
            "reason": found.reason,
            "interrupted": found.unfinished,
            "trials": [self._tried(done, *each) for each in found.trials],
            **self.front(found),
            "recommended": self._recommended(done, written.recipes),
            **done.advice(),
            "considered": len(planned.table),
            "out": out | {"predicted far behind the front": int(planned.possible.sum()) - len(problem.rows)},
            "gpu_hours": found.policy.gpu_hours,
        }

    def _measured(self, found: SearchOutcome[ServingPolicy]) -> ServingPlan:
        """Returns the plan of the measured rows."""
        return ServingPlan(self.problem.config, found.policy.plan(measured_only=True))

    def _kind(self, row: int) -> str:
        """Returns the source of the times of a measured row of the plan."""
        return SCALED if self.problem.scaled[self.problem.rows.tolist().index(row)] else MEASURED

    def _recommended(self, done: ServingPlan, recipes: Mapping[str, Path]) -> dict[str, Any]:
        """Returns the three rows to choose from, each with its command and recipe."""
        return {
            goal: row
            if row is None
            else {
                "name": name_of(done.planned.table[row]),
                **_point(done, row),
                "kind": self._kind(row),
                **done.started(row),
                "recipe": str(recipes[goal]) if goal in recipes else None,
            }
            for goal, row in done.planned.recommended.items()
        }

    def _recipe(self, row: int, default: Config) -> dict[str, Any]:
        config = self.problem.config
        tensor, pipeline, replicas, batch = ([int(size)] for size in self.problem.planned.table[row])
        serving = dataclasses.replace(config.serving, tensor=tensor, pipeline=pipeline, replicas=replicas, batch=batch)
        workload = dataclasses.replace(config.workload, trace=None)  # its lengths and its rate are those of the workload
        one = dataclasses.replace(config, serving=serving, workload=workload, layout=LayoutConfig(), data=default.data)
        made = recipe(one, dataclasses.replace(default, layout=LayoutConfig()), hardware_files()) | {"task": "inference"}
        sections = {key: changes(getattr(one, key), getattr(default, key)) for key in ("workload", "sla", "serving")}
        return made | {key: part for key, part in sections.items() if part}

    def _tried(self, done: ServingPlan, trial: SearchTrial, record: Record, measured: TrialObservation) -> dict[str, Any]:
        """Returns predictions and measurements of one trial, and the request time they imply for the full way to serve (``request_s``)."""
        written = record.read_result() or {}
        predicted, memory = self.problem.predicted(trial)
        row = int(self.problem.rows[trial.index])
        return {
            "name": self.problem.name(trial.index),
            "trial": record.id,
            "status": record.status.value,
            "reason": None if measured.ran else measured.reason.value,
            "detail": record.detail,
            "predicted_s": float(predicted.sum()),
            "measured_s": measured.seconds if measured.ran else None,
            "request_s": float(done.planned.values["latency_ms"][row]) / 1e3 if measured.ran else None,
            "kind": self._kind(row) if measured.ran else None,
            **{key: written.get(key) for key in ("latency_s", "ttft_s", "tpot_s", "requests_per_s", "peak_memory_bytes")},
            "predicted_memory_bytes": memory,
        }


def search_serving(config: Config, wanted: Wanted) -> ServingSearch:
    """Returns the search of ``config`` with the values ``wanted`` of layout keys."""
    found = plan_serving(config, wanted)
    located = locate_data(dataclasses.replace(found.config, data=DataConfig(kind="synthetic")))
    return ServingSearch(serving_problem(located, found.planned))


def shown(result: Mapping[str, Any]) -> Iterator[View]:
    """Yields the document of a search for people."""
    trials = result["trials"]
    front = {point["name"] for point in result["points"] if point["front"]}
    if ran := [one | {"front": one["name"] in front} for one in trials if one["latency_s"]]:
        yield Listing(COLUMNS, ran, numbered=False)
        yield "* on the front: none that was measured is faster and costs less"
        if any(one["kind"] == SCALED for one in ran):
            yield Line(SCALING)
    for one in trials:
        if one["reason"]:
            yield f"{one['trial']}  {one['name']}: {one['reason']} {one['detail']}".rstrip()
    yield from advised(result)
    out = ", ".join(f"{count:,} {reason}" for reason, count in result["out"].items() if count)
    yield (
        f"{plural(len(trials), 'trial')} of {result['considered']:,} ways to serve, {result['gpu_hours']:.3g} "
        f"GPU-hours; out: {out or 'none'}"
    )
    yield f"stopped: {result['reason']}"


def _point(plan: ServingPlan, row: int) -> dict[str, float]:
    """Returns one row's figures."""
    names = ("latency_ms", "ttft_ms", "tpot_ms", "throughput", "cost")
    figures = plan.figures(row)
    return {name: figures[name] for name in names} | {"tokens_per_device": plan.tokens_per_device(row)}
