"""``trireme search task=inference``: the front of time against cost of a served model, measured with few trials on a cluster."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.cli.console import Column, fitted_table, titled, wide_console
from launcher.cli.on_cluster import name_of_search, recipe_path, say, searched, tell_result
from launcher.cli.plan_inference import entry, lines_of, nearest, relaxed, rendered, restricted, started, traced
from launcher.labels import amount, error_of, percent, plural, seconds
from launcher.named_files import check_file, check_folder

if TYPE_CHECKING:
    from launcher.config import Config
    from launcher.planning.serving.plan import InferencePlan
    from launcher.search.policy import SearchTrial, TrialObservation
    from launcher.search.serving import ServingPolicy, ServingProblem
    from launcher.sweep.search import SearchOutcome
    from launcher.trials.store import Record

MEASURED, SCALED = "measured", "scaled from measured"
"""What a time of a way to serve is: that of its trial, or that times what is predicted of all replicas over what is of the trial's."""
RECIPES = {"lowest latency": "latency", "highest throughput": "throughput", "best under your limits": "limits"}
"""How the recipe of a recommendation is called, after the name of the search."""


SCALING = (
    "~ scaled: the trial served fewer replicas than the way has, so what it measured is multiplied by what is predicted of all of them "
    "over what is of those it had; limits and costs are of that (search.nodes=full measures all)"
)


def run(
    config: Config, default: Config, overrides: Sequence[str], wanted: Mapping[str, list[Any]] | None = None, as_json: bool = False
) -> int:
    """0 when something was measured that keeps the limits, 1 when nothing was. ``default`` is composed from no more than the cluster."""
    from launcher.config import locate_data
    from launcher.config.rules import check_installed
    from launcher.planning.serving.plan import plan_inference
    from launcher.search.serving import serving_problem
    from launcher.trials.store import Store
    from trainer.shared.run.schema import DataConfig

    check_installed(config, "measuring")
    name = name_of_search(config, overrides)
    paths = {goal: recipe_path(f"{config.search.recipe or name}-{word}") for goal, word in RECIPES.items()}
    for path in paths.values():
        check_file(path, "search.recipe")
    check_folder(config.sweep.dir, "sweep.dir")
    config = traced(restricted(config, wanted or {}))
    config = locate_data(dataclasses.replace(config, data=DataConfig(kind="synthetic")))
    problem = serving_problem(config, plan_inference(config))
    say(f"search {name}: {plural(len(problem.planned.table), 'way')} to serve, {len(problem.rows):,} of them may be on the front")
    store = Store(config.sweep.dir)
    found = searched(
        name, problem, overrides, lambda *trial: say(line(problem, *trial)),
        lambda found: store.write_front(name, front_of(problem, found)) if found.trials else None,
    )  # fmt: skip
    if found is None:
        return 0
    done = found.policy.plan(measured_only=True)
    made = {} if found.unfinished else write_recipes(paths, name, done, config, default, overrides)
    result = document(name, problem, found, made)
    tell_result(found, result, None if as_json else show)
    return 0 if done.kept.any() and not found.unfinished else 1


def line(problem: ServingProblem, trial: SearchTrial, record: Record, measured: TrialObservation) -> str:
    """One trial as it ends."""
    predicted = float(problem.predicted(trial)[0].sum())
    took = f"measured {seconds(measured.seconds)} a request" if measured.ran else measured.reason.value
    given_up = " (given up: beaten in time and in cost)" if measured.ran and record.reason else ""
    return f"{record.id}  {problem.name(trial.index)}: {took}, predicted {seconds(predicted)}{given_up}"


def front_of(problem: ServingProblem, found: SearchOutcome[ServingPolicy]) -> dict[str, Any]:
    """What report and MLflow show: the points that were measured or are near the predicted front, and the recommendations. ``kind``:
    what the measured times are."""
    policy, planned = found.policy, problem.planned
    done, believed = policy.plan(measured_only=True), policy.plan(measured_only=False)
    ids = {int(problem.rows[trial.index]): record.id for trial, record, _ in found.trials}
    rows = list(dict.fromkeys([*ids, *map(int, planned.front), *map(int, believed.front)]))
    points = []
    for row in rows:
        point: dict[str, Any] = {"name": entry(planned, row)["name"], "predicted": point_of(planned, row), "trial": ids.get(row)}
        measured = row in ids and bool(done.possible[row])
        known = {"measured": point_of(done, row), "kind": kind_of(problem, row)} if measured else {"measured": None, "kind": None}
        points.append(point | known | {"front": measured and row in done.front})
    return {"points": points, "recommended": recommendations(problem, done, {})}


