"""A search of inference through the real sweep loop, over a place whose times are known; and what is told of it."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from benchmarks.replay.fronts import behind_front
from launcher.backends import pool
from launcher.backends.pool import Backends
from launcher.cli import search as verb
from launcher.cli.console import show
from launcher.cli.main import main
from launcher.config import compose, resolve
from launcher.config.rules import run_of
from launcher.goals.serving.goal import GOAL
from launcher.labels import seconds
from launcher.planning.serving.plan import plan_inference
from launcher.results import front, report
from launcher.search.policy import SearchTrial
from launcher.search.serving import ServingPolicy, ServingProblem, serving_problem
from launcher.sweep import loop, multirun, stopping
from launcher.sweep.search import SearchOutcome, search
from launcher.tracking import names
from launcher.tracking import process as tracking
from launcher.trials.store import Store
from tests.search.planted import PlantedBackend, Truth
from trainer.shared.records.outcome import Reason, Status
from trainer.shared.run.schema import TrainConfig

pytestmark = pytest.mark.slow

WORDS = [
    "task=inference",
    "recipe=gpt3_5b",
    "workload=nemo",
    "hardware=a100_80",
    "cluster.gpus_per_node=4",
    "cluster.nodes=1",
    "run.steps=6",
]
WORDS += ["serving.batch=[1,4,16,64]"]


@pytest.fixture(autouse=True)
def hasty_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The place answers at once, so there is nothing to wait for."""
    monkeypatch.setattr(loop, "TICK_SECONDS", 0.001)
    monkeypatch.setattr(stopping, "_REQUESTS_SECONDS", 0.0)


def prepared(tmp_path: Path, *words: str) -> ServingProblem:
    config = compose([*WORDS, f"sweep.dir={tmp_path / 'runs'}", *words])
    return serving_problem(config, plan_inference(config))


def truth_of(problem: ServingProblem) -> Truth:
    """What is predicted, but tensor ranks cost more each doubling than the model thinks, and all is slower."""
    latency = {
        (*(int(row[name]) for name in ("tensor", "pipeline")), int(row["batch"])): float(seconds)
        for row, seconds in zip(problem.planned.table[problem.rows], problem.small.latency)
    }

    def truth(config: TrainConfig) -> float:
        assert config.requests is not None
        found = latency.get((config.layout.tensor, config.layout.pipeline, config.requests.batch), 1.0)
        return float(found * 1.2 * 1.1 ** np.log2(config.layout.tensor))

    return truth


def searched(tmp_path: Path, problem: ServingProblem, truth: Truth | None = None) -> SearchOutcome[ServingPolicy]:
    return search("demo", problem, Backends(PlantedBackend(tmp_path / "place", truth or truth_of(problem))))


def test_what_would_be_recommended_is_measured_however_much_slower_the_machine_is_than_predicted(tmp_path: Path) -> None:
    problem = prepared(tmp_path, "cluster.gpus_per_node=8", "serving.batch=[1,2,4,8,16,32,64,128,256]", "sla.latency_ms=20000")
    assert len(problem.rows) < problem.planned.possible.sum()
    truth = truth_of(problem)
    found = searched(tmp_path, problem, lambda config: 3 * truth(config))
    wanted = {row for row in found.policy.plan(measured_only=False).recommended.values() if row is not None}
    assert wanted <= {int(problem.rows[index]) for index in found.policy.seen}
    done = found.policy.plan(measured_only=True)
    most = done.recommended["highest throughput"]
    assert (
        most is not None
        and done.values["throughput"][most] >= 0.9 * found.policy.plan(measured_only=False).values["throughput"][problem.rows].max()
    )


def true_front(problem: ServingProblem, chosen: np.ndarray) -> float:
    """How far ``chosen`` candidates are from the front of all."""
    truth = truth_of(problem)
    seconds = np.array(
        [truth(run_of(resolve(problem.trial_config(SearchTrial(i, False, None))))) for i in range(len(problem.rows))], dtype=float
    )
    small = np.asarray(problem.small.latency)
    cost = problem.planned.values["cost"][problem.rows] / problem.planned.estimate.latency[problem.rows]
    full = seconds / small * problem.planned.estimate.latency[problem.rows]
    return behind_front(chosen, full, full * cost)


