"""The loop against a queue whose jobs outlive the launcher: every trial once, whatever is stopped or left behind."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from launcher.backends.kubernetes.cluster import KubernetesCluster
from launcher.backends.pool import Backends
from launcher.config.schema import ClusterConfig, LocalCluster, SweepConfig
from launcher.sweep.reconcile import catch_up, stop
from launcher.sweep.run import run_sweep
from launcher.trials.job import JobState
from launcher.trials.store import Record, Store
from tests.sweep.support import Place, PlayedQueue, finish, points, starts, sweep, trial, until
from trainer.shared.records.outcome import Reason, Status
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.files import write_json

pytestmark = pytest.mark.slow


def test_every_trial_runs_once_and_a_repetition_runs_nothing(cluster: Place) -> None:
    records = cluster.run(1, 2, 3)
    assert [r.status for r in records] == [Status.DONE] * 3
    again = cluster.run(1, 2, 3)
    assert [(r.id, r.attempt, starts(r)) for r in again] == [(r.id, 0, [0]) for r in records]


def test_a_finished_trial_is_not_run_again_by_another_sweep(cluster: Place) -> None:
    cluster.run(1, 2, name="one")
    records = cluster.run(2, 3, name="two")
    assert [starts(r) for r in records] == [[0], [0]]
    assert [r.id for r in cluster.store.sweep("one").records][1] == records[0].id


def test_points_that_are_the_same_trial_run_once_and_both_get_its_record(cluster: Place) -> None:
    first, second = cluster.run(1, 1)
    assert first is second and starts(first) == [0]


def test_rerun_measures_again_as_a_newer_attempt(cluster: Place) -> None:
    cluster.run(1)
    (record,) = cluster.run(1, rerun=True)
    assert (record.status, record.attempt, starts(record)) == (Status.DONE, 1, [0, 1])


def test_no_more_than_max_parallel_trials_are_submitted_at_once(place: Place) -> None:
    thread, _ = place.begin(1, 2, 3, max_parallel=2)
    until(lambda: len(place.queue.queued()) == 2)
    place.look()
    assert len(place.queue.queued()) == 2
    place.queue.play()
    until(lambda: len(place.queue.queued()) == 1)
    place.queue.play()
    thread.join()


def test_a_backend_that_throttles_itself_gets_all_trials_in_one_call(cluster: Place) -> None:
    cluster.queue.throttles = True
    cluster.run(1, 2, 3, 4, 5, max_parallel=1)
    assert [call for call in cluster.queue.calls if "submit" in call] == ["submit 5"]


def test_many_jobs_are_asked_about_in_one_question(place: Place) -> None:
    thread, _ = place.begin(1, 2, 3, max_parallel=0)
    until(lambda: "poll 3" in place.queue.calls)
    assert not {"poll 1", "poll 2"} & set(place.queue.calls)
    place.queue.play()
    thread.join()


@pytest.mark.parametrize(("reason", "attempts"), [(Reason.NODE, 3), (Reason.PREEMPTED, 3), (Reason.COMMUNICATION, 3), (Reason.OUT_OF_MEMORY, 1),
                                                  (Reason.CONFIGURATION, 1), (Reason.NUMERICS, 1), (Reason.ERROR, 1), (Reason.TIME_LIMIT, 1)])  # fmt: skip
def test_only_faults_of_the_place_are_tried_again_and_only_so_often(place: Place, reason: Reason, attempts: int) -> None:
    thread, records = place.begin(1, retries=2)
    ended = 0
    while thread.is_alive():
        for name in place.queue.queued():
            place.queue.end(name, JobState(Status.FAILED, reason, "played"))
            ended += 1
        time.sleep(0.01)
    (record,) = records
    assert ended == attempts and record.attempt == attempts - 1
    assert (record.status, record.reason, record.detail) == (Status.FAILED, reason, "played")
    assert [entry["attempt"] for entry in record.history] == list(range(attempts))


@pytest.mark.parametrize("clearing_up", [True, False])
def test_a_job_that_goes_on_after_its_result_is_ended_unless_its_place_clears_up(place: Place, clearing_up: bool) -> None:
    records: list[Record] = []
    config = dataclasses.replace(trial(), cluster=LocalCluster(gpus_per_node=4, linger_s=0.1))
    thread = threading.Thread(target=lambda: records.extend(sweep(place.runs, config, backends=place.backend)))
    thread.start()
    (name,) = until(place.queue.queued)
    finish(Path(place.queue.queued()[name]["directory"]), 0)
    place.queue.end(name, JobState(Status.RUNNING, clearing_up=clearing_up))
    thread.join()
    assert records[0].status is Status.DONE
    assert ("cancel 1" in place.queue.calls) is not clearing_up


def test_trials_that_are_stopped_together_are_cancelled_together(place: Place) -> None:
    place.run(1, 2, 3, follow=False)
    records = [place.store.load(path.name) for path in place.store.trials.glob("*")]
    with Backends(place.backend) as backends:
        assert stop(place.store, records, backends) == []
    assert [call for call in place.queue.calls if call.startswith("cancel")] == ["cancel 3"]
    assert {place.store.load(record.id).status for record in records} == {Status.STOPPED}


def test_a_reason_to_wait_is_said_once_where_there_is_no_terminal(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    thread, records = place.begin(1, 2)
    until(lambda: len(place.queue.queued()) == 2)
    for name in list(place.queue.queued()):
        place.queue.end(name, JobState(Status.SUBMITTED, None, "waits: QOSMaxJobsPerUserLimit"))
    until(lambda: {place.store.load(path.name).detail for path in place.store.trials.glob("*")} == {"waits: QOSMaxJobsPerUserLimit"})
    for path in place.queue.folder.glob("*.state"):
        path.unlink()
    place.end(thread)
    assert [record.status for record in records] == [Status.DONE] * 2
    assert capsys.readouterr().err.count("waits: QOSMaxJobsPerUserLimit") == 1


def test_a_queue_that_does_not_answer_is_waited_for_and_its_trials_lose_nothing(place: Place) -> None:
    thread, records = place.begin(1, 2, max_parallel=0)
    until(lambda: "poll 2" in place.queue.calls)
    (place.queue.folder / "down").touch()
    waiting = place.store.sweep("demo").records[0]
    until(lambda: place.store.load(waiting.id).detail == "the queue does not answer")
    place.store.ask_to_stop(waiting)
    place.queue.end(f"trireme-{waiting.id}-0", JobState(Status.STOPPED, Reason.CANCELLED))
    place.queue.play()
    assert thread.is_alive()
    (place.queue.folder / "down").unlink()
    thread.join()
    assert [(r.status, starts(r)) for r in records] == [(Status.STOPPED, []), (Status.DONE, [0])]


def test_an_unusable_cluster_is_found_before_anything_is_submitted(place: Place) -> None:
    def broken() -> None:
        raise ConfigError("cluster.queue=x does not exist")

    place.queue.check = broken  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match=r"cluster\.queue=x"):
        place.run(1)
    assert place.queue.calls == []


def test_a_job_that_does_not_start_in_time_is_given_up_with_the_places_words(place: Place) -> None:
    config = dataclasses.replace(trial(), cluster=LocalCluster(gpus_per_node=4, start_timeout=0.1))
    (record,) = sweep(place.runs, config, backends=place.backend)
    assert (record.status, record.reason) == (Status.FAILED, Reason.CANNOT_START)
    assert record.detail == "did not start within cluster.start_timeout=0.1 s"
    assert place.queue.queued() == {}


def test_submit_and_return_leaves_trials_that_the_same_command_follows(place: Place) -> None:
    (record,) = place.run(1, follow=False)
    assert record.status is Status.SUBMITTED
    place.queue.play()
    (record,) = place.run(1)
    assert (record.status, starts(record)) == (Status.DONE, [0])


def test_a_remark_is_said_once_however_many_sweeps_one_command_runs(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(PlayedQueue, "remarks", lambda self, jobs: [f"{len(jobs)} trials may be disturbed"])
    with Backends(place.backend) as backends:
        for seeds in ((1,), (2,), (3, 4)):
            asked = points(*(trial(seed=seed) for seed in seeds))
            run_sweep("demo", asked, SweepConfig(dir=str(place.runs), follow=False), backends)
    said = [line for line in capsys.readouterr().err.splitlines() if "disturbed" in line]
    assert said == ["1 trials may be disturbed", "2 trials may be disturbed"]


def test_a_trial_left_in_a_queue_is_brought_up_to_date_when_somebody_asks(place: Place) -> None:
    (record,) = place.run(1, follow=False)
    catch_up(place.store, [record], Backends(place.backend))
    assert place.store.load(record.id).status is Status.SUBMITTED
    place.queue.play()
    catch_up(place.store, [record], Backends(place.backend))
    assert place.store.load(record.id).status is Status.DONE


def test_a_trial_left_in_a_queue_is_stopped_there(place: Place) -> None:
    records = place.run(1, 2, follow=False, max_parallel=1)
    assert stop(place.store, records, Backends(place.backend)) == []
    assert [place.store.load(r.id).status for r in records] == [Status.STOPPED] * 2
    assert place.queue.queued() == {} and place.store.stop_requests() == {}


def test_each_trial_is_asked_after_and_stopped_at_its_own_place(tmp_path: Path) -> None:
    queues = {str(nodes): PlayedQueue(tmp_path / f"queue{nodes}") for nodes in (1, 2)}

    def backend(cluster: ClusterConfig) -> PlayedQueue:
        return queues[cluster.env["PLACE"]]

    configs = [dataclasses.replace(trial(seed=int(name)), cluster=LocalCluster(gpus_per_node=4, env={"PLACE": name})) for name in queues]
    records = sweep(tmp_path / "runs", *configs, backends=backend, follow=False, max_parallel=0)
    assert [len(queue.queued()) for queue in queues.values()] == [1, 1]
    store = Store(tmp_path / "runs")
    with Backends(backend) as backends:
        catch_up(store, records, backends)
    assert [store.load(record.id).status for record in records] == [Status.SUBMITTED] * 2, "neither is unknown where it was asked for"
    queues["2"].play()
    with Backends(backend) as backends:
        assert stop(store, records, backends) == []
    assert [store.load(record.id).status for record in records] == [Status.STOPPED, Status.DONE]
    assert [queue.queued() for queue in queues.values()] == [{}, {}]


def test_a_trial_under_way_is_followed_where_it_is_when_the_command_names_another_place(tmp_path: Path) -> None:
    queues = {name: PlayedQueue(tmp_path / name) for name in ("one", "two")}

    def backend(cluster: ClusterConfig) -> PlayedQueue:
        return queues[str(getattr(cluster, "context", ""))]

    first, second = (trial(cluster=KubernetesCluster(backend="kubernetes", context=name)) for name in queues)
    (record,) = sweep(tmp_path / "runs", first, backends=backend, follow=False)
    (record,) = sweep(tmp_path / "runs", second, backends=backend, follow=False)
    assert record.status is Status.SUBMITTED and not queues["two"].queued()
    queues["one"].play()
    (record,) = sweep(tmp_path / "runs", second, backends=backend)
    assert (record.status, record.attempt) == (Status.DONE, 0)
    (record,) = sweep(tmp_path / "runs", second, backends=backend, follow=False, rerun=True)
    assert len(queues["two"].queued()) == 1, "what begins anew begins where it is asked for"


def test_a_command_that_is_refused_leaves_nothing_behind(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise ConfigError("there is no such place")

    monkeypatch.setattr(place.queue, "check", refuse)
    with pytest.raises(ConfigError, match="no such place"):
        place.run(1, 2)
    assert not place.runs.exists()


def test_a_stopped_trial_runs_again_when_the_command_is_repeated(place: Place) -> None:
    (record,) = place.run(1, follow=False)
    stop(place.store, [record], Backends(place.backend))
    (record,) = place.run(1, follow=False)
    place.queue.play()
    (record,) = place.run(1)
    assert (record.status, record.attempt, starts(record)) == (Status.DONE, 1, [1])


def test_a_wish_to_stop_is_obeyed_while_others_run_on(place: Place) -> None:
    thread, records = place.begin(1, 2, max_parallel=0)
    until(lambda: len(place.queue.queued()) == 2)
    beaten = place.store.sweep("demo").records[0]
    place.store.ask_to_stop(beaten, Reason.CANNOT_WIN, "twice as slow as the best")
    until(lambda: place.store.load(beaten.id).status.final)
    place.queue.play()
    thread.join()
    assert [(r.status, r.reason) for r in records] == [(Status.STOPPED, Reason.CANNOT_WIN), (Status.DONE, None)]
    assert records[0].detail == "twice as slow as the best"


@pytest.mark.parametrize(
    ("left", "expected"),
    [
        ("nothing", (Status.DONE, Reason.MEASURED, 0.3, None)),
        ("result", (Status.DONE, Reason.MEASURED, 0.25, 77)),
        ("error", (Status.DONE, Reason.MEASURED, 0.3, None)),
        ("out of memory", (Status.FAILED, Reason.OUT_OF_MEMORY, None, None)),
        ("no step", (Status.STOPPED, Reason.MEASURED, None, None)),
    ],
)
def test_what_was_enough_is_done_with_what_its_ranks_left(place: Place, left: str, expected: tuple[object, ...]) -> None:
    """Its result is rank 0's, or what its steps tell; without a step it is not measured, and a layout that failed meanwhile has failed."""
    thread, records = place.begin(1)
    until(lambda: place.queue.queued())
    (asked,) = place.store.sweep("demo").records
    if left != "no step":
        times = [9.0, 9.0, 0.2, 0.3, 0.4]  # warm-up first
        lines = [{"attempt": 0, "step": step, "loss": 5.0 - step, "step_time_s": seconds} for step, seconds in enumerate(times, 1)]
        (asked.directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if left == "result":
        own = {"status": "stopped", "reason": "preempted", "attempt": 0, "step_time_s": 0.25, "peak_memory_bytes": 77}
        write_json(asked.directory / "result.json", own)
    if left == "error":  # a trainer that cannot be asked to stop
        write_json(asked.directory / "result.json", {"status": "failed", "reason": "error", "attempt": 0, "message": "exit code 143"})
    if left == "out of memory":
        write_json(asked.directory / "failure-0.json", {"attempt": 0, "rank": 0, "reason": left})
    place.store.ask_to_stop(asked, Reason.MEASURED, "known well enough")
    thread.join()
    (record,) = records
    result = record.read_result() or {}
    assert (record.status, record.reason, result.get("step_time_s"), result.get("peak_memory_bytes")) == expected
    if record.status is Status.DONE:
        assert (result["status"], result["message"], record.detail) == ("done", "known well enough", "known well enough")
        assert left == "result" or result["losses"] == [4.0, 3.0, 2.0, 1.0, 0.0]
        assert not record.answered() and record.answered((Reason.MEASURED,))


def test_a_wish_that_outlived_its_launcher_does_not_bind_the_next(cluster: Place) -> None:
    (record,) = [cluster.store.plan(point, "demo") for point in points(trial(seed=1))]
    cluster.store.ask_to_stop(record)
    (record,) = cluster.run(1)
    assert record.status is Status.DONE


class Witness:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Status, int]] = []
        self.polled = 0
        self.closed = 0

    def begin(self) -> None:
        """Nothing to do."""

    def on_trial(self, record: Record) -> None:
        self.seen.append((record.id, record.status, record.attempt))

    def on_poll(self, records: Sequence[Record]) -> None:
        self.polled = max(self.polled, len(records))

    def close(self) -> None:
        self.closed += 1


def test_observers_hear_of_every_change_and_are_closed_once(cluster: Place) -> None:

    witness = Witness()
    (record,) = run_sweep("demo", points(trial()), SweepConfig(dir=str(cluster.runs)), Backends(cluster.backend), [witness])
    assert witness.seen[0] == (record.id, Status.SUBMITTED, 0) and witness.seen[-1] == (record.id, Status.DONE, 0)
    assert witness.closed == 1
