"""The loop against a queue whose jobs outlive the launcher: every trial once, whatever is tried again, stopped or left behind."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from launcher.backends.pool import Backends
from launcher.config.kubernetes import KubernetesCluster
from launcher.config.schema import ClusterConfig, LocalCluster, SweepConfig
from launcher.sweep.reconcile import catch_up, stop
from launcher.sweep.run import run_sweep
from launcher.trials.job import JobState
from launcher.trials.store import Record, Store
from tests.sweep.support import PlayedQueue, finish, points, starts, sweep, trial, until
from trainer.spec import ConfigError, Reason, Status
from trainer.spec.files import read_json, write_json


class Place:
    """A queue, and a thread that plays the cluster's part until the test ends."""

    def __init__(self, folder: Path):
        self.runs, self.queue = folder / "runs", PlayedQueue(folder / "queue")
        self.store = Store(self.runs)
        self.playing = True

    def backend(self, _cluster: ClusterConfig) -> PlayedQueue:
        return self.queue

    def run(self, *seeds: int, **settings: object) -> list[Record]:
        return sweep(self.runs, *(trial(seed=seed) for seed in seeds), backends=self.backend, **settings)

    def begin(self, *seeds: int, **settings: object) -> tuple[threading.Thread, list[Record]]:
        """``run`` in a thread; the list is filled when it ends."""
        records: list[Record] = []
        thread = threading.Thread(target=lambda: records.extend(self.run(*seeds, **settings)))
        thread.start()
        return thread, records

    def serve(self) -> None:
        while self.playing:
            self.queue.play()
            time.sleep(0.01)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """A queue in which nothing runs unless the test plays it."""
    place = Place(tmp_path)
    yield place
    place.playing = False


@pytest.fixture
def cluster(place: Place) -> Place:
    """A queue in which everything runs."""
    threading.Thread(target=place.serve, daemon=True).start()
    return place


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
    time.sleep(0.3)
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
    _end(place, thread)
    assert [record.status for record in records] == [Status.DONE] * 2
    assert capsys.readouterr().err.count("waits: QOSMaxJobsPerUserLimit") == 1


class Silence(PlayedQueue):
    """A queue on a file system that shows files late."""

    visibility_s = 60.0


def test_a_job_without_a_result_is_judged_when_its_ranks_have_been_heard(place: Place) -> None:
    place.queue = Silence(place.queue.folder)
    thread, records = place.begin(1)
    (name,) = until(place.queue.queued)
    job = place.queue.queued()[name]
    place.queue.end(name, JobState(Status.FAILED, Reason.NODE, "played", nodes=("n1",)))
    until(lambda: place.store.load(Path(job["directory"]).name).end_seen)
    (Path(job["directory"]) / "metrics.jsonl").write_text('{"step": 9, "attempt": 0}\n')
    finish(Path(job["directory"]), 0)
    thread.join()
    assert (records[0].status, starts(records[0])) == (Status.DONE, [0])