def test_the_front_is_found_without_measuring_all(tmp_path: Path) -> None:
    problem = prepared(tmp_path, "serving.batch=[1,2,4,8,16,32,64,128,256]")
    found = searched(tmp_path, problem)
    assert len(found.trials) < len(problem.rows) / 2
    assert true_front(problem, np.array(found.policy.search.answer())) <= 0.05
    assert found.reason.startswith("no way of serving")


def test_what_is_recommended_was_measured_and_keeps_the_limits(tmp_path: Path) -> None:
    problem = prepared(tmp_path, "sla.latency_ms=900", "sla.tpot_ms=40")
    done = searched(tmp_path, problem).policy.plan(measured_only=True)
    assert done.among is not None and all(row is not None and done.among[row] for row in done.recommended.values())
    best = done.recommended["best under your limits"]
    assert best is not None and done.values["latency_ms"][best] <= 900 and done.values["tpot_ms"][best] <= 40


def test_measured_times_stand_in_the_result_as_they_were_measured(tmp_path: Path) -> None:
    problem = prepared(tmp_path)
    found = searched(tmp_path, problem)
    done = found.policy.plan(measured_only=True)
    for trial, record, measured in found.trials:
        if record.status is Status.DONE:
            assert done.values["latency_ms"][problem.rows[trial.index]] == pytest.approx(1e3 * measured.seconds)
            assert done.values["ttft_ms"][problem.rows[trial.index]] == pytest.approx(1e3 * measured.served["ttft_s"])


def test_limits_that_nothing_keeps_are_answered_by_the_nearest_relaxation(tmp_path: Path) -> None:
    done = searched(tmp_path, prepared(tmp_path, "sla.latency_ms=20")).policy.plan(measured_only=True)
    assert done.recommended["best under your limits"] is None
    (only,) = done.relaxations()
    assert only.limits == {"latency_ms": pytest.approx(done.values["latency_ms"][only.row], rel=1e-3)}
    assert only.limits["latency_ms"] >= done.values["latency_ms"][only.row]


def test_what_ran_out_of_memory_rules_out_larger_batches_of_its_layout(tmp_path: Path) -> None:
    problem = prepared(tmp_path)
    normal = truth_of(problem)

    def truth(config: TrainConfig) -> float | Reason:
        assert config.requests is not None
        return Reason.OUT_OF_MEMORY if config.requests.batch > 16 else normal(config)

    found = searched(tmp_path, problem, truth)
    smallest: dict[tuple[int, int], int] = {}
    for _, record, measured in found.trials:
        layout, batch = record.config["layout"], record.config["requests"]["batch"]
        place = (layout["tensor"], layout["pipeline"])
        assert batch < smallest.get(place, 10**9)
        if not measured.ran:
            smallest[place] = batch
    assert smallest and found.policy.plan(measured_only=True).front.size


def test_a_killed_search_goes_on_and_runs_no_trial_twice(tmp_path: Path) -> None:
    problem = prepared(tmp_path)
    first = PlantedBackend(tmp_path / "place", truth_of(problem), dies_after=1)
    with pytest.raises(KeyboardInterrupt):
        search("demo", problem, Backends(first))
    second = PlantedBackend(tmp_path / "place", truth_of(problem))
    found = search("demo", problem, Backends(second))
    assert len(set(first.submitted + second.submitted)) == len(first.submitted + second.submitted) == len(found.trials)


def test_a_trial_that_is_beaten_in_time_and_in_cost_is_given_up(tmp_path: Path) -> None:
    problem = prepared(tmp_path)
    normal = truth_of(problem)
    found = searched(tmp_path, problem, lambda config: float(normal(config)) * (9.0 if config.layout.tensor == 4 else 1.0))  # type: ignore[arg-type]
    stopped = [record for _, record, _ in found.trials if record.status is Status.STOPPED]
    assert any(record.config["layout"]["tensor"] == 4 for record in stopped)
    assert all(record.reason is Reason.CANNOT_WIN for record in stopped)
    done = found.policy.plan(measured_only=True)
    given_up = [problem.rows[trial.index] for trial, record, _ in found.trials if record in stopped]
    assert not np.isin(given_up, done.front).any(), "what was given up is on no front"


