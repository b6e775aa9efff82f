"""The MLflow mirror: complete, repeatable without duplicates, and never in the way of a trial."""

from __future__ import annotations

import getpass
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from launcher.results.measurements import measure
from launcher.results.ranking import rank
from launcher.tracking import database, unmirrored
from launcher.tracking.mirror import OFFSET, PARENT, STATE, MlflowSweep, attempt
from launcher.trials.store import Store, owner_of
from tests.results.trial_files import STARTED, SweepOnDisk, demo_sweep, point, seeded, step_times, tracked_at, write_metrics
from tests.tracking.mirrored import children, history, runs
from trainer.shared.records.outcome import Reason, Status

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("tracking")]


def test_sweep_is_a_parent_run_and_each_trial_a_child_sorted_like_the_ranking(root: Path) -> None:
    sweep = demo_sweep(root)
    MlflowSweep(root, sweep.name).update()
    parents = [run for run in runs(root) if run.data.tags.get("kind") == "sweep"]
    assert [run.info.run_name for run in parents] == ["planted"]
    mirrored = children(root)
    assert {run.data.tags[PARENT] for run in mirrored.values()} == {parents[0].info.run_id}
    ranked = [m.trial for m in rank(measure(sweep.records))]
    waiting = {record.id for record in sweep.records if record.status is Status.PLANNED}
    assert set(mirrored) == set(ranked) - waiting
    assert list(mirrored)[:3] == ranked[:3], "sorted by the metric step_time_s, MLflow's order is the ranking"
    assert parents[0].data.tags["best_trial"] == ranked[0]


def test_runs_are_named_by_what_sets_their_trials_apart_also_when_trials_are_added(root: Path) -> None:
    sweep = SweepOnDisk(root)
    mirror = MlflowSweep(root, sweep.name)
    first = sweep.done(seeded(1), 0.2)
    mirror.update()
    assert children(root)[first.id].info.run_name == f"t2 p2 d1 mb1 1f1b {first.id[:6]}"
    second = sweep.done(seeded(2), 0.3)
    mirror.update()
    names = {trial: run.info.run_name for trial, run in children(root).items()}
    assert names == {first.id: f"run.seed=1 {first.id[:6]}", second.id: f"run.seed=2 {second.id[:6]}"}
    parent = next(run for run in runs(root) if run.data.tags.get("kind") == "sweep")
    assert "| run.seed=2 |" in parent.data.tags["mlflow.note.content"]


def test_run_of_the_sweep_says_who_ran_it_how_and_what_came_of_it(root: Path) -> None:
    sweep = demo_sweep(root)
    MlflowSweep(root, sweep.name).update()
    parent = next(run for run in runs(root) if run.data.tags.get("kind") == "sweep")
    assert parent.data.metrics["best_step_time_s"] == pytest.approx(0.2, rel=0.01)
    counts = {name.removeprefix("trials/"): value for name, value in parent.data.metrics.items() if name.startswith("trials/") and value}
    assert counts == {"all": 6, "done": 3, "failed": 1, "pruned": 1, "planned": 1}
    assert parent.data.tags["mlflow.user"] == getpass.getuser()
    assert parent.data.tags["mlflow.source.name"].startswith("trireme train -m layout.tensor=1,4,2,3 layout.pipeline=1,2,4")
    assert parent.data.tags["mlflow.source.git.commit"] == parent.data.tags["git_commit"] == "0123abcd"
    assert {run.data.tags["mlflow.user"] for run in children(root).values()} == {getpass.getuser()}


def test_figures_of_the_sweep_are_those_of_now(root: Path) -> None:
    sweep, mirror = SweepOnDisk(root), MlflowSweep(root, "planted")
    record = sweep.add(point(1, 1), Status.RUNNING)
    mirror.update()
    sweep.done(point(1, 1), 0.3)
    sweep.done(point(2, 1), 0.2)
    MlflowSweep(root, "planted").update()
    mirror.update()
    parent = next(run for run in runs(root) if run.data.tags.get("kind") == "sweep")
    assert (parent.data.metrics["trials/running"], parent.data.metrics["trials/done"]) == (0, 2)
    assert parent.data.metrics["best_step_time_s"] == pytest.approx(0.2, rel=0.01)
    assert record.id in children(root)


