"""What the loop makes of attempts that failed: whose results count, which nodes are left out, who hears of it."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path

import pytest

from launcher.config.schema import LocalCluster
from launcher.trials.job import JobState
from launcher.trials.store import Record
from tests.sweep.support import Place, PlayedQueue, finish, starts, sweep, trial, until
from trainer.shared.records.outcome import Reason, Status
from trainer.shared.run.files import read_json, write_json

pytestmark = pytest.mark.slow


class Silence(PlayedQueue):
    """A queue on a file system that shows files late."""

    visibility_s = 60.0


def test_a_job_without_a_result_is_judged_when_its_ranks_have_been_heard(place: Place) -> None:
    place.queue = Silence(place.queue.folder)
    thread, records = place.begin(1)
    (name,) = until(place.queue.queued)
    job = place.queue.queued()[name]
    place.queue.end(name, JobState(Status.FAILED, Reason.NODE, "played", nodes=("n1",)))
    until(lambda: place.store.load(Path(job["directory"]).name).end_clock)
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


def test_a_node_at_fault_is_left_out_of_the_next_attempt_which_says_so(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    thread, records = _second_attempt(place)
    assert _avoids(place, 1) == ["n2"]
    (path,) = place.store.trials.glob("*")
    assert until(lambda: place.store.load(path.name).detail).startswith("leaves out n2 (at fault in attempt 0, until ")
    place.end(thread)
    assert records[0].status is Status.DONE
    assert f"{path.name}  attempt 1 leaves out n2" in capsys.readouterr().err


def test_a_node_is_used_again_when_there_are_not_enough_others(place: Place) -> None:
    place.queue.spare = 0
    thread, records = _second_attempt(place)
    assert _avoids(place, 1) == []
    (path,) = place.store.trials.glob("*")
    assert place.store.load(path.name).detail == "uses n2 (at fault in attempt 0) again, without which there are not enough nodes"
    place.end(thread)
    assert records[0].status is Status.DONE


def test_a_job_that_waits_may_use_a_node_again_whose_exclusion_has_ended(place: Place) -> None:
    thread, records = _second_attempt(place, avoid_s=2.0)
    until(lambda: _avoids(place, 1) == [])
    place.end(thread)
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
