"""A search through the real sweep loop, over a place whose step times are known."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from launcher.backends import pool
from launcher.backends.pool import Backends
from launcher.cli import search as command
from launcher.cli import train
from launcher.cli.console import show
from launcher.config import Config, compose, resolve, rules
from launcher.config.hardware import hardware_files
from launcher.config.schema import LocalCluster, SweepConfig
from launcher.config.search import SearchConfig, SpaceConfig
from launcher.config.uncertainty import shipped_widths
from launcher.cost import CostModel, predict
from launcher.goals.goal import Written
from launcher.goals.training.goal import GOAL
from launcher.goals.training.search import TrainingSearch
from launcher.planning.layout_filter import columns_wanted
from launcher.planning.plan import plan
from launcher.results.ranking import measurement as as_ranked
from launcher.results.ranking import rank
from launcher.search.policy import SearchTrial
from launcher.search.problem import SearchProblem, ladder, search_problem
from launcher.search.steps import OWN_STEPS, known_to, noise_of
from launcher.sweep import loop, multirun, stopping
from launcher.sweep.run import Point, run_sweep
from launcher.sweep.search import SearchOutcome, measured_steps, measurement, search
from launcher.tracking import process as tracking
from launcher.trials.identity import trial_id
from launcher.trials.store import Store
from tests.search.planted import PlantedBackend
from trainer.shared.records.outcome import Reason, Status
from trainer.shared.run.derived import world_size_of
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.schema import DataConfig, LayoutConfig, ModelConfig, RunConfig, ShardingConfig, TrainConfig

pytestmark = pytest.mark.slow

Searched = tuple[SearchProblem, SearchOutcome[Any]]
BASE = Config(
    model=ModelConfig(layers=8, hidden=1024, heads=16, vocab=8192, seq=512),
    run=RunConfig(global_batch=64, steps=8, warmup_steps=1, precision="bf16"),
    data=DataConfig(kind="synthetic"),
    cluster=LocalCluster(nodes=1, gpus_per_node=8, hardware=hardware_files()["a100_80"]),
    search=SearchConfig(start_s=0.0, space=SpaceConfig(max_micro_batch=4, schedules=["1f1b"], partial_recompute=False)),
)


@pytest.fixture(autouse=True, scope="module")
def hasty_loop() -> Iterator[None]:
    """The place answers at once, so there is nothing to wait for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "TICK_SECONDS", 0.001)
        patch.setattr(stopping, "_REQUESTS_SECONDS", 0.0)
        yield


@pytest.fixture(scope="module")
def undisturbed(hasty_loop: None, tmp_path_factory: pytest.TempPathFactory) -> Searched:
    """A search that several tests look at, and what it chose from."""
    folder = tmp_path_factory.mktemp("undisturbed")
    candidates = prepared(folder)
    return candidates, search("demo", candidates, Backends(PlantedBackend(folder / "place", truth)), ["model=x"])


def prepared(tmp_path: Path, **changes: object) -> SearchProblem:
    config = dataclasses.replace(BASE, **({"sweep": SweepConfig(dir=str(tmp_path / "runs"))} | changes))  # type: ignore[arg-type]
    return search_problem(config, plan(config))