def test_duration_of_a_run_is_that_of_its_trial_without_the_queue(root: Path) -> None:
    sweep, mirror = SweepOnDisk(root), MlflowSweep(root, "planted")
    record = sweep.add(point(1, 1), Status.SUBMITTED)
    record.created = record.submitted = STARTED - 1000
    record.started = None
    sweep.store.save(record)
    mirror.update()
    assert children(root) == {}, "a trial that waits has no run: MLflow would count from its beginning"
    record.status, record.started = Status.RUNNING, STARTED
    sweep.store.save(record)
    mirror.update()
    assert children(root)[record.id].info.status == "RUNNING"
    record.status, record.ended = Status.DONE, STARTED + 6
    sweep.store.save(record)
    mirror.update()
    info = children(root)[record.id].info
    assert (info.status, info.end_time - info.start_time) == ("FINISHED", 6000)


def test_trial_has_its_params_tags_metrics_and_files(root: Path) -> None:
    sweep = SweepOnDisk(root)
    record = sweep.done(point(2, 2), 0.2)
    MlflowSweep(root, sweep.name).update()
    run = children(root)[record.id]
    assert run.info.status == "FINISHED"
    assert (
        run.data.params["layout.tensor"] == "2"
        and run.data.params["model.tied"] == "true"
        and run.data.params["cluster.backend"] == "local"
    )
    assert not [name for name in run.data.params if name.startswith(("tracking", "cluster.env"))]
    wanted = {
        "trial": record.id,
        "sweep": "planted",
        "layout": "t2 p2 d1 mb1 1f1b",
        "status": "done",
        "reason": "",
        "git_commit": "0123abcd",
    }
    assert wanted.items() <= run.data.tags.items()
    assert run.data.metrics["step_time_s"] == pytest.approx(0.2, rel=0.01)
    assert run.data.metrics["memory/weights"] == 2e6
    for name in ("loss", "grad_norm", "step_time_s", "tokens_per_s"):
        assert history(root, run.info.run_id, f"train/{name}") == list(range(1, 9))
    client = database.open_client(database.database_uri(root))
    assert {f.path for f in client.list_artifacts(run.info.run_id)} == {"config.yaml", "trial.json", "result.json", "timeline.json", "logs"}
    assert len(client.list_artifacts(run.info.run_id, "logs")) == 4


def test_failed_and_pruned_trials_say_why(root: Path) -> None:
    sweep = demo_sweep(root)
    MlflowSweep(root, sweep.name).update()
    said = {(run.data.tags["status"], run.info.status): run.data.tags["reason"] for run in children(root).values()}
    assert said[("failed", "FAILED")] == "out of memory"
    assert said[("pruned", "KILLED")] == "configuration"
    assert all("step_time_s" not in run.data.metrics for run in children(root).values() if run.data.tags["status"] != "done")


def test_mirroring_again_changes_nothing(root: Path) -> None:
    demo_sweep(root)
    mirror = MlflowSweep(root, "planted")
    mirror.update()
    before = {trial: (run.info.run_id, history(root, run.info.run_id), run.data.tags) for trial, run in children(root).items()}
    mirror.update()
    MlflowSweep(root, "planted").update()
    assert {trial: (run.info.run_id, history(root, run.info.run_id), run.data.tags) for trial, run in children(root).items()} == before
    assert len(runs(root)) == len(before) + 1


def test_mirror_killed_before_it_noted_its_progress_duplicates_nothing(root: Path) -> None:
    record = SweepOnDisk(root).done(point(2, 2), 0.2)
    MlflowSweep(root, "planted").update()
    run = children(root)[record.id]
    client = database.open_client(database.database_uri(root))
    for tag in (OFFSET, STATE):
        client.delete_tag(run.info.run_id, tag)
    MlflowSweep(root, "planted").update()
    assert list(children(root)) == [record.id]
    for name in ("train/loss", "train/step_time_s"):
        assert history(root, run.info.run_id, name) == list(range(1, 9))
    assert history(root, run.info.run_id, "step_time_s") == [0]


def test_running_trial_is_followed_line_by_line(root: Path) -> None:
    sweep = SweepOnDisk(root)
    record = sweep.add(point(1, 1), Status.RUNNING)
    mirror = MlflowSweep(root, "planted")
    mirror.update()
    run_id = children(root)[record.id].info.run_id
    write_metrics(record, [1.0, 1.0])
    with (record.directory / "metrics.jsonl").open("a") as file:
        file.write('{"attempt": 0, "step": 3, "loss"')
    mirror.update()
    assert history(root, run_id) == [1, 2]
    with (record.directory / "metrics.jsonl").open("a") as file:
        file.write(': NaN, "time": 1790000009.0}\n')
    mirror.update()
    assert history(root, run_id) == [1, 2, 3]
    record.status, record.reason = Status.FAILED, Reason.NUMERICS
    sweep.store.save(record)
    mirror.update()
    run = children(root)[record.id]
    assert (run.info.status, run.data.tags["reason"]) == ("FAILED", "numerics")


