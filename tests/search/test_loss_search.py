"""The search for a loss: over planted curves, and once over real trainings."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from launcher.backends import pool
from launcher.backends.pool import Backends
from launcher.cli import search as command
from launcher.cli.console import show
from launcher.config import compose, locate_data, resolve
from launcher.cost import predict
from launcher.goals.loss.goal import GOAL
from launcher.results import arms, report
from launcher.sweep import loop, multirun, stopping
from launcher.tracking import process as tracking
from launcher.trials.identity import trial_id
from launcher.trials.store import Store
from tests import warm
from tests.search.planted import PlantedBackend
from trainer.shared.records.outcome import Reason
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.schema import LayoutConfig, TrainConfig

pytestmark = pytest.mark.slow

TINY = ["model.layers=2", "model.hidden=16", "model.heads=2", "model.vocab=320", "model.seq=16"]
WORDS = ["goal=loss", "search.target_loss=3", "search.seeds=4", "run.global_batch=8", "run.steps=60", "run.eval_every=2", "run.eval_batches=2",
         "cluster.gpus_per_node=1", "cluster.price_per_gpu_hour=2", "data.path=corpus", "data.held_out=0.2"]  # fmt: skip
ARMS = ["search.arms.fast=optimizer.lr=0.002", "search.arms.slow=optimizer.lr=0.001"]


def loss(config: TrainConfig, step: int) -> float:
    """Falls with the logarithm of steps times learning rate; a seed shifts it by a little, each arm by less."""
    seed, own = np.random.default_rng(config.run.seed), np.random.default_rng([config.run.seed, round(1e9 * config.optimizer.lr)])
    return 3.0 - 0.3 * math.log(step * config.optimizer.lr / 0.04) + float(seed.normal(0, 0.01) + own.normal(0, 0.001))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared text of a few thousand tokens."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "text.txt").write_text("\n".join(f"{n} and {n + 1} are {2 * n + 1}, which is {'odd' * (n % 3)}." for n in range(900)))
    warm.run("-m", "launcher", "prepare", f"data.source={folder}", "data.path=corpus", "data.pattern=*.txt", "data.vocab=320",
             "model.vocab=320", cwd=folder, check=True)  # fmt: skip
    return folder


@pytest.fixture
def searched(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Runs ``trireme search`` over a planted place in a folder with a text: exit code, document and place."""
    (tmp_path / "corpus").symlink_to(corpus / "corpus")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loop, "TICK_SECONDS", 0.001)
    monkeypatch.setattr(stopping, "_REQUESTS_SECONDS", 0.0)
    monkeypatch.setattr(tracking, "MlflowMirror", MagicMock())

    def run(
        *words: str, arms: list[str] = ARMS, truth: Any = lambda config: 0.5, **place: Any
    ) -> tuple[int, dict[str, Any], PlantedBackend]:
        planted = PlantedBackend(tmp_path / "place", truth, loss=loss, **place)
        for room in (pool, multirun):
            monkeypatch.setattr(room, "Backends", partial(Backends, planted))
        code = command.main(["--json", *TINY, *WORDS, *arms, *words])
        return code, json.loads(capsys.readouterr().out), planted

    return run