@pytest.mark.parametrize(
    ("words", "mode", "batch", "rate"),
    [
        (["workload.batch=8"], "static", 8, None),
        (["workload.concurrency=32"], "closed", None, None),
        (["workload.rate=3"], "open", 8, True),
    ],
)
def test_a_trial_offers_one_replica_its_share_of_the_load(
    tmp_path: Path, words: list[str], mode: str, batch: int | None, rate: bool | None
) -> None:
    problem = prepared(tmp_path, *words)
    for index, row in enumerate(problem.planned.table[problem.rows]):
        run = run_of(resolve(problem.trial_config(SearchTrial(index, False, None))))
        assert run.requests is not None and run.layout.data == 1 and run.run.task == "inference"
        assert (run.requests.mode, run.requests.batch) == (mode, batch or int(row["batch"]))
        assert run.requests.rate == (pytest.approx(3 / int(row["replicas"])) if rate else None)


# ---------------------------------------------------------------- the command


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """Runs ``trireme search`` in an empty folder over a planted place; the document that it prints."""
    monkeypatch.chdir(tmp_path)
    truth = truth_of(prepared(tmp_path))
    for room in (pool, multirun):
        monkeypatch.setattr(room, "Backends", partial(Backends, PlantedBackend(tmp_path / "place", truth)))
    monkeypatch.setattr(tracking, "MlflowMirror", MagicMock())

    def run(*words: str) -> dict[str, Any]:
        assert main(["search", "--json", *WORDS, *words]) == 0
        return dict(json.loads(capsys.readouterr().out))

    return run


def test_every_recommendation_has_a_command_and_a_recipe_that_plans_it(
    command: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    found = command("sweep.name=demo", "sla.latency_ms=2000")
    assert set(found["commands"]) == {"SGLang", "TensorRT-LLM", "vLLM"}
    for one in found["recommended"].values():
        assert one["command"].startswith("trireme generate")
        assert main(["plan", "--json", f"recipe={Path(one['recipe']).stem}"]) in (0, 1)  # not all keep the limit
        planned = json.loads(capsys.readouterr().out)
        assert planned["front"][0]["name"] == one["name"] and planned["limits"]["latency_ms"] == 2000


@pytest.mark.parametrize("load", ["workload.concurrency=9", "workload.trace=trace.csv"])
def test_a_recipe_of_served_load_plans_the_row_that_was_recommended_and_no_other(
    command: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str], load: str
) -> None:
    Path("trace.csv").write_text("arrival,input,output\n0,50,10\n1,70,30\n2,60,20\n")
    found = command("sweep.name=demo", load)
    for one in found["recommended"].values():
        assert one["command"].startswith("trireme serve")
        assert main(["plan", "--json", f"recipe={Path(one['recipe']).stem}"]) == 0
        planned = json.loads(capsys.readouterr().out)
        assert planned["considered"] == 1 and planned["front"][0]["name"].split()[:3] == one["name"].split()[:3]


def test_what_arrives_is_served_however_much_longer_it_takes_than_predicted(tmp_path: Path) -> None:
    done = searched(tmp_path, prepared(tmp_path, "workload.rate=3"), lambda config: 9.0).policy.plan(measured_only=True)
    assert done.values["throughput"][done.possible] == pytest.approx(3.0, rel=1e-3)


LOCAL = [
    "task=inference",
    "workload=nemo",
    "run.steps=6",
    "cluster.gpus_per_node=4",
    "model=gpt_tiny",
    "hardware=cpu",
    "cluster.hardware.cores=2",
    "serving.weights=fp32",
    "serving.kv=fp32",
    "serving.batch=[1,4]",
]