def test_trial_shared_by_two_sweeps_is_in_both(root: Path) -> None:
    first, second = SweepOnDisk(root, "first"), SweepOnDisk(root, "second")
    record = first.done(point(1, 1), 0.2)
    second.done(point(1, 1), 0.2)
    for name in ("first", "second"):
        MlflowSweep(root, name).update()
    found = [run for run in runs(root) if run.data.tags.get("trial") == record.id]
    assert sorted(run.data.tags["sweep"] for run in found) == ["first", "second"]


@pytest.mark.parametrize("kind", ["refuses", "never answers"])
def test_dead_server_costs_one_bounded_attempt_and_no_record(root: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with socket.socket() as black_hole:
        black_hole.bind(("127.0.0.1", 0))
        if kind == "never answers":
            black_hole.listen(8)
        uri = f"http://127.0.0.1:{black_hole.getsockname()[1]}"
        sweep = SweepOnDisk(root)
        record = sweep.done(tracked_at(point(1, 1), uri), 0.2)
        assert "127.0.0.1" in attempt(MlflowSweep(root, "planted").update), "what went wrong is said in one line"
    assert Store(root).trial(record.id).status is Status.DONE
    assert rank(measure(Store(root).sweep().records))[0].step_time_s == pytest.approx(0.2, rel=0.01)


def test_two_launchers_with_the_same_sweep_share_a_server_but_no_run(tmp_path: Path, server: str) -> None:
    for who, step_time in (("ada", 0.2), ("bob", 0.4)):
        sweep = SweepOnDisk(tmp_path / who, "shared")
        sweep.done(tracked_at(point(1, 1), server), step_time)
    MlflowSweep(tmp_path / "ada", "shared").update()
    unmirrored.add(tmp_path / "bob", "shared")
    copier = [sys.executable, "-m", "launcher.tracking.copier", "--dir", str(tmp_path / "bob")]  # imports less of MLflow than we have
    subprocess.run(copier, stdin=subprocess.DEVNULL, check=True)
    assert not (tmp_path / "bob" / "mlflow.db").exists()
    client = database.open_client(server)
    found = client.search_runs([database.experiment_id(client, "trireme", None)], "tags.sweep = 'shared'")
    assert len({run.data.tags["owner"] for run in found}) == 2 and len(found) == 4
    times = sorted(run.data.metrics["step_time_s"] for run in found if "trial" in run.data.tags)
    assert times == pytest.approx([0.2, 0.4], rel=0.01)


def test_launchers_that_draw_their_mark_at_once_agree_on_it(tmp_path: Path) -> None:
    code = f"from pathlib import Path; from launcher.trials.store import owner_of; print(owner_of(Path({str(tmp_path)!r})))"
    drawing = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(6)]
    marks = {process.communicate(timeout=600)[0].strip() for process in drawing}
    assert len(marks) == 1 and len(marks.pop()) == 12
    assert [path.name for path in tmp_path.iterdir()] == ["mlflow.owner"]


def test_running_trial_on_a_server_is_left_to_rank_0(root: Path, server: str) -> None:
    sweep = SweepOnDisk(root, "left-to-rank-0")
    running = sweep.add(tracked_at(point(1, 1), server), Status.RUNNING)
    write_metrics(running, step_times(0.2, 0.02))
    mirror = MlflowSweep(root, sweep.name)
    mirror.update()
    client = database.open_client(server)
    assert [run.info.run_name for run in client.search_runs([mirror.experiment], f"tags.sweep = '{sweep.name}'")] == [sweep.name]
    assert not client.search_runs([mirror.experiment], f"tags.trial = '{running.id}' and tags.owner = '{owner_of(root)}'")


@pytest.mark.parametrize("copied", [False, True])
def test_files_are_where_the_folder_is_after_it_was_moved_or_copied(root: Path, tmp_path: Path, copied: bool) -> None:
    old, new = tmp_path / "old?", tmp_path / "new 100%"
    old.mkdir()
    shutil.copy(root / "mlflow.db", old)
    first = SweepOnDisk(old).done(seeded(1), 0.2)
    MlflowSweep(old, "planted").update()
    shutil.copytree(old, new) if copied else old.rename(new)
    before = sorted(old.rglob("*"))
    sweep = SweepOnDisk(new)
    MlflowSweep(new, sweep.name).update()
    second = sweep.done(seeded(2), 0.3)
    MlflowSweep(new, sweep.name).update()
    assert sorted(old.rglob("*")) == before, "something was written to the old place"
    found = children(new)
    for record in (first, second):
        files = Path(unquote(urlsplit(found[record.id].info.artifact_uri).path))
        assert files.is_relative_to(new)
        assert {"config.yaml", "result.json"} <= {file.name for file in files.iterdir()}