def truth(config: TrainConfig) -> float:
    """The cost model's own answer, but tensor ranks cost 30 % more each doubling than it thinks."""
    cluster = dataclasses.replace(BASE.cluster, nodes=-(-world_size_of(config.layout) // 8))
    seconds = predict(config.model, config.layout, config.run, cluster).step_time_s
    return float(seconds * 1.3 ** np.log2(config.layout.tensor) * 1.4)


def truths(candidates: SearchProblem) -> np.ndarray:
    """The same of the exhaustive grid."""
    known = CostModel(BASE.cluster).predict_table(BASE.model, candidates.table, BASE.run).step_time
    seconds = known * 1.3 ** np.log2(candidates.table["tensor"]) * 1.4
    for i in range(0, len(seconds), 40):
        assert truth(resolve(candidates.trial_config(SearchTrial(i, True, None))).train_config()) == pytest.approx(seconds[i])
    return np.asarray(seconds)


def test_the_search_finds_the_best_of_the_exhaustive_grid_with_few_trials(undisturbed: Searched) -> None:
    candidates, found = undisturbed
    assert found.policy.best_seconds() <= 1.02 * truths(candidates).min()  # type: ignore[operator]
    assert len(found.trials) < len(candidates.candidates) / 10
    assert found.reason.startswith("no untried layout")


def test_every_trial_is_a_record_of_the_sweep_with_its_prediction(undisturbed: Searched) -> None:
    candidates, found = undisturbed
    records = Store(candidates.config.sweep.dir).sweep("demo").records
    assert [r.id for r in records] == [record.id for _, record, _ in found.trials]
    assert all(record.predicted and record.predicted["step_time_s"] > 0 and record.overrides[0] == "model=x" for record in records)
    for trial, record, _ in found.trials:
        low, high = record.predicted["interval_s"]  # type: ignore[index]
        assert low < record.predicted["step_time_s"] < high  # type: ignore[index]
        run = resolve(candidates.trial_config(trial))
        own = predict(run.model, run.layout, run.run, run.cluster, BASE.trainer)
        assert own.step_time_s == pytest.approx(record.predicted["step_time_s"]) and own.interval_s == pytest.approx((low, high), rel=0.01)  # type: ignore[index]


def test_a_trial_that_cannot_win_is_stopped_after_few_steps(tmp_path: Path) -> None:
    candidates = prepared(tmp_path, search=dataclasses.replace(BASE.search, max_trials=12, doubt=1e-9))
    found = search("demo", candidates, Backends(PlantedBackend(tmp_path / "place", truth)))
    stopped = [record for _, record, _ in found.trials if record.status is Status.STOPPED]
    assert stopped and all(record.reason is Reason.CANNOT_WIN for record in stopped)
    for record in stopped:
        assert 1 <= len(measured_steps(record)) < BASE.run.steps - BASE.run.warmup_steps
        assert "the best so far would take" in record.detail
    best = found.policy.ranking()[0]
    assert all(record.status is Status.DONE for trial, record, _ in found.trials if trial.index == best)


class TestEnough:
    """Trials end once their step time is known."""

    def slow(self, config: TrainConfig) -> float:
        """So slow that what is left of a trial is worth ending."""
        return 1000 * truth(config)

    def searched(
        self, tmp_path: Path, enough: float | None = None, scatter: float = 0.001, steps: int = 20, warmup: int = 1
    ) -> tuple[SearchOutcome[Any], list[str]]:
        place = PlantedBackend(tmp_path / "place", self.slow, scatter=scatter)
        settings = dataclasses.replace(BASE.search, enough=enough)
        run = dataclasses.replace(BASE.run, steps=steps, warmup_steps=warmup)
        return search("demo", prepared(tmp_path, search=settings, run=run), Backends(place)), place.submitted

    @pytest.mark.parametrize("warmup, least", [(1, 2), (2, 1)])
    def test_a_trial_ends_when_its_step_time_is_known_and_counts_as_measured(self, tmp_path: Path, warmup: int, least: int) -> None:
        """After one step where one of the warm-up agrees with it, after two where there is none that could."""
        whole, _ = self.searched(tmp_path / "whole", enough=0.0, warmup=warmup)
        found, _ = self.searched(tmp_path / "brief", warmup=warmup)
        assert [trial.index for trial, _, _ in found.trials] == [trial.index for trial, _, _ in whole.trials]
        assert found.policy.ranking() == whole.policy.ranking()
        records = [record for _, record, _ in found.trials if record.status is Status.DONE]
        assert records and all(record.reason is Reason.MEASURED for record in records)
        for place, record in enumerate(records):
            steps = measured_steps(record)
            assert (4 if place == 0 else least) <= len(steps) <= 8, "a few are asked for, and a few more run until the wish is read"
            result = record.read_result() or {}
            assert (result["status"], result["reason"]) == ("done", "measured")
            assert result["step_time_s"] == pytest.approx(np.median(steps)) and "measured steps" in result["message"]
        for (_, record, one), (_, _, other) in zip(found.trials, whole.trials, strict=True):
            assert one.seconds == pytest.approx(other.seconds, rel=0.005)
            assert record.status is not Status.DONE or one.noise <= 0.01
        placed = rank(as_ranked(record, record.read_result() or {}) for record in records)
        assert [one.place for one in placed] == list(range(1, len(placed) + 1))

    def test_steps_that_scatter_run_to_the_end(self, tmp_path: Path) -> None:
        found, _ = self.searched(tmp_path, scatter=0.04, steps=12)
        done = [record for _, record, _ in found.trials if record.status is Status.DONE]
        assert done and all(record.reason is None and len(measured_steps(record)) == 11 for record in done)

    def test_what_is_left_of_short_trials_is_not_worth_ending(self, undisturbed: Searched) -> None:
        assert all(record.reason is not Reason.MEASURED for _, record, _ in undisturbed[1].trials)

    def test_repeated_it_starts_nothing_and_without_it_all_steps_run(self, tmp_path: Path) -> None:
        found, first = self.searched(tmp_path)
        again, second = self.searched(tmp_path)
        assert first and not second and again.policy.ranking() == found.policy.ranking()
        assert [one.seconds for _, _, one in again.trials] == [one.seconds for _, _, one in found.trials]
        whole, third = self.searched(tmp_path, enough=0.0)
        assert set(third) == {record.id for _, record, _ in found.trials if record.reason is Reason.MEASURED}
        assert all(record.reason is not Reason.MEASURED for _, record, _ in whole.trials)

    @pytest.mark.parametrize("ended", [Reason.MEASURED, Reason.CANNOT_WIN])
    def test_a_sweep_runs_all_steps_of_what_a_search_ended(self, tmp_path: Path, ended: Reason) -> None:
        found, _ = self.searched(tmp_path)
        trial, before = next((trial, record) for trial, record, _ in found.trials if record.reason is ended)
        run = dataclasses.replace(BASE.run, steps=20)
        problem = prepared(tmp_path, run=run)
        place = PlantedBackend(tmp_path / "place", self.slow)
        point = Point((), resolve(problem.trial_config(trial)))
        (record,) = run_sweep("whole", [point], problem.config.sweep, Backends(place))
        assert record.id == before.id and place.submitted == [record.id]
        assert (record.status, record.reason, record.attempt) == (Status.DONE, None, before.attempt + 1)
        assert len(measured_steps(record)) == 19

    def test_a_trial_is_priced_by_the_steps_that_it_is_expected_to_run(self, tmp_path: Path) -> None:
        """With many steps its price would hang on step times alone, though a trial that ends early mostly costs its start."""
        for enough, steps in ((0.0, 1000), (None, BASE.run.warmup_steps + 1), (0.005, BASE.run.warmup_steps + 4)):
            settings = dataclasses.replace(BASE.search, enough=enough, start_s=60.0)
            problem = prepared(tmp_path, search=settings, run=dataclasses.replace(BASE.run, steps=1000))
            one = problem.small.parts.sum(axis=1)
            assert problem.policy().price.whole == pytest.approx(8 * (60.0 + steps * one))

    def test_what_a_few_steps_say_is_never_surer_than_earlier_trials_were(self) -> None:
        assert known_to([], 0.0, [1.0, 1.0]) == known_to([1.0], 0.0) == known_to([1.0] * 3, None, [1.0] * 3) == math.inf
        assert known_to([1.0], 0.01, [1.0]) == 0.01 and known_to([1.0, 1.0], 0.01) == pytest.approx(0.01 / math.sqrt(2))
        assert known_to([1.0], 0.001, [1.1]) > 0.04 < known_to([1.0, 1.0], 0.001, [1.1]), "the warm-up was slower"
        assert known_to([1.0] * 3, 0.001, [1.1]) < 0.001, "three agree, whatever the warm-up was"
        assert known_to([1.0] * 3, 0.03) == pytest.approx(0.03 / math.sqrt(3))
        assert known_to([1.0] * 4, None) == 0.0 and known_to([1.0] * 4, 0.02) == pytest.approx(0.01)
        assert known_to([1.0, 1.0, 2.0], 0.001) > 0.2, "one odd step of three"
        draw = np.random.default_rng(1)
        runs = [list(draw.normal(1.0, 0.02, 3)) for _ in range(400)]
        errors = np.array([known_to(run, 1.25 * 0.02) for run in runs])
        assert np.std([np.median(run) for run in runs]) <= errors.mean() <= 2 * np.std([np.median(run) for run in runs])


def test_out_of_memory_and_other_failures_are_shown_and_survived(tmp_path: Path) -> None:
    def failing(config: TrainConfig) -> float | Reason:
        if config.layout.micro_batch == 4:
            return Reason.OUT_OF_MEMORY
        return Reason.NUMERICS if config.layout.recompute == "selective" else truth(config)

    candidates = prepared(tmp_path)
    found = search("demo", candidates, Backends(PlantedBackend(tmp_path / "place", failing)))
    assert found.policy.ranking()
    reasons = {m.reason for _, _, m in found.trials if not m.ran}
    assert reasons <= {Reason.OUT_OF_MEMORY, Reason.NUMERICS} and reasons
    winner = candidates.layout(found.policy.ranking()[0])
    assert winner.micro_batch < 4 and winner.recompute != "selective"


def test_a_killed_search_goes_on_with_the_same_trials_and_runs_none_twice(undisturbed: Searched, tmp_path: Path) -> None:
    candidates = prepared(tmp_path)
    first = PlantedBackend(tmp_path / "place", truth, dies_after=1)
    with pytest.raises(KeyboardInterrupt):
        search("demo", candidates, Backends(first))
    second = PlantedBackend(tmp_path / "place", truth)
    resumed = search("demo", candidates, Backends(second))
    assert [trial.index for trial, _, _ in resumed.trials] == [trial.index for trial, _, _ in undisturbed[1].trials]
    assert len(set(first.submitted + second.submitted)) == len(first.submitted + second.submitted)


@pytest.fixture
def planted_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """Runs ``trireme search`` in an empty folder over a planted place; the document that it prints."""
    monkeypatch.chdir(tmp_path)
    planted = PlantedBackend(tmp_path / "place", lambda config: 1.0 + config.layout.micro_batch)
    for room in (pool, multirun):  # one that was first imported meanwhile would keep the stand-ins
        monkeypatch.setattr(room, "Backends", partial(Backends, planted))
    monkeypatch.setattr(tracking, "MlflowMirror", MagicMock())  # a database takes seconds to begin

    def run(*words: str) -> dict[str, Any]:
        assert command.main(["--json", "hardware=a100_80", "search.space.max_micro_batch=2", *words]) == 0
        return dict(json.loads(capsys.readouterr().out))

    return run


def test_the_command_that_is_printed_runs_what_was_measured(
    tmp_path: Path, planted_command: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Wherever the trials lie, and however the place and the data were chosen."""
    words = ["cluster=slurm", "cluster.partition=big", "cluster.gpus_per_node=2", "data=synthetic", "run.seed=5", "sweep.dir=elsewhere"]
    result = planted_command(*words, "search.max_trials=3")
    show(GOAL.shown(result))
    name = capsys.readouterr().out.split("trireme train recipe=")[1].split()[0]
    again, best = compose([f"recipe={name}"]), result["ranking"][0]
    assert trial_id(resolve(again)) == best["trial"]
    assert best["trial"] in {record.id for record in Store("elsewhere").sweep(result["search"]).records}
    assert again.cluster.backend == "slurm"
    assert result["search"] in Path(result["recipe"]).read_text().partition("\n\n")[0]


def test_hydras_sweeper_writes_what_it_measured_too(
    planted_command: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [])  # the verb replaces it
    words = ["cluster=slurm", "cluster.partition=big", "cluster.gpus_per_node=2", "data=synthetic", "hardware=a100_80"]
    assert train.main(["-m", "hydra/sweeper=trireme", *words, "layout.tensor=1,2", "sweep.name=swept"]) == 0
    assert "trireme train recipe=swept" in capsys.readouterr().out
    assert trial_id(resolve(compose(["recipe=swept"]))) in {record.id for record in Store("runs").sweep("swept").records}


def test_a_corpus_is_found_from_the_recipe_as_it_was_from_the_search(
    tmp_path: Path, planted_command: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trial's configuration holds an absolute path, which would be another machine's."""
    monkeypatch.setattr(rules, "check_corpus", lambda *_: None)
    result = planted_command("data.path=corpus", "cluster.gpus_per_node=1", "search.max_trials=1", "search.recipe=mine")
    assert result["recipe"] == "runs/recipe/mine.yaml" and str(tmp_path) not in Path(result["recipe"]).read_text()
    assert compose(["recipe=mine"]).data.path == "corpus"


class TestOnFewerNodes:
    config = dataclasses.replace(
        BASE, cluster=dataclasses.replace(BASE.cluster, nodes=8), run=dataclasses.replace(BASE.run, global_batch=512)
    )

    def prepared(self, tmp_path: Path) -> SearchProblem:
        return prepared(tmp_path, cluster=self.config.cluster, run=self.config.run)

    def test_a_small_trial_keeps_everything_but_the_replicas(self, tmp_path: Path) -> None:
        candidates = self.prepared(tmp_path)
        for index in range(0, len(candidates.candidates), 17):
            full, small = (resolve(candidates.trial_config(SearchTrial(index, whole, None))) for whole in (True, False))
            replicas, fewer = full.layout.data or 0, small.layout.data or 0
            assert fewer == replicas or small.cluster.nodes < full.cluster.nodes
            assert world_size_of(small.layout) == small.cluster.world_size
            assert small.run.global_batch / fewer == full.run.global_batch / replicas
            for name in ("params", "grads", "optimizer"):
                one, other = getattr(full.layout.sharding, name), getattr(small.layout.sharding, name)
                assert other == (fewer if one == replicas else one)
            same = dataclasses.replace(small.layout, data=replicas, sharding=full.layout.sharding)
            assert same == full.layout and small.model == full.model

    def test_the_search_uses_few_nodes_and_verifies_the_best_at_full_size(self, tmp_path: Path) -> None:
        candidates = self.prepared(tmp_path)
        found = search("demo", candidates, Backends(PlantedBackend(tmp_path / "place", truth)))
        full = [record for trial, record, _ in found.trials if trial.full]
        assert {record.world_size for record in full} == {64}
        assert all(record.world_size <= 16 for trial, record, _ in found.trials if not trial.full)
        assert found.policy.ranking()[0] in found.policy.verified
        whole = prepared(tmp_path, cluster=self.config.cluster, run=self.config.run, search=dataclasses.replace(BASE.search, nodes="full"))
        on_all = search("whole", whole, Backends(PlantedBackend(tmp_path / "other", truth)))
        assert sum(record.world_size for _, record, _ in found.trials) < sum(record.world_size for _, record, _ in on_all.trials)

    def test_with_full_nodes_nothing_is_cut_down(self, tmp_path: Path) -> None:
        settings = dataclasses.replace(BASE.search, nodes="full")
        candidates = prepared(tmp_path, cluster=self.config.cluster, run=self.config.run, search=settings)
        assert (candidates.small_table == candidates.table).all()


@pytest.mark.parametrize(
    "model_ranks, data, shards, replicas",
    [
        (8, 16, (1, 1, 16), (2, 4, 8, 16)),  # two replicas at least
        (4, 16, (1, 4, 16), (4, 8, 16)),  # a shard of 4 needs 4 replicas
        (1, 8, (1, 1, 1), (8,)),  # one node
        (2, 12, (1, 1, 12), (4, 12)),  # whole nodes of 8 ranks
        (8, 1, (1, 1, 1), (1,)),
    ],
)
def test_replicas_that_a_trial_may_have(model_ranks: int, data: int, shards: tuple[int, int, int], replicas: tuple[int, ...]) -> None:
    assert ladder(model_ranks, data, shards, 8) == replicas


def test_where_fewer_replicas_would_not_fit_more_are_kept(tmp_path: Path) -> None:
    """30B states sharded over all replicas: those of one node would hold more than fits."""
    hungry = dataclasses.replace(
        BASE,
        model=ModelConfig(layers=60, hidden=6656, heads=52, vocab=51200, seq=2048),
        cluster=dataclasses.replace(BASE.cluster, nodes=8),
        run=dataclasses.replace(BASE.run, global_batch=512),
        search=dataclasses.replace(BASE.search, space=dataclasses.replace(BASE.search.space, max_pipeline=1, max_tensor=2)),
    )
    candidates = search_problem(hungry, plan(hungry))
    wanted = LayoutConfig(tensor=1, data=64, micro_batch=1, recompute="full", sharding=ShardingConfig(64, 64, 64))
    index = next(i for i in range(len(candidates.candidates)) if candidates.layout(i) == wanted)
    assert 8 < candidates.small_table["data"][index] <= 64


def test_only_the_layouts_asked_for_are_candidates(tmp_path: Path) -> None:
    config = dataclasses.replace(BASE, sweep=SweepConfig(dir=str(tmp_path)))
    wanted = columns_wanted({"layout.tensor": [1, 2], "layout.recompute": ["none"], "layout.sharding.optimizer": [1]})
    table = search_problem(config, plan(config, wanted=wanted)).table
    assert set(table["tensor"].tolist()) == {1, 2} and set(table["recompute"].tolist()) == {0} and set(table["optimizer"].tolist()) == {1}
    with pytest.raises(ConfigError, match="no layout that obeys the rules"):
        plan(config, wanted={"tensor": [3]})


@pytest.mark.parametrize(
    "sweeps, word", [({"model.hidden": [1, 2]}, "cannot be searched"), ({"layout.schedule": ["1fb1"]}, "did you mean")]
)
def test_sweeps_that_cannot_be_searched_are_plain_errors(sweeps: dict[str, list[object]], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        columns_wanted(sweeps)


def test_a_budget_of_memory_is_what_runs_out(tmp_path: Path) -> None:
    """The host has no limit of its own; layouts that are likely to exceed the run's are tried later, and a run that did teaches something."""
    cluster = dataclasses.replace(BASE.cluster, hardware=hardware_files()["cpu"])
    counted = search_problem(dataclasses.replace(BASE, cluster=cluster), plan(dataclasses.replace(BASE, cluster=cluster))).candidates
    assert counted.capacity == np.inf
    tight = dataclasses.replace(
        BASE, cluster=cluster, run=dataclasses.replace(BASE.run, memory_gb=float(np.median(counted.memory)) / 1e9 * 0.8)
    )
    policy = search_problem(tight, plan(tight)).policy()
    before = policy.memory.fits()
    assert before.min() < 0.5 and before.max() > 0.9
    fullest = int(np.argmax(before))
    policy.memory.observe(float(policy.candidates.memory[fullest]), ran=False)
    assert (policy.memory.fits() < before).all()


def test_nothing_that_fits_is_a_plain_error(tmp_path: Path) -> None:
    hardware = dataclasses.replace(BASE.cluster.hardware, memory_gb=0.2)
    config = dataclasses.replace(BASE, cluster=dataclasses.replace(BASE.cluster, hardware=hardware))
    with pytest.raises(ConfigError, match="no layout is likely to fit into memory"):
        search_problem(config, plan(config))


def test_the_report_says_what_it_cost_and_what_the_grid_would_have(tmp_path: Path) -> None:
    """Of layouts that no trial resembles nothing is learnt, so here all are slower than predicted by the same factor."""

    def even(config: TrainConfig) -> float:
        return truth(config) / 1.3 ** float(np.log2(config.layout.tensor))

    candidates = prepared(tmp_path)
    found: SearchOutcome = search("demo", candidates, Backends(PlantedBackend(tmp_path / "place", even)))
    report = json.loads(json.dumps(TrainingSearch(candidates, 1000, candidates.config).document("demo", found, Written()), allow_nan=False))
    assert report["trials"] == len(found.trials) and report["layouts"] == 1000
    assert [row["step_time_s"] for row in report["ranking"]] == sorted(row["step_time_s"] for row in report["ranking"])
    grid = truths(candidates) / 1.3 ** np.log2(candidates.table["tensor"])
    assert report["grid_gpu_hours"] == pytest.approx(grid.sum() * BASE.run.steps * 8 / 3600, rel=0.3)


def test_the_start_of_a_trial_is_what_it_took_besides_its_steps(tmp_path: Path) -> None:
    once = prepared(tmp_path, search=dataclasses.replace(BASE.search, max_trials=1))
    found = search("demo", once, Backends(PlantedBackend(tmp_path / "place", lambda _: 2.0)))
    record = next(record for _, record, measured in found.trials if record.status is Status.DONE)
    record.started, record.ended, record.queue_clock = 100.0, 100.0 + BASE.run.steps * 2.0 + 7.0, None
    measured = measurement(record, 0.0)
    assert measured.start_s == pytest.approx(7.0) and measured.gpu_hours == pytest.approx(8 * 23.0 / 3600)
    record.status, record.reason = Status.FAILED, Reason.OUT_OF_MEMORY
    assert math.isnan(measurement(record, 0.0).start_s)


def test_a_trial_that_was_refused_before_it_had_a_configuration_is_an_observation_too(tmp_path: Path) -> None:
    found = search(
        "demo",
        prepared(tmp_path, search=dataclasses.replace(BASE.search, max_trials=1)),
        Backends(PlantedBackend(tmp_path / "place", truth)),
    )
    (_, record, _) = found.trials[0]
    record.status, record.reason, record.config = Status.PRUNED, Reason.CONFIGURATION, {}
    observed = measurement(record, 0.0)
    assert observed.reason is Reason.CONFIGURATION and math.isinf(observed.seconds) and math.isnan(observed.start_s)


def test_noise_is_the_standard_error_of_the_median() -> None:
    draw = np.random.default_rng(0)
    runs = [list(draw.normal(1.0, 0.05, 50)) for _ in range(300)]
    assert np.mean([noise_of(run) for run in runs]) == pytest.approx(np.std([np.median(run) for run in runs]), rel=0.2)
    assert noise_of([1.0] * 8) == 0.0


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_few_steps_are_never_exact(count: int) -> None:
    """They scatter as those of earlier trials did, and where there were none, so that a run which is believed repeats as published ones do."""
    draw = np.random.default_rng(0)
    runs = [list(draw.normal(1.0, 0.05, count)) for _ in range(2000)]
    off = np.std([np.median(run) for run in runs])
    assert off < np.mean([noise_of(run, 1.25 * 0.05) for run in runs]) < 2 * off
    assert noise_of([1.0] * count) == pytest.approx(shipped_widths().noise * math.sqrt(OWN_STEPS / count))
    assert noise_of([1.0, 1.1]) > noise_of([1.0, 1.01]) > noise_of([1.0, 1.0]) and noise_of([]) == 0.0


def test_a_drifting_machine_is_not_taken_for_an_exact_measurement() -> None:
    assert noise_of([1.0, 1.01, 0.99, 1.0, 1.5, 1.51, 1.49, 1.5]) == pytest.approx(np.log(1.5) / 2, rel=0.01)