def kind_of(problem: ServingProblem, row: int) -> str:
    """What the times of a row of the plan are, one that was measured."""
    return SCALED if problem.scaled[problem.rows.tolist().index(row)] else MEASURED


def point_of(planned: InferencePlan, row: int) -> dict[str, float]:
    """One row's figures as numbers."""
    names = ("latency_ms", "ttft_ms", "tpot_ms", "throughput", "cost")
    one = {name: float(planned.values[name][row]) for name in names}
    tokens = one["throughput"] * float(planned.case.output) / float(planned.values["devices"][row])
    return one | {"tokens_per_device": tokens}


def recommendations(problem: ServingProblem, done: InferencePlan, recipes: Mapping[str, Path]) -> dict[str, Any]:
    """The three rows to choose from, each with its command and recipe."""
    from launcher.planning.serving.space import name_of

    config = problem.config
    return {
        goal: None
        if row is None
        else {
            "name": name_of(done.table[row]),
            **point_of(done, row),
            "kind": kind_of(problem, row),
            **started(config, done, row),
            "recipe": str(recipes[goal]) if goal in recipes else None,
        }
        for goal, row in done.recommended.items()
    }


def write_recipes(
    paths: Mapping[str, Path], name: str, done: InferencePlan, config: Config, default: Config, overrides: Sequence[str]
) -> dict[str, Path]:
    """A recipe of each recommendation: the command line with one row of the space."""
    from launcher.cli import recipes
    from launcher.config.hardware import hardware_files
    from launcher.planning.recipe import changes, recipe
    from launcher.planning.serving.space import name_of
    from trainer.shared.run.schema import LayoutConfig

    written = {}
    for goal, row in done.recommended.items():
        if row is None:
            continue
        layout = done.table[row]
        tensor, pipeline, replicas, batch = ([int(size)] for size in layout)
        serving = dataclasses.replace(config.serving, tensor=tensor, pipeline=pipeline, replicas=replicas, batch=batch)
        workload = dataclasses.replace(config.workload, trace=None)  # its lengths and its rate are those of the workload
        one = dataclasses.replace(config, serving=serving, workload=workload, layout=LayoutConfig(), data=default.data)
        made = recipe(one, dataclasses.replace(default, layout=LayoutConfig()), hardware_files()) | {"task": "inference"}
        sections = {key: changes(getattr(one, key), getattr(default, key)) for key in ("workload", "sla", "serving")}
        took = f"{seconds(done.values['latency_ms'][row] / 1e3)} a request, {amount(done.values['throughput'][row])} requests/s"
        comment = f"Found by 'trireme search {shlex.join(overrides)}' (sweep {name}): {goal}, {name_of(layout)}, {took}."
        recipes.write(paths[goal], made | {key: part for key, part in sections.items() if part}, comment, "search.recipe")
        written[goal] = paths[goal]
    return written


def document(name: str, problem: ServingProblem, found: SearchOutcome[ServingPolicy], recipes: Mapping[str, Path]) -> dict[str, Any]:
    """What a search found, as ``--json`` prints it."""
    from launcher.planning.serving.plan import DOMINATED

    policy, planned = found.policy, problem.planned
    done = policy.plan(measured_only=True)
    others = rendered(problem.config, done)
    hopeless = int(planned.possible.sum()) - len(problem.rows)
    return {
        "search": name,
        "reason": found.reason,
        "interrupted": found.unfinished,
        "trials": [tried(problem, done, *each) for each in found.trials],
        **front_of(problem, found),
        "recommended": recommendations(problem, done, recipes),
        "relaxations": relaxed(done),
        "commands": {name: one["command"] for name, one in others.items()},
        "notes": {name: one["note"] for name, one in others.items() if one["note"]},
        "considered": len(planned.table),
        "out": {name: n for name, n in planned.out.items() if name != DOMINATED}
        | planned.dropped
        | {"predicted far behind the front": hopeless},
        "gpu_hours": policy.gpu_hours,
    }