def test_what_ranks_wrote_unseen_is_not_overwritten_and_counts(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine remembers that there is no result, until it asks again because it may not write one."""
    seen, asked = Record.read_result, threading.Event()
    monkeypatch.setattr(Record, "read_result", lambda record: seen(record) if asked.is_set() else None)
    monkeypatch.setattr("launcher.sweep.settlement.look_again", lambda folder: asked.set())
    thread, records = place.begin(1)
    (name,) = until(place.queue.queued)
    finish(Path(place.queue.queued()[name]["directory"]), 0)
    place.queue.end(name, JobState(Status.FAILED, Reason.ERROR, "played"))
    thread.join()
    assert records[0].status is Status.DONE
    assert read_json(records[0].directory / "result.json") == {"status": "done", "attempt": 0, "step_time_s": 0.01}


BAD_NODE = JobState(Status.FAILED, Reason.NODE, "played", nodes=("n1", "n2"), bad_nodes=("n2",))


def _avoids(place: Place, attempt: int) -> list[str]:
    """The nodes that the job of ``attempt`` avoids, once it is in the queue."""
    return until(lambda: [job for job in place.queue.queued().values() if job["attempt"] == attempt])[0]["avoid"]


def _second_attempt(place: Place, **cluster: object) -> tuple[threading.Thread, list[Record]]:
    """A sweep of one trial whose first attempt has failed on a bad node."""
    records: list[Record] = []
    config = dataclasses.replace(trial(), cluster=LocalCluster(gpus_per_node=4, **cluster))  # type: ignore[arg-type]
    thread = threading.Thread(target=lambda: records.extend(sweep(place.runs, config, backends=place.backend)))
    thread.start()
    (name,) = until(place.queue.queued)
    place.queue.end(name, BAD_NODE)
    return thread, records


def _end(place: Place, thread: threading.Thread) -> None:
    place.queue.play()
    thread.join()


def test_a_node_at_fault_is_left_out_of_the_next_attempt_which_says_so(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    thread, records = _second_attempt(place)
    assert _avoids(place, 1) == ["n2"]
    (path,) = place.store.trials.glob("*")
    assert until(lambda: place.store.load(path.name).detail).startswith("leaves out n2 (at fault in attempt 0, until ")
    _end(place, thread)
    assert records[0].status is Status.DONE
    assert f"{path.name}  attempt 1 leaves out n2" in capsys.readouterr().err


def test_a_node_is_used_again_when_there_are_not_enough_others(place: Place) -> None:
    place.queue.spare = 0
    thread, records = _second_attempt(place)
    assert _avoids(place, 1) == []
    (path,) = place.store.trials.glob("*")
    assert place.store.load(path.name).detail == "uses n2 (at fault in attempt 0) again, without which there are not enough nodes"
    _end(place, thread)
    assert records[0].status is Status.DONE


def test_a_job_that_waits_may_use_a_node_again_whose_exclusion_has_ended(place: Place) -> None:
    thread, records = _second_attempt(place, avoid_s=2.0)
    until(lambda: _avoids(place, 1) == [])
    _end(place, thread)
    assert records[0].status is Status.DONE


def test_a_command_repeated_after_its_last_attempt_failed_on_a_bad_node_leaves_that_out(place: Place) -> None:
    thread, records = place.begin(1, retries=0)
    (name,) = until(place.queue.queued)
    place.queue.end(name, BAD_NODE)
    thread.join()
    assert records[0].reason is Reason.NODE
    place.run(1, follow=False)
    assert _avoids(place, 1) == ["n2"]


def test_the_result_of_an_older_attempt_is_not_taken_for_the_newer_ones(place: Place) -> None:
    """A rank of a lost attempt that lives on writes its result while the next attempt runs."""
    thread, records = place.begin(1, retries=1)
    (first,) = until(place.queue.queued)
    directory = Path(place.queue.queued()[first]["directory"])
    place.queue.end(first, JobState(Status.FAILED, Reason.NODE))
    (second,) = until(place.queue.queued)
    write_json(directory / "result.json", {"status": "done", "attempt": 0, "step_time_s": 123.0})
    place.queue.end(second, JobState(Status.FAILED, Reason.OUT_OF_MEMORY, "truly"))
    thread.join()
    assert (records[0].status, records[0].reason) == (Status.FAILED, Reason.OUT_OF_MEMORY)
    assert (records[0].read_result() or {})["attempt"] == 1


def test_a_job_started_again_by_its_place_is_followed_under_its_new_attempt(place: Place) -> None:
    thread, records = place.begin(1)
    (name,) = until(place.queue.queued)
    finish(Path(place.queue.queued()[name]["directory"]), attempt=2)
    place.queue.end(name, JobState(Status.DONE, attempt=2))
    thread.join()
    assert (records[0].status, records[0].attempt) == (Status.DONE, 2)


def test_one_failing_trial_does_not_hide_the_others(place: Place) -> None:
    thread, records = place.begin(1, 2, 3, max_parallel=0)
    names = until(lambda: list(place.queue.queued()) if len(place.queue.queued()) == 3 else [])
    place.queue.end(names[1], JobState(Status.FAILED, Reason.OUT_OF_MEMORY, "too large"))
    place.queue.play()
    thread.join()
    assert sorted(r.status for r in records) == [Status.DONE, Status.DONE, Status.FAILED]
    assert [(r.reason, r.detail) for r in records if r.reason] == [(Reason.OUT_OF_MEMORY, "too large")]


def test_a_place_that_refuses_jobs_is_the_reason_and_what_it_took_goes_on(place: Place) -> None:
    (place.queue.folder / "full").touch()
    (record,) = place.run(1)
    assert (record.status, record.reason, record.detail) == (Status.FAILED, Reason.CANNOT_START, "the queue takes no more jobs")


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
    from launcher.config.schema import SweepConfig
    from launcher.sweep.run import run_sweep

    witness = Witness()
    (record,) = run_sweep("demo", points(trial()), SweepConfig(dir=str(cluster.runs)), Backends(cluster.backend), [witness])
    assert witness.seen[0] == (record.id, Status.SUBMITTED, 0) and witness.seen[-1] == (record.id, Status.DONE, 0)
    assert witness.closed == 1


def chain(place: Place, chains: bool) -> tuple[threading.Thread, list[Record], list[str]]:
    """Two trials, the second after the first: the launcher's thread, what it will return, and the names of their first jobs."""
    place.queue.chains = chains
    first, second = points(trial(seed=1), trial(seed=2))
    line, records = [first, dataclasses.replace(second, needs=(first.trial,))], list[Record]()

    def launcher() -> None:
        with Backends(place.backend) as backends:
            records.extend(run_sweep("demo", line, SweepConfig(dir=str(place.runs)), backends))

    thread = threading.Thread(target=launcher)
    thread.start()
    return thread, records, [f"trireme-{point.trial}-0" for point in line]


def test_a_trial_waits_for_what_it_needs_where_no_queue_does(place: Place) -> None:
    thread, records, names = chain(place, chains=False)
    until(lambda: list(place.queue.queued()) == names[:1])
    time.sleep(0.3)
    assert list(place.queue.queued()) == names[:1]
    place.queue.play()
    until(lambda: list(place.queue.queued()) == names[1:])
    place.queue.play()
    thread.join()
    assert [(r.status, starts(r)) for r in records] == [(Status.DONE, [0]), (Status.DONE, [0])]


def test_what_waits_in_a_queue_for_a_trial_that_is_tried_again_is_submitted_again(place: Place) -> None:
    thread, records, names = chain(place, chains=True)
    until(lambda: set(place.queue.queued()) == set(names))
    place.queue.end(names[1], JobState(Status.FAILED, Reason.UPSTREAM))
    place.queue.end(names[0], JobState(Status.FAILED, Reason.NODE, "n1 is gone"))
    until(lambda: len(place.queue.queued()) == 2)
    place.queue.play()
    thread.join()
    assert [(r.status, r.attempt, starts(r)) for r in records] == [(Status.DONE, 1, [1]), (Status.DONE, 1, [1])]


def test_what_needs_a_trial_that_failed_is_never_started(place: Place) -> None:
    thread, records, names = chain(place, chains=True)
    until(lambda: set(place.queue.queued()) == set(names))
    place.queue.end(names[0], JobState(Status.FAILED, Reason.ERROR, "it crashed"))
    thread.join()
    assert [(r.status, r.reason, starts(r)) for r in records] == [
        (Status.FAILED, Reason.ERROR, []),
        (Status.FAILED, Reason.UPSTREAM, []),
    ]
