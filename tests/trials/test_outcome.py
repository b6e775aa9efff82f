"""One reason for each ended attempt: the one that cannot be a consequence of the others; and never an older attempt's."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from launcher.trials.job import JobState
from launcher.trials.outcome import ROOT_CAUSES, RankReports, decide, silent_nodes
from trainer.shared.records.outcome import Reason, Status

FAILED = JobState(Status.FAILED, None, "rank 0 exited with code 1")


def failure(rank: int, reason: Reason, attempt: int = 0) -> dict[str, Any]:
    return {"attempt": attempt, "rank": rank, "reason": reason.value, "message": f"words of {rank}"}


def result(status: str, reason: Reason | None = None, attempt: int = 0) -> dict[str, Any]:
    return {"status": status, "reason": reason and reason.value, "message": "words of the result", "attempt": attempt}


def test_every_reason_has_its_place_among_the_causes() -> None:
    assert sorted(ROOT_CAUSES) == sorted(Reason)


@pytest.mark.parametrize("order", list(itertools.permutations([Reason.COMMUNICATION, Reason.OUT_OF_MEMORY, Reason.COMMUNICATION])))
def test_a_rank_out_of_memory_beats_the_broken_connections_of_its_peers(order: tuple[Reason, ...]) -> None:
    failures = [failure(rank, reason) for rank, reason in enumerate(order)]
    verdict = decide(0, FAILED, result("failed", order[0]), failures)
    guilty = order.index(Reason.OUT_OF_MEMORY)
    assert (verdict.status, verdict.reason, verdict.detail) == (Status.FAILED, Reason.OUT_OF_MEMORY, f"rank {guilty}: words of {guilty}")


def test_ranks_that_only_lost_a_connection_do_not_hide_one_that_was_killed() -> None:
    state = JobState(Status.FAILED, Reason.HOST_MEMORY, "rank 3 was killed by the kernel")
    verdict = decide(0, state, result("failed", Reason.COMMUNICATION), [failure(0, Reason.COMMUNICATION), failure(1, Reason.COMMUNICATION)])
    assert (verdict.reason, verdict.detail) == (Reason.HOST_MEMORY, "rank 3 was killed by the kernel")


def test_preemption_explains_ranks_that_failed_as_they_were_killed() -> None:
    verdict = decide(
        0, JobState(Status.FAILED, Reason.PREEMPTED, "by job 7"), None, [failure(1, Reason.ERROR), failure(2, Reason.COMMUNICATION)]
    )
    assert (verdict.reason, verdict.detail, verdict.retryable) == (Reason.PREEMPTED, "by job 7", True)


def test_a_result_counts_whatever_the_backend_says_of_the_job() -> None:
    assert decide(0, JobState(Status.FAILED, Reason.NODE, "node went away"), result("done")).status is Status.DONE


def test_a_result_that_a_search_found_enough_is_still_that_after_its_launcher_died() -> None:
    verdict = decide(0, JobState(Status.STOPPED, Reason.CANCELLED), result("done", Reason.MEASURED))
    assert (verdict.status, verdict.reason, verdict.detail) == (Status.DONE, Reason.MEASURED, "words of the result")


ALL = RankReports(tuple({"time": 10.0 + step} for step in range(5)), whole=True)
CRASHED = JobState(Status.FAILED, Reason.ERROR, "the job ended with exit code 1")


@pytest.mark.parametrize("state", [CRASHED, JobState(Status.FAILED, None, "pod 1 failed"), JobState(Status.DONE)])
@pytest.mark.parametrize("ended", [9.0, 11.5, None])
def test_a_rank_that_failed_while_another_went_on_was_no_part_of_what_that_one_measured(state: JobState, ended: float | None) -> None:
    verdict = decide(0, state, result("done"), [failure(1, Reason.OUT_OF_MEMORY) | {"time": ended}], ALL)
    assert (verdict.status, verdict.reason, verdict.detail) == (Status.FAILED, Reason.OUT_OF_MEMORY, "rank 1: words of 1")


@pytest.mark.parametrize("told", [None, ALL], ids=["ours", "another trainer"])
@pytest.mark.parametrize("ended", [12.5, 15.0])
def test_a_rank_that_fails_in_its_shutdown_takes_no_measurement_away_and_is_named(told: RankReports | None, ended: float) -> None:
    verdict = decide(0, CRASHED, result("done"), [failure(1, Reason.ERROR) | {"time": ended}], told)
    assert (verdict.status, verdict.reason, verdict.detail) == (
        Status.DONE, None, "after the last step: rank 1: words of 1; words of the result",
    )  # fmt: skip
    unseen = decide(0, JobState(Status.FAILED, Reason.ERROR, "rank 1 crashed (SIGSEGV)"), result("done"), (), told)
    assert (unseen.status, unseen.detail) == (Status.DONE, "after the last step: rank 1 crashed (SIGSEGV); words of the result")


def test_clocks_that_are_set_do_not_decide_what_came_first_on_one_machine() -> None:
    set_back = RankReports(tuple({"time": 10.0 - step, "clock": f"boot {step}"} for step in range(5)), whole=True)
    early, late = ({"time": when, "clock": clock} for when, clock in ((99.0, "boot 0.5"), (1.0, "boot 9.0")))
    for said, status in ((early, Status.FAILED), (late, Status.DONE)):
        assert decide(0, CRASHED, result("done"), [failure(1, Reason.ERROR) | said], set_back).status is status
    elsewhere = failure(1, Reason.ERROR) | {"time": 99.0, "clock": "another 0.5"}
    assert decide(0, CRASHED, result("done"), [elsewhere], set_back).status is Status.DONE, "by dates"


def test_fewer_steps_than_asked_for_are_no_measurement_where_a_rank_failed() -> None:
    short = RankReports(ALL.lines, whole=False)
    assert decide(0, JobState(Status.DONE), result("done"), (), short).status is Status.DONE
    late = failure(1, Reason.ERROR) | {"time": 15.0}
    assert decide(0, CRASHED, result("done"), [late], short).status is Status.FAILED
    assert decide(0, CRASHED, result("done"), (), short).status is Status.FAILED
    assert decide(0, CRASHED, result("done", Reason.MEASURED), [late], short).status is Status.DONE, "its ranks were ended"


def test_nothing_of_an_older_attempt_is_believed() -> None:
    verdict = decide(1, FAILED, result("done", attempt=0), [failure(0, Reason.OUT_OF_MEMORY, attempt=0)])
    assert (verdict.status, verdict.reason, verdict.attempt) == (Status.FAILED, Reason.ERROR, 1)


def test_an_attempt_that_the_place_itself_began_is_newer_than_ours() -> None:
    verdict = decide(0, JobState(Status.DONE, attempt=2), result("done", attempt=2), [failure(0, Reason.NODE, attempt=1)])
    assert (verdict.status, verdict.attempt) == (Status.DONE, 2)
    stale = decide(0, JobState(Status.FAILED, None, "crashed", attempt=2), result("done", attempt=1))
    assert (stale.status, stale.attempt) == (Status.FAILED, 2)


def test_a_job_that_ends_without_a_word_is_an_error_not_a_success() -> None:
    verdict = decide(0, JobState(Status.DONE), None)
    assert (verdict.status, verdict.reason) == (Status.FAILED, Reason.ERROR)


def test_a_stop_after_a_checkpoint_can_be_resumed_for_the_reason_that_the_place_gives() -> None:
    asked = result("stopped", Reason.PREEMPTED)
    verdict = decide(0, JobState(Status.FAILED, Reason.TIME_LIMIT, "TIMEOUT"), asked)
    assert (verdict.status, verdict.reason, verdict.resumable) == (Status.STOPPED, Reason.TIME_LIMIT, True)
    assert decide(0, JobState(Status.STOPPED), asked).reason is Reason.PREEMPTED


def test_a_time_limit_without_a_checkpoint_is_not_tried_again() -> None:
    assert not decide(0, JobState(Status.FAILED, Reason.TIME_LIMIT), None).retryable


@pytest.mark.parametrize("damage", [{"reason": "no such reason"}, {"reason": 7}, {"rank": "x"}, {"message": None}])
def test_damaged_words_of_a_rank_are_still_a_failure(damage: dict[str, Any]) -> None:
    verdict = decide(0, FAILED, None, [failure(0, Reason.ERROR) | damage])
    assert (verdict.status, verdict.reason) == (Status.FAILED, Reason.ERROR)


def test_a_node_whose_ranks_are_silent_while_others_lost_their_connections_is_suspected() -> None:
    lost = [failure(rank, Reason.COMMUNICATION) for rank in (0, 1, 4)]
    assert silent_nodes(("n1", "n2", "n3"), 6, 0, lost) == ("n2",)
    assert silent_nodes(("n1", "n2", "n3"), 6, 1, lost) == (), "what an older attempt wrote says nothing of this one"
    assert silent_nodes(("n1", "n2"), 4, 0, [failure(0, Reason.OUT_OF_MEMORY)]) == (), "peers of a rank that failed by itself were ended"
    assert silent_nodes((), 4, 0, lost) == ()
