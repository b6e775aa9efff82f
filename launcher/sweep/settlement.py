"""Settles ended jobs: a result, another attempt, or a place in the queue again."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from launcher.sweep.active_trial import ActiveTrial
from launcher.sweep.state import SweepState
from launcher.trials.job import JobState
from launcher.trials.labels import total_steps
from launcher.trials.outcome import RankReports, Verdict, decide, silent_nodes
from launcher.trials.store import Record
from trainer.shared.records.outcome import Reason, Status
from trainer.shared.records.summary import ends_short, result_of
from trainer.shared.records.trial_files import FORMAT, RESULT, SERIES, attempt_of, failures_in, outcome_of, positive, read_steps
from trainer.shared.run import steady
from trainer.shared.run.files import look_again, remove_if, write_json, write_json_first
from trainer.shared.run.read import SECTION, from_record
from trainer.shared.run.resolved import ResolvedTrainConfig

_OF_LAYOUT = (Reason.OUT_OF_MEMORY, Reason.HOST_MEMORY, Reason.NUMERICS)
"""Reasons that say more of a layout than that its step time was known when it was ended."""


class Settlement:
    """Judges ended attempts and records their outcome."""

    def __init__(self, state: SweepState):
        self._state = state

    def settle(self, trial: ActiveTrial, job: JobState) -> None:
        """Judges an ended attempt: finishes the trial, or requeues it for another attempt."""
        record = trial.record
        record.started, record.nodes = job.started or record.started, job.nodes or record.nodes
        verdict, failures = _judge(record, job), failures_in(record.directory)
        if trial.stop is None and verdict.status is not Status.DONE:
            if verdict.reason is Reason.UPSTREAM and trial.needs and trial.lost is None:
                trial.withdrawn = trial.withdrawn or "its dependency was retried"
            if trial.withdrawn:
                self.submit_later(trial)
                return
        if verdict.reason is Reason.UPSTREAM and trial.lost is not None:
            verdict = replace(verdict, detail=trial.lost_words)
        bad_nodes = job.bad_nodes or silent_nodes(job.nodes or record.nodes, record.world_size, verdict.attempt, failures)
        if self._state.interrupted and verdict.retryable and not trial.backend.outlives_launcher:
            trial.stop = trial.stop or (Reason.CANCELLED, self._state.interrupted)  # no launcher is left to retry it
        if trial.stop is not None and verdict.status is not Status.DONE:
            verdict = _stopped(trial.stop, verdict)
            if verdict.reason is Reason.MEASURED:
                verdict = _measured(record, verdict)
        elif self._retry_due(trial, verdict):
            self._retry(trial, verdict, bad_nodes)
            return
        self.finish(trial, verdict, bad_nodes)

    def finish(self, trial: ActiveTrial, verdict: Verdict, bad_nodes: Sequence[str] = ()) -> None:
        """Records the verdict and releases the trial."""
        record = trial.record
        verdict = _sign(record, verdict)
        record.status, record.reason, record.detail = verdict.status, verdict.reason, verdict.detail
        record.attempt, record.ended = verdict.attempt, time.time()
        _add_to_history(record, verdict, bad_nodes)
        self._state.store.save(record)
        self._state.release(trial)
        self._state.tell(record)

    def _retry_due(self, trial: ActiveTrial, verdict: Verdict) -> bool:
        """Returns whether another attempt is due. Adopted attempts, and those that made progress, do not count."""
        if not verdict.retryable:
            return False
        if trial.inherited or (verdict.resumable and trial.read_last_step() > trial.first_step):
            return True
        trial.tries += 1
        return trial.tries <= self._state.settings.retries

    def _retry(self, trial: ActiveTrial, verdict: Verdict, bad_nodes: Sequence[str]) -> None:
        record = trial.record
        _add_to_history(record, verdict, bad_nodes)
        record.attempt = verdict.attempt + 1
        _plan_again(record, verdict.reason, verdict.detail)
        self._state.save_and_tell(record)
        self._state.waiting.insert(0, trial)

    def wait_for_room(self, trials: Sequence[ActiveTrial], detail: str) -> None:
        """Puts trials back in their places of which their backend has taken nothing, and will when it has fewer jobs."""
        for trial in trials:
            _plan_again(trial.record, None, detail)
        self._state.store.save_all([trial.record for trial in trials])
        self._state.waiting = sorted([*self._state.waiting, *trials], key=lambda t: t.position)

    def submit_later(self, trial: ActiveTrial) -> None:
        """Puts a trial back in its place that was withdrawn, or never submitted. It has not run: the same attempt is submitted again."""
        record = trial.record
        known = trial.backend.chains  # its queue has heard of this attempt, and would find its job again
        record.attempt += 1 if known or record.read_result() is not None else 0  # unless it finished at the last moment
        _plan_again(record, None, trial.withdrawn)
        trial.withdrawn, trial.room_wanted = "", None
        self._state.save_and_tell(record)
        self._state.waiting = sorted([*self._state.waiting, trial], key=lambda t: t.position)


def _stopped(stop: tuple[Reason, str], verdict: Verdict) -> Verdict:
    """The verdict on an attempt that the launcher itself ended."""
    reason, detail = stop
    if reason is Reason.MEASURED and verdict.reason in _OF_LAYOUT:
        return verdict
    status = Status.FAILED if reason in (Reason.CANNOT_START, Reason.UPSTREAM) else Status.STOPPED
    return Verdict(status, reason, detail or verdict.detail, verdict.attempt)


def _measured(record: Record, verdict: Verdict) -> Verdict:
    """Marks an attempt with enough steps done. Its result is rank 0's; without a step time there, the steps'."""
    record.attempt = verdict.attempt
    result = record.read_result() or {}
    if positive(result.get("step_time_s")) is None:
        result = _told(record)
    if positive(result["step_time_s"]) is None:
        return verdict
    done = {"status": Status.DONE.value, "reason": Reason.MEASURED.value, "message": verdict.detail}
    write_json(record.directory / RESULT, {"format": FORMAT} | result | done)
    return replace(verdict, status=Status.DONE)


def _told(record: Record) -> dict[str, Any]:
    """A result from ``metrics.jsonl`` alone."""
    config = from_record(ResolvedTrainConfig, {name: value for name, value in record.config.items() if name != SECTION})
    steps = [step for step in read_steps(record.directory) if step.get("attempt") == record.attempt]
    series = {many: [step.get(one) for step in steps] for many, one in SERIES.items()}
    told = {step["step"]: seconds for step in steps if (seconds := positive(step.get("step_time_s")))}
    after = {step: seconds for step, seconds in told.items() if step > config.run.warmup_steps}
    return result_of(config, Status.STOPPED, record.attempt, series, after, record.world_size, None)


def _judge(record: Record, job: JobState) -> Verdict:
    """The verdict on an ended attempt, by all that its ranks wrote. A result that says "done" and is not believed says so from then on."""
    result = record.read_result()
    steps = read_steps(record.directory) if result is not None and record.config.get("command") else None
    told = None if steps is None else _steps_told(record, [step for step in steps if step.get("attempt") == attempt_of(result or {})])
    verdict = decide(record.attempt, job, result, failures_in(record.directory), told)
    believed = result is None or outcome_of(result)[0] is not Status.DONE or verdict.status is Status.DONE
    if result is not None and not believed and attempt_of(result) == verdict.attempt:
        said = {"status": verdict.status.value, "reason": verdict.reason and verdict.reason.value, "message": verdict.detail}
        write_json(record.directory / RESULT, {"format": FORMAT} | result | said)
    return verdict


def _steps_told(record: Record, steps: Sequence[dict[str, Any]]) -> RankReports:
    return RankReports(tuple(steps), not ends_short([step["step"] for step in steps], total_steps(record) or 0))


def _plan_again(record: Record, reason: Reason | None, detail: str) -> None:
    record.status, record.reason, record.detail, record.handle = Status.PLANNED, reason, detail, None
    record.submitted, record.started, record.nodes = None, None, ()


def _sign(record: Record, verdict: Verdict) -> Verdict:
    """Writes the result of an attempt whose ranks wrote none. If they have written one after all, it is kept, and it counts."""
    if verdict.status is Status.DONE or record.read_result() is not None:
        return verdict
    outcome = {"status": verdict.status.value, "reason": verdict.reason and verdict.reason.value, "message": verdict.detail}
    path = record.directory / RESULT
    for _ in range(3):
        if write_json_first(path, {"format": FORMAT, **outcome, "attempt": verdict.attempt, "world_size": record.world_size}):
            break
        look_again(record.directory)
        if record.read_result() is not None:
            return _judge(record, JobState(verdict.status, verdict.reason, verdict.detail, attempt=verdict.attempt))
        remove_if(path, lambda older: attempt_of(older or {}) < record.attempt)
    return verdict


def note_earlier(record: Record, job: JobState) -> bool:
    """Records attempts that the backend itself ended and restarted; returns whether there was one."""
    begun_anew = Verdict(Status.STOPPED, Reason.PREEMPTED, "ended and begun anew by its place", record.attempt)
    seen = {record.attempt: _entry(record, begun_anew, ())} if (job.attempt or 0) > record.attempt and record.started else {}
    told = {
        end.attempt: _entry(record, Verdict(end.status, end.reason, end.detail, end.attempt), (), end)
        for end in job.earlier
        if end.attempt is not None
    }
    known = {entry.get("attempt", 0): entry for entry in record.history}
    merged = seen | known | told
    if merged == known:
        return False
    record.history = [merged[attempt] for attempt in sorted(merged)]
    return True


def _add_to_history(record: Record, verdict: Verdict, bad_nodes: Sequence[str]) -> None:
    record.history.append(_entry(record, verdict, bad_nodes))


def _entry(record: Record, verdict: Verdict, bad_nodes: Sequence[str], told: JobState | None = None) -> dict[str, Any]:
    """Returns an attempt for the history; ``told``: the backend's report, else it has ended just now."""
    reason = verdict.reason.value if verdict.reason else None
    entry = {"attempt": verdict.attempt, "status": verdict.status.value, "reason": reason, "detail": verdict.detail}
    now = {"started": record.started, "ended": time.time(), "clock": steady.mark()}
    times = now if told is None else {"started": told.started, "ended": told.ended}
    return entry | times | {"nodes": list(record.nodes if told is None else told.nodes), "bad_nodes": list(bad_nodes)}