@pytest.mark.parametrize(("nodes", "kinds"), [("fewest", {"measured", "scaled from measured"}), ("full", {"measured"})])
def test_a_way_to_serve_has_one_time_in_all_places_and_says_whether_it_is_scaled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], nodes: str, kinds: set[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(verb, "searched", lambda name, problem, *_, **__: searched(tmp_path, problem))
    assert main(["search", "--json", *LOCAL, f"search.nodes={nodes}"]) == 0
    found = json.loads(capsys.readouterr().out)
    tried = {one["name"]: one for one in found["trials"] if one["status"] == "done"}
    assert {one["kind"] for one in tried.values()} == kinds
    places = [point | point["measured"] for point in found["points"] if point["measured"]] + [*found["recommended"].values()]
    for one in places:
        assert one["kind"] == tried[one["name"]]["kind"]
        assert one["latency_ms"] == pytest.approx(1e3 * tried[one["name"]]["request_s"])
    for one in tried.values():
        assert (one["request_s"] == pytest.approx(one["measured_s"])) == (one["kind"] == "measured")
    show(GOAL.shown(found))
    told = capsys.readouterr().out
    assert ("~ scaled: the trial served fewer replicas" in told) == (len(kinds) > 1)
    for one in found["recommended"].values():
        (line,) = [line for line in told.splitlines() if f" {one['name']}  " in line]
        time = seconds(one["latency_ms"] / 1e3)
        assert ("~" + time if one["kind"] != "measured" else time) in line and f"{one['name']}, {time} a request ({one['kind']})" in told


def test_report_and_mlflow_show_what_was_measured_filled_and_what_was_predicted_hollow(command: Callable[..., dict[str, Any]]) -> None:
    found = command("sweep.name=demo")
    sweep = Store("runs").sweep("demo")
    points = front.points_of(sweep.front)
    assert {one.trial for one in points if one.measured} == {t["trial"] for t in found["trials"] if t["status"] == "done"}
    page = report.render(sweep)
    assert page.count('class="hollow"') == sum(one.predicted is not None for one in points)
    assert len(re.findall(r'class="point c[05]"', page.split("</figure>")[0])) == sum(one.measured is not None for one in points)
    assert "lowest latency" in page and "trireme generate" in page
    assert "| layout |" in names.sweep_tags(sweep, [])["mlflow.note.content"]


def test_a_damaged_front_is_left_out_of_the_page(command: Callable[..., dict[str, Any]]) -> None:
    command("sweep.name=demo")
    for damage in ({"points": 3}, {"points": [{"measured": {"latency_ms": "x"}}, 7]}, {"recommended": []}, {"points": [{}]}):
        assert 'id="front"' not in report.render(dataclasses.replace(Store("runs").sweep("demo"), front=damage)), damage


WRONG = [
    (["engine=vllm"], "can be predicted but not launched"),
    (["serving.weights=fp8", "serving.kv=fp8"], "serving.weights=fp8 is not a format of Trireme; use fp32, bf16 or fp16"),
    (["serving.kv=fp16"], "differs from serving.weights=bf16"),
    (["trainer=megatron_core"], "trainer=megatron_core has no meaning for task=inference; leave it out"),
    (["run.global_batch=8"], "run.global_batch=8 has no meaning for task=inference"),
    (["layout.micro_batch=2"], "layout.micro_batch has no meaning for inference"),
    (["task=train", "workload.batch=3"], "workload=nemo has no meaning for task=train; add task=inference"),
    (["run.warmup_steps=6"], "leaves nothing of run.steps=6"),
    (["sla.latency_ms=100", "sla.ttft_ms=200"], "no request ends before its first token"),
    (["workload=chatt"], "chat"),
    (["workload.trace=wrong.csv"], "wrong.csv"),
    (["sweep.name=a/b"], "sweep.name='a/b' cannot name a sweep"),
    (["workload.rate=1e6"], "1e+06 requests/s arrive and at most "),
]


@pytest.mark.parametrize(("words", "says"), WRONG)
def test_wrong_input_is_one_plain_line_and_nothing_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wrong.csv").write_text("when,in,out\n1,2,3\n")
    assert main(["search", *WORDS, *words]) == 2
    told = capsys.readouterr().err.strip()
    assert says in told and told.startswith("error: ") and "\n" not in told
    assert not (tmp_path / "runs").exists()