def test_the_arm_that_needs_fewer_steps_wins_and_becomes_a_recipe(
    searched: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hopeless = "search.arms.hopeless=optimizer.lr=0.0001"
    code, found, place = searched("search.recipe=soonest", "sweep.name=demo", arms=[*ARMS, hopeless])
    assert (code, found["winner"], found["rivals"], found["complete"]) == (0, "fast", [], True)
    first, second, last = found["arms"]
    assert (last["arm"], last["told"], last["dropped_after"]) == ("hopeless", "not reached", 3) and len(place.submitted) < 12
    assert first["steps"] == pytest.approx(20, rel=0.05) and second["steps"] == pytest.approx(40, rel=0.05)
    assert first["time_s"] == pytest.approx(0.5 * first["steps"]) and first["tokens"] == pytest.approx(128 * first["steps"])
    assert first["price"] == pytest.approx(2 * first["gpu_hours"]) == pytest.approx(2 * first["time_s"] / 3600)
    low, high = second["over_first_interval"]
    assert low < 2.0 < high and low > 1
    again = resolve(locate_data(compose(["recipe=soonest"])))
    assert again.optimizer.lr == 0.002 and trial_id(again) in place.submitted
    monkeypatch.setenv("COLUMNS", "80")
    show(GOAL.shown(found))
    out = capsys.readouterr().out
    assert "fast is the fastest" in out and max(map(len, out.splitlines())) <= 80
    sweep = Store("runs").sweep("demo")
    page = report.render(sweep)
    assert "fast is the fastest" in page and "validation loss over time" in page
    assert "| fast | " in arms.markdown(sweep.front)


BRANCHES = ["search.branches=3", "search.decay=0.2", "run.eval_every=0"]


def test_decays_of_several_lengths_branch_from_one_trunk_of_each_arm_and_seed(searched: Callable[..., Any]) -> None:
    """Trunks go first, and are the only ones that save; each branch continues its own one."""
    words = [*BRANCHES, "search.seeds=2", "search.target_loss=2.9", "sweep.name=demo", "search.recipe=soonest"]
    code, found, place = searched(*words)
    assert len(place.submitted) == 2 * 2 * 4 == found["trials"]
    runs = {record.id: record.config for record in Store("runs").sweep("demo").records}
    first, *rest = place.submitted[:4]
    trunk = runs[first]
    assert (trunk["run"]["steps"], trunk["run"]["checkpoint"]["every"], trunk["optimizer"]["stable_steps"]) == (48, 16, 48)
    for number, branch in enumerate((runs[one] for one in rest), 1):
        run, saved, optimizer = branch["run"], branch["run"]["checkpoint"], branch["optimizer"]
        assert (run["steps"], run["eval_every"], saved["at"], saved["every"]) == (20 * number, 20 * number, 16 * number, 0)
        assert (optimizer["stable_steps"], optimizer["decay_steps"]) == (16 * number, 20 * number)
        assert saved["dir"] == trunk["run"]["checkpoint"]["dir"] and run["seed"] == trunk["run"]["seed"]
    assert len({runs[one]["run"]["checkpoint"]["dir"] for one in place.submitted}) == 4
    fast, slow = found["arms"]
    assert (code, found["winner"], found["bounded"]) == (0, "fast", [])
    assert [step for step, _ in fast["curves"]["1234"]] == [20, 40, 60]
    assert fast["steps"] == pytest.approx(29.6, rel=0.1) and slow["steps"] == pytest.approx(56.4, rel=0.1)
    assert searched(*words)[2].submitted == []
    again = resolve(locate_data(compose(["recipe=soonest"])))
    assert (again.run.steps, again.optimizer.stable_steps, again.optimizer.decay_steps) == (60, 48, 60)


@pytest.mark.parametrize(
    "there", [[], ["search.target_cluster=hardware=h100 cluster.gpus_per_node=1 run.precision=bf16"]], ids=["here", "there"]
)
def test_steps_of_other_sizes_count_with_their_own_times_and_tokens(searched: Callable[..., Any], there: list[str]) -> None:
    """A ramp of the batch makes ten steps of a quarter of it before those that reach the loss."""
    arms = [ARMS[0], "search.arms.ramp=optimizer.lr=0.00201 'run.phases=[{until: 320, global_batch: 2}]'"]
    _, found, _ = searched(*there, "search.seeds=2", arms=arms)
    plain, ramp = sorted(found["arms"], key=lambda one: one["arm"] == "ramp")
    steps = ramp["steps"]
    assert steps == pytest.approx(20, rel=0.05) and ramp["tokens"] == pytest.approx(16 * (2 * 10 + 8 * (steps - 10)))
    assert plain["tokens"] == pytest.approx(16 * 8 * plain["steps"])
    if there:
        layout = LayoutConfig(data=1, micro_batch=int(ramp["layout"].split("mb")[1].split()[0]))
        asked = resolve(compose([*TINY, "hardware=h100", "cluster.gpus_per_node=1", "run.precision=bf16", "optimizer.lr=0.00201"]))
        small, large = (
            predict(asked.model, layout, replace(asked.run, global_batch=batch), asked.cluster, optimizer=asked.optimizer).step_time_s
            for batch in (2, 8)
        )
        assert small < large and ramp["step_time_s"] == pytest.approx((10 * small + (steps - 10) * large) / steps, rel=1e-3)
        return
    assert ramp["step_time_s"] == pytest.approx(0.5 * (10 / 4 + steps - 10) / steps, rel=0.01)
    assert ramp["time_s"] == pytest.approx(steps * ramp["step_time_s"], rel=0.01)


def test_an_arm_whose_shortest_branch_has_the_loss_is_never_told_to_be_slower(searched: Callable[..., Any]) -> None:
    arms = ["search.arms.fast=optimizer.lr=0.002 run.steps=20", "search.arms.slow=optimizer.lr=0.001 run.steps=60"]
    _, found, _ = searched("search.branches=2", "search.seeds=2", "search.target_loss=3.1", arms=arms)
    fast, slow = found["arms"]
    assert (found["bounded"], found["first"], found["rivals"], found["winner"]) == (["slow"], "fast", ["slow"], None)
    assert fast["steps"] < 0.7 * slow["steps"] and slow["steps"] == pytest.approx(30)


def test_arms_that_train_alike_but_for_their_seeds_cannot_be_told(searched: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    close = ["search.arms.one=optimizer.lr=0.002", "search.arms.other=optimizer.lr=0.0020001"]
    code, found, _ = searched("search.seeds=3", arms=close)
    assert (code, found["winner"], found["recipe"], len(found["rivals"])) == (1, None, None, 1)
    show(GOAL.shown(found))
    assert "cannot tell" in capsys.readouterr().out


def test_a_killed_search_goes_on_and_starts_no_run_twice(searched: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        searched(dies_after=2)
    begun = len(list((tmp_path / "place").glob("*.json")))
    _, found, second = searched()
    assert found["winner"] == "fast" and begun > 0 and begun + len(second.submitted) == found["trials"]
    assert searched()[2].submitted == []


def test_a_budget_of_trials_ends_it(searched: Callable[..., Any]) -> None:
    code, found, place = searched("search.max_trials=3")
    assert (code, len(place.submitted), found["reason"], found["winner"]) == (1, 3, "search.max_trials=3 is reached", None)


def test_a_run_whose_numbers_break_never_reaches_the_loss(searched: Callable[..., Any]) -> None:
    _, found, _ = searched(truth=lambda config: Reason.NUMERICS if config.optimizer.lr == 0.002 else 0.5)
    assert found["first"] == "slow" and {one["arm"]: one["told"] for one in found["arms"]}["fast"] == "not reached"
    assert {row["reason"] for row in found["failed"]} == {"numerics"}


def test_time_is_counted_on_another_cluster_in_its_fastest_layout(searched: Callable[..., Any]) -> None:
    there = "search.target_cluster=hardware=h100 cluster.gpus_per_node=2 cluster.price_per_gpu_hour=4 run.precision=bf16"
    arms = [*ARMS, "search.arms.large=optimizer.lr=0.001 run.global_batch=16 run.steps=50"]
    _, found, _ = searched(there, arms=arms)
    assert found["step_times"] == "predicted" and "h100" in found["cluster"].lower()
    by_name = {one["arm"]: one for one in found["arms"]}
    fast, slow, large = (by_name[name] for name in ("fast", "slow", "large"))
    assert fast["step_time_s"] == slow["step_time_s"] != 0.5, "the same layout and batch take the same time"
    assert fast["price"] == pytest.approx(4 * 2 * fast["time_s"] / 3600)
    low, high = slow["over_first_interval"]
    assert high / low < 1.2, "the error that both share is in neither"
    assert large["tokens"] == pytest.approx(2 * 128 * large["steps"])
    assert large["time_interval_s"][1] / large["time_interval_s"][0] > 1.2
    read = [record.config["run"] for record in Store("runs").sweep(found["search"]).records]
    assert {run["eval_batches"] * run["global_batch"] for run in read} == {16}, "every arm is validated on the same text"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["search.target_loss=null"], "goal=loss needs a loss to reach; set search.target_loss"),
        (["search.branches=7"], "search.arms.fast: search.branches=7 of run.steps=60 with search.decay=0.2 begin after 6.857 steps"),
        (
            ["search.branches=4", "optimizer.stable_steps=9"],
            "search.arms.fast: optimizer has a schedule of its own, and search.branches makes it",
        ),
        (["search.branches=4", "optimizer.warmup_steps=13"], "optimizer.warmup_steps=13 are more than the 12 after which the shortest"),
        (["run.eval_every=0"], "goal=loss needs validations; set run.eval_every"),
        (["~search.arms.slow"], "deletes a setting"),
        (["search.arms.third=model.layers=3"], "search.arms.third changes model.layers; it may change keys of optimizer, layout"),
        (["search.arms.third=optimizer.lrr=3"], "search.arms.third: unknown key 'optimizer.lrr'; did you mean 'optimizer.lr'?"),
        (["search.arms.third=optimizer.lr=0.001"], "search.arms.slow and search.arms.third train alike"),
        (["search.arms.third=run.global_batch=6"], "run.global_batch=6 does not divide the 16 sequences"),
        (["search.arms.third='open"], "search.arms.third"),
        (["search.target_cluster=model=gpt_mini"], "search.target_cluster changes model; it may change keys of cluster, hardware"),
        (["run.eval_batches=100000"], "more than the"),
        (["search.doubt=0.1"], "search.doubt=0.1 has no meaning for goal=loss; leave it out"),
        (["run.checkpoint.dir=x"], "run.checkpoint.dir=x has no meaning for goal=loss"),
        (["layout.tensor=1,2"], "layout.tensor has several values"),
        (["goal=speed"], "search.target_loss=3 has no meaning for task=train; add goal=loss"),
        (["task=inference"], "goal=loss has no meaning for task=inference"),
        (["trainer=megatron_core"], "trainer"),
    ],
)
def test_wrong_input_is_one_plain_error_and_starts_nothing(searched: Callable[..., Any], words: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        searched(*words)
    assert said in str(error.value) and not Path("runs").exists()


def test_planning_a_loss_is_refused() -> None:
    with pytest.raises(ConfigError, match="goal=loss is for trireme search"):
        GOAL.plan(compose(["goal=loss"]), {})


def test_two_arms_are_trained_and_compared(corpus: Path, tmp_path: Path) -> None:
    """Real trainings: of two learning rates one moves the loss by the first validations, the other not at all."""
    (tmp_path / "corpus").symlink_to(corpus / "corpus")
    arms = ["search.arms.learns=optimizer.lr=0.01", "search.arms.still=optimizer.lr=0.000001"]
    few = ["search.target_loss=5.7", "search.seeds=2", "run.steps=16", "search.recipe=learns"]
    done = warm.run("-m", "launcher", "search", "--json", *TINY, *WORDS, *arms, *few, cwd=tmp_path)
    found = json.loads(done.stdout)
    assert found["first"] == "learns" and found["trials"] == 4, done.stderr
    learns, still = found["arms"]
    assert (learns["reached"], still["reached"], still["told"]) == (2, 0, "not reached")
    assert 0 < learns["steps"] < 16 and learns["time_s"] == pytest.approx(learns["steps"] * learns["step_time_s"])
    assert [step for step, _ in learns["curves"]["1234"]] == list(range(2, 17, 2))