def tried(problem: ServingProblem, done: InferencePlan, trial: SearchTrial, record: Record, measured: TrialObservation) -> dict[str, Any]:
    """What was predicted and measured of one trial, and what that says of a request of its way to serve (``request_s``)."""
    written = record.read_result() or {}
    predicted, memory = problem.predicted(trial)
    row = int(problem.rows[trial.index])
    return {
        "name": problem.name(trial.index),
        "trial": record.id,
        "status": record.status.value,
        "reason": None if measured.ran else measured.reason.value,
        "detail": record.detail,
        "predicted_s": float(predicted.sum()),
        "measured_s": measured.seconds if measured.ran else None,
        "request_s": float(done.values["latency_ms"][row]) / 1e3 if measured.ran else None,
        "kind": kind_of(problem, row) if measured.ran else None,
        **{key: written.get(key) for key in ("latency_s", "ttft_s", "tpot_s", "requests_per_s", "peak_memory_bytes")},
        "predicted_memory_bytes": memory,
    }


def show(result: Mapping[str, Any]) -> None:
    """The same for people."""
    console, trials = wide_console(), result["trials"]
    front = {point["name"] for point in result["points"] if point["front"]}
    ran = [one for one in trials if one["latency_s"]]
    columns = [
        Column("", ["*" if one["name"] in front else "" for one in ran]),
        Column("layout", [one["name"] for one in ran], least=14),
        Column("a request", [("~" if one["kind"] == SCALED else "") + seconds(one["request_s"]) for one in ran], right=True),
        Column("measured", [seconds(one["measured_s"]) for one in ran], right=True),
        Column("predicted", [seconds(one["predicted_s"]) for one in ran], keep=1, right=True),
        Column("error", [percent(error_of(one["predicted_s"], one["measured_s"]), signed=True) for one in ran], keep=2, right=True),
        Column("p99", [seconds(one["latency_s"].get("p99")) for one in ran], keep=3, right=True),
        Column("first token", [seconds(one["ttft_s"]["p50"]) for one in ran], keep=2, right=True),
        Column("per token", [seconds(one["tpot_s"]["p50"]) for one in ran], keep=1, right=True),
        Column("requests/s", [amount(one["requests_per_s"]["p50"]) for one in ran], keep=3, right=True),
        Column("trial", [one["trial"] for one in ran], keep=4),
    ]
    if ran:
        console.print(fitted_table(columns, console.width, [""] * len(ran)))
        console.print("* on the front: none that was measured is faster and costs less")
        if any(one["kind"] == SCALED for one in ran):
            console.print(SCALING, soft_wrap=True)
    for one in trials:
        if one["reason"]:
            console.print(f"{one['trial']}  {one['name']}: {one['reason']} {one['detail']}".rstrip())
    for goal, one in result["recommended"].items():
        if one is not None:
            figures = (
                f"{seconds(one['latency_ms'] / 1e3)} a request ({one['kind']}), {amount(one['throughput'])} requests/s, {one['cost']:.3g} "
                "per million tokens"
            )
            recipe = f"\n  trireme plan recipe={Path(one['recipe']).stem}" if one["recipe"] else ""
            console.print(titled(goal, f"{one['name']}, {figures}"), soft_wrap=True)
            console.print(f"{lines_of(one)}{recipe}", soft_wrap=True)
    for words in nearest(result["relaxations"]):
        console.print(words, soft_wrap=True)
    for engine, words in result["commands"].items():
        console.print(f"with {engine}:\n{lines_of({'command': words, 'note': result['notes'].get(engine)})}", soft_wrap=True)
    out = ", ".join(f"{count:,} {reason}" for reason, count in result["out"].items() if count)
    console.print(
        f"{plural(len(trials), 'trial')} of {result['considered']:,} ways to serve, {result['gpu_hours']:.3g} "
        f"GPU-hours; out: {out or 'none'}"
    )
    console.print(f"stopped: {result['reason']}")
