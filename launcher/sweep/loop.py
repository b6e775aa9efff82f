"""The loop that takes trials from planned to ended: claim, submit, poll, settle; over any backends, many trials at once.

Everything it decides is on disk before it acts on it: a trial is ``submitted`` without a handle before it is submitted, so a
launcher that is killed at any moment leaves a record from which the next one goes on.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from launcher.backends.contract import Backend, BackendError, Request
from launcher.config.schema import ClusterConfig, SweepConfig
from launcher.trials import exclusion
from launcher.trials.exclusion import Exclusion
from launcher.trials.job import Handle, Job, JobState
from launcher.trials.labels import total_steps
from launcher.trials.lock import Locks
from launcher.trials.outcome import Verdict, all_said, decide, silent_nodes
from launcher.trials.store import Record, Store
from trainer.spec import ConfigError, Reason, Status
from trainer.spec.files import look_again, remove_if, write_json_first, write_text
from trainer.spec.records import RESULT, attempt_of, failures_in

log = logging.getLogger(__name__)

TICK_SECONDS = 0.1
_MARK_SECONDS = 0.5
"""How often wishes to stop, and trials that another launcher holds, are looked at."""
_ROOM_SECONDS = 30.0
"""How long a job may hold a part of its room in peace; twice as long each time that it has been withdrawn."""


class Observer(Protocol):
    """Who wants to know: progress, the MLflow mirror, a search."""

    def begin(self) -> None:
        """The sweep is written down, and nothing of it submitted yet."""

    def on_trial(self, record: Record) -> None:
        """A trial has changed its status (or goes on to another attempt)."""

    def on_poll(self, records: Sequence[Record]) -> None:
        """The trials that are submitted or running, after each poll."""

    def close(self) -> None:
        """The sweep has ended."""


@dataclass(eq=False)
class Flight:
    """A trial on its way, with what only this launcher needs to know of it."""

    record: Record
    cluster: ClusterConfig
    backend: Backend
    rerun: bool = False  # measure it again although it has been
    planned: float = field(default_factory=time.time)
    claimed: bool = False
    held_elsewhere: bool = False  # another launcher was running it when we looked first
    tries: int = 0  # attempts used up by faults of the place
    inherited: bool = False  # the attempt was begun by an earlier launcher, whose death is nobody's fault
    stop: tuple[Reason, str] | None = None  # why it is being ended
    first_step: int = 0  # last step known when the attempt began
    result_seen: float | None = None  # monotonic
    position: int = 0  # in the order in which trials are submitted
    room_wanted: float | None = None  # monotonic; since when it waits for room for all of its parts
    room_words: str = ""  # what was said of that
    withdrawals: int = 0
    withdrawn: str = ""  # why its job is being ended, only to be submitted again later

    def job(self, max_parallel: int) -> Job:
        record = self.record
        place = (record.directory, self.cluster, record.world_size)
        return Job(record.id, record.sweep, record.attempt, *place, max_parallel, record.config, record.avoided)

    def exclusions(self) -> list[Exclusion]:
        """Nodes that an attempt should leave out now."""
        return exclusion.exclusions(self.record.history, self.cluster.avoid_s, time.time())

    @property
    def settled(self) -> bool:
        """Nothing to run: the record answers, or another launcher ran the trial while this one waited."""
        if self.record.status.final and (self.record.ended or 0.0) > self.planned:
            return True
        return self.record.answered and not self.rerun

    @property
    def under_way(self) -> bool:
        """Submitted, by this launcher or an earlier one, and not known to have ended."""
        return self.record.status in (Status.SUBMITTED, Status.RUNNING)

    def last_step(self) -> int:
        step = (self.record.last_step() or {}).get("step", 0)
        return step if isinstance(step, int) else 0


class Loop:
    """One run of a sweep's trials. ``interrupted`` may be set at any time, by a signal handler say: why it has to end, in words."""

    def __init__(
        self,
        store: Store,
        locks: Locks,
        settings: SweepConfig,
        sweep: str,
        launcher: str,
        observers: Sequence[Observer] = (),
        reading: bool = False,
    ):
        self.interrupted = ""
        self._reading = reading  # nothing may be ended or removed: what is left of ended jobs is noted for whoever may
        self._store, self._locks, self._settings = store, locks, settings
        self._sweep, self._launcher, self._observers = sweep, launcher, observers
        self._waiting: list[Flight] = []
        self._flying: list[Flight] = []
        self._polled: dict[int, float] = {}  # when each backend was asked last, by id()
        self._marks_read = float("-inf")

    def run(self, flights: Iterable[Flight]) -> None:
        """Until all have ended; with ``sweep.follow=false`` until all that may be submitted are."""
        self._waiting = sorted(flights, key=lambda flight: not flight.under_way)
        for position, flight in enumerate(self._waiting):
            flight.position = position
        while self._waiting or self._flying:
            self._obey()
            self._launch()
            if not self._settings.follow:
                return
            if self._poll():
                continue
            if self.interrupted and all(flight.backend.outlives_launcher for flight in self._flying):
                return
            time.sleep(TICK_SECONDS)

    def catch_up(self, flights: Iterable[Flight]) -> None:
        """One look at trials under way that no launcher follows: settle those that have ended. Nothing is submitted.

        ``BackendError`` names the places that could not be asked, when all others have been.
        """
        silent: list[str] = []
        for backend, group in _by_backend([flight for flight in flights if self._claim(flight) and flight.under_way]):
            try:
                self._adopt(backend, group)
                self._ask(backend, [flight for flight in group if flight in self._flying])
            except (BackendError, ConfigError) as error:
                silent.append(str(error))
        if silent:
            raise BackendError("; ".join(dict.fromkeys(silent)))

    def end(self, flights: Iterable[Flight]) -> list[Record]:
        """Stop trials that no launcher runs. Those that another launcher holds are returned."""
        flights = list(flights)
        claimed = [flight for flight in flights if self._claim(flight)]
        for flight in claimed:
            self._tidy(flight)
            if flight.record.status.final:
                self._release(flight)
        self._end([flight for flight in claimed if not flight.record.status.final], Reason.CANCELLED, "")
        left = [flight.record for flight in flights if flight not in claimed]
        while self._flying:
            if not self._poll():
                time.sleep(TICK_SECONDS)
            self._stop(self._flying, Reason.CANCELLED, "")  # those whose place did not answer
        return left

    # -- stopping -------------------------------------------------------------------------------------------------------

    def _obey(self) -> None:
        """Act on an interruption and on the marks that ``Store.ask_to_stop`` left."""
        if self.interrupted:
            self._waiting = []
            self._stop([f for f in self._flying if not f.backend.outlives_launcher], Reason.CANCELLED, self.interrupted)
        if time.monotonic() - self._marks_read < _MARK_SECONDS:
            return
        self._marks_read = time.monotonic()
        stops = self._store.stops()
        for wish in dict.fromkeys(stops.values()):
            wanted = [flight for flight in [*self._waiting, *self._flying] if stops.get(flight.record.id) == wish]
            self._stop([flight for flight in wanted if flight in self._flying], *wish)
            begun = [f for f in wanted if f in self._waiting and self._claim(f)]  # otherwise whoever runs it obeys
            self._waiting = [flight for flight in self._waiting if flight not in begun]
            self._end(begun, *wish)

    def _end(self, flights: Sequence[Flight], reason: Reason, detail: str) -> None:
        """Stop claimed trials that this launcher has not begun: they may be done, or left under way by an earlier launcher."""
        lost: list[Flight] = []
        for backend, group in _by_backend([flight for flight in flights if not flight.settled and flight.under_way]):
            missing = self._adopt(backend, group)
            lost += missing
            self._stop([flight for flight in group if flight not in missing], reason, detail)
        for flight in flights:
            if flight in lost or not (flight.settled or flight.under_way):
                self._finish(flight, Verdict(Status.STOPPED, reason, detail, flight.record.attempt))
            elif flight.settled:
                self._release(flight)

    def _stop(self, flights: Sequence[Flight], reason: Reason, detail: str) -> None:
        for _, group in _by_backend([flight for flight in flights if flight.stop is None]):
            if self._cancel(group):
                for flight in group:
                    flight.stop = (reason, detail)

    def _cancel(self, flights: Sequence[Flight]) -> bool:
        """End jobs of one place, all at once. False when it does not answer now; it is asked again as long as there is a reason to."""
        try:
            flights[0].backend.cancel([_handle(flight) for flight in flights])
        except BackendError as error:
            self._note(flights, str(error))
            return False
        return True

    # -- submitting -----------------------------------------------------------------------------------------------------

    def _launch(self) -> None:
        """Claim and submit as many waiting trials, in order, as there is room for."""
        batch: list[Flight] = []
        for flight in list(self._waiting):
            if not self._room(flight, batch) or self._held_back(flight, batch):
                break
            if flight.claimed and flight.under_way and not self._due(flight.backend):
                continue  # it did not answer a moment ago
            if not self._claim(flight):
                self._say_who_runs(flight)
                continue
            self._waiting.remove(flight)
            self._tidy(flight)
            if flight.settled:
                self._release(flight)
                self._tell(flight.record)
            else:
                batch.append(flight)
        fresh = [f for f in batch if not f.under_way]
        for backend, flights in _by_backend([f for f in batch if f.under_way]):
            try:
                fresh += self._adopt(backend, flights)
            except BackendError as error:
                self._ask_later(backend, flights, str(error))
        for backend, flights in _by_backend(fresh):
            self._submit(backend, flights)

    def _room(self, flight: Flight, batch: Sequence[Flight]) -> bool:
        """Whether one more trial may run: ``sweep.max_parallel``, and the ranks that the place can hold."""
        limit = 0 if flight.backend.throttles else self._limit(flight.backend)
        capacity = flight.backend.capacity()
        if not limit and capacity is None:
            return True
        beside = [f for f in (*self._flying, *batch) if f.backend is flight.backend]
        if limit and len(beside) >= limit:
            return False
        return capacity is None or not beside or sum(f.record.world_size for f in (*beside, flight)) <= capacity

    def _held_back(self, flight: Flight, batch: Sequence[Flight]) -> bool:
        """Whether its place wants other jobs to find their room first."""
        beside = (self._job(f) for f in (*self._flying, *batch) if f.backend is flight.backend)
        return not flight.under_way and bool(flight.backend.admits(self._job(flight), beside))

    def _claim(self, flight: Flight) -> bool:
        """Lock the trial against other launchers and read what they have made of it."""
        if not flight.claimed:
            if not self._locks.take(flight.record.id):
                return False
            flight.claimed = True
            _refresh(flight.record, self._store.load(flight.record.id))
        return True

    def _say_who_runs(self, flight: Flight) -> None:
        """Once for each trial that another launcher holds; it is looked at again until that one lets go."""
        if not flight.held_elsewhere:
            holder = self._store.load(flight.record.id)
            words = f"{holder.launcher or 'another launcher'} for sweep {holder.sweep or '?'}"
            log.warning("trial %s is being run by %s; waiting for it", flight.record.id, words)
            flight.held_elsewhere = True

    def _adopt(self, backend: Backend, flights: Sequence[Flight]) -> list[Flight]:
        """Take over trials that an earlier launcher left under way; those that were never submitted are returned."""
        lost = [f for f in flights if f.record.handle is None]
        found = backend.find([self._job(f) for f in lost]) if lost else {}
        missing = []
        for flight in flights:
            flight.record.handle = flight.record.handle or found.get(self._job(flight).name)
            if flight.record.handle is None:
                # Ranks that end with their launcher may still be ending: only another attempt is fenced against them.
                flight.record.attempt += 0 if backend.outlives_launcher else 1
                missing.append(flight)
            else:
                flight.inherited = True
        self._take_off([flight for flight in flights if flight.record.handle is not None])
        return missing

    def _submit(self, backend: Backend, flights: Sequence[Flight]) -> None:
        """Write down the intent, submit, write down the handles."""
        requests = []
        ready = []
        for flight in flights:
            try:
                _check_fits(flight)
                requests.append(self._intend(flight))
                ready.append(flight)
            except ConfigError as error:
                self._finish(flight, Verdict(Status.FAILED, Reason.CONFIGURATION, str(error), flight.record.attempt))
        if not requests:
            return
        self._store.save_all([flight.record for flight in ready])
        try:
            handles: list[Handle | None] = [*backend.submit(requests)]
        except (ConfigError, BackendError) as error:
            try:
                found = backend.find([request.job for request in requests])
            except BackendError as silence:  # whether they were started is found out when somebody answers
                self._ask_later(backend, ready, str(silence))
                return
            handles = [found.get(request.job.name) for request in requests]
            failure = JobState(Status.FAILED, Reason.CONFIGURATION if isinstance(error, ConfigError) else Reason.CANNOT_START, str(error))
        for flight, handle in zip(ready, handles, strict=True):
            flight.record.handle = handle
        self._take_off([flight for flight in ready if flight.record.handle is not None])
        for flight in [flight for flight in ready if flight.record.handle is None]:
            self._settle(flight, failure)

    def _ask_later(self, backend: Backend, flights: Sequence[Flight], detail: str) -> None:
        """Put trials back that were, or may have been, submitted to a place that does not answer now."""
        self._polled[id(backend)] = time.monotonic()
        self._note(flights, detail)
        self._waiting[:0] = flights

    def _intend(self, flight: Flight) -> Request:
        """Render the next attempt of a trial; its record, not saved yet, says that it is about to be submitted."""
        record = flight.record
        record.attempt += 1 if record.status.final else 0  # what an earlier attempt left is never taken for this one's
        self._choose_nodes(flight)
        request = flight.backend.render(self._job(flight))
        write_text(request.job.request_path, request.text)
        for name, text in request.files.items():
            write_text(record.directory / name, text)
        record.status, record.reason, record.detail = Status.SUBMITTED, None, record.avoided_words
        record.handle, record.launcher, record.sweep = None, self._launcher, self._sweep
        record.submitted, record.started, record.ended, record.nodes = time.time(), None, None, ()
        record.end_seen = None
        flight.first_step, flight.result_seen, flight.inherited = flight.last_step(), None, False
        return request

    def _choose_nodes(self, flight: Flight) -> None:
        """Decide which nodes the next attempt leaves out."""
        record, wanted = flight.record, flight.exclusions()

        def possible(nodes: tuple[str, ...]) -> bool:
            return flight.backend.can_place(replace(self._job(flight), avoid=nodes))

        chosen = exclusion.choose(wanted, possible)
        record.avoided, record.avoided_words = exclusion.names(chosen), exclusion.words(wanted, chosen)

    def _readmit(self, flight: Flight) -> None:
        """Let a job that waits use nodes again whose exclusion has ended meanwhile."""
        record = flight.record
        left = [e for e in flight.exclusions() if e.node in record.avoided]
        if len(left) == len(record.avoided):
            return
        if flight.backend.readmit(replace(self._job(flight), avoid=exclusion.names(left)), _handle(flight)):
            record.avoided, record.avoided_words = exclusion.names(left), exclusion.words(left, left)
            self._store.save(record)

    def _take_off(self, flights: Sequence[Flight]) -> None:
        for flight in flights:
            flight.record.launcher = self._launcher
        self._store.save_all([flight.record for flight in flights])
        for flight in flights:
            self._flying.append(flight)
            self._tell(flight.record)

    # -- following ------------------------------------------------------------------------------------------------------

    def _poll(self) -> bool:
        """Ask each backend that is due; True when a trial ended, so that there may be room for another."""
        ended = False
        asked = False
        for backend, flights in _by_backend(self._flying):
            if not self._due(backend):
                continue
            asked = True
            ended |= self._ask(backend, flights)
        if asked:
            for observer in self._observers:
                observer.on_poll([flight.record for flight in self._flying])
        return ended

    def _ask(self, backend: Backend, flights: Sequence[Flight]) -> bool:
        """Ask one backend how its trials stand; True when one of them ended."""
        self._polled[id(backend)] = time.monotonic()
        try:
            states = backend.poll([_handle(flight) for flight in flights])
        except BackendError as error:  # nobody answers now: no reason to think that anything has changed
            self._note(flights, str(error))
            return False
        ended = [self._update(flight, state) for flight, state in zip(flights, states, strict=True)]
        return any(ended)

    def _due(self, backend: Backend) -> bool:
        return time.monotonic() - self._polled.get(id(backend), float("-inf")) >= backend.poll_seconds

    def _update(self, flight: Flight, state: JobState) -> bool:
        """Note how a trial stands; True when it has ended."""
        record = flight.record
        if state.attempt is not None and state.attempt > record.attempt:
            record.attempt = state.attempt
        if state.status.final and self._unheard(flight, state):
            return False
        if state.status.final or (not self._reading and (self._lingers(flight, state) or self._waits_too_long(flight, state))):
            try:
                flight.backend.collect(self._job(flight), _handle(flight), remove=not self._reading)
            except BackendError as error:  # it has ended, but its result is out of reach: look again later
                self._note([flight], str(error))
                return False
            if self._reading and flight.backend.leaves_objects:
                record.left.append({"attempt": record.attempt, "handle": _handle(flight)})
            self._flying.remove(flight)
            self._settle(flight, state)
            return True
        if not self._reading:
            self._watch_room(flight, state)
        if state.status is Status.SUBMITTED and record.avoided_words and not self._reading:
            self._readmit(flight)
            state = replace(state, detail="; ".join(filter(None, [state.detail, record.avoided_words])))
        seen = (state.status, state.started or record.started, state.nodes or record.nodes, state.detail)
        if seen != (record.status, record.started, record.nodes, record.detail):
            changed = record.status is not state.status
            record.status, record.started, record.nodes, record.detail = seen
            self._store.save(record)
            if changed:
                self._tell(record)
        return False

    def _unheard(self, flight: Flight, state: JobState) -> bool:
        """A job that has ended, with more to be heard of its ranks: a file system that machines share may show late what they wrote."""
        record, patience = flight.record, flight.backend.visibility_s
        if not patience or flight.stop is not None or not (record.started or state.started or state.nodes):
            return False
        look_again(record.directory)
        if self._heard(flight, state):
            return False
        if record.end_seen is None:
            record.end_seen, record.detail = time.time(), "its job has ended; what its ranks wrote is not to be seen here yet"
            self._store.save(record)
        return time.time() - record.end_seen < patience

    @staticmethod
    def _heard(flight: Flight, state: JobState) -> bool:
        """Whether everything is there that the ranks may have written."""
        record, result = flight.record, flight.record.result()
        if result is not None and result.get("status") == Status.DONE.value:
            return flight.last_step() >= (total_steps(record) or 0)
        return all_said(record.attempt, state, result, failures_in(record.directory))

    def _watch_room(self, flight: Flight, state: JobState) -> None:
        """Say so when a trial waits for room for long, and withdraw it when one that came before it waits as well."""
        if not state.waits_for_room or flight.stop is not None or flight.withdrawn:
            flight.room_wanted = None
            return
        if flight.room_wanted is None:
            flight.room_wanted = time.monotonic()
        if time.monotonic() - flight.room_wanted < _ROOM_SECONDS * 2 ** min(flight.withdrawals, 6):
            return
        words = f"trial {flight.record.id} waits for room for all of its parts ({state.detail})"
        if words != flight.room_words:
            flight.room_words = words
            remedy = "it is withdrawn and submitted again later" if state.yields else "cluster.start_timeout would give it up"
            log.warning("%s; %s", words, remedy)
        if state.yields and self._cancel([flight]):
            flight.withdrawn, flight.withdrawals = state.detail, flight.withdrawals + 1

    def _lingers(self, flight: Flight, state: JobState) -> bool:
        """A job whose result has been there for a while and that does not end; it is ended, unless all that is left is its place's to do."""
        if state.status is not Status.RUNNING or flight.record.result() is None:
            flight.result_seen = None  # it may have been that of an attempt before a requeue
            return False
        flight.result_seen = flight.result_seen or time.monotonic()
        if time.monotonic() - flight.result_seen < flight.cluster.linger_s:
            return False
        return state.clearing_up or self._cancel([flight])

    def _waits_too_long(self, flight: Flight, state: JobState) -> bool:
        """A job that did not start within ``cluster.start_timeout`` is given up, as one that cannot start."""
        limit, since = flight.cluster.start_timeout, flight.record.submitted or time.time()
        if state.status is not Status.SUBMITTED or flight.record.started or not limit or time.time() - since < limit:
            return False
        words = f": {state.detail}" if state.detail else ""
        flight.stop = (Reason.CANNOT_START, f"did not start within cluster.start_timeout={limit:g} s{words}")
        return self._cancel([flight])

    def _note(self, flights: Sequence[Flight], detail: str) -> None:
        """Record words about trials that go on as they are."""
        for flight in flights:
            if flight.record.detail != detail:
                flight.record.detail = detail
                self._store.save(flight.record)

    # -- ending ---------------------------------------------------------------------------------------------------------

    def _settle(self, flight: Flight, state: JobState) -> None:
        """Judge an ended attempt: finish the trial, or put it back for another attempt."""
        record = flight.record
        failures = failures_in(record.directory)
        verdict = decide(record.attempt, state, record.result(), failures)
        if flight.withdrawn and flight.stop is None and verdict.status is not Status.DONE:
            self._plan_again(flight)
            return
        bad_nodes = state.bad_nodes or silent_nodes(state.nodes or record.nodes, record.world_size, verdict.attempt, failures)
        if self.interrupted and verdict.retryable and not flight.backend.outlives_launcher:
            flight.stop = flight.stop or (Reason.CANCELLED, self.interrupted)  # there is nobody to try again
        if flight.stop is not None and verdict.status is not Status.DONE:
            reason, detail = flight.stop
            status = Status.FAILED if reason is Reason.CANNOT_START else Status.STOPPED
            verdict = Verdict(status, reason, detail or verdict.detail, verdict.attempt)
        elif self._try_again(flight, verdict):
            self._remember(record, verdict, bad_nodes)
            record.attempt, record.status = verdict.attempt + 1, Status.PLANNED
            record.reason, record.detail, record.handle = verdict.reason, verdict.detail, None
            record.submitted, record.started, record.nodes = None, None, ()
            self._store.save(record)
            self._tell(record)
            self._waiting.insert(0, flight)
            return
        self._finish(flight, verdict, bad_nodes)

    def _plan_again(self, flight: Flight) -> None:
        """Put a withdrawn trial back in its place. It has not run: the same attempt is submitted again."""
        record = flight.record
        record.attempt += 1 if record.result() is not None else 0  # unless it has, in the last moment
        record.status, record.reason, record.detail, record.handle = Status.PLANNED, None, flight.withdrawn, None
        record.submitted, record.started, record.nodes = None, None, ()
        flight.withdrawn, flight.room_wanted = "", None
        self._store.save(record)
        self._tell(record)
        self._waiting = sorted([*self._waiting, flight], key=lambda f: f.position)

    def _try_again(self, flight: Flight, verdict: Verdict) -> bool:
        """Whether another attempt is due. Attempts that an earlier launcher left, and those that moved on, are not counted."""
        if not verdict.retryable:
            return False
        if flight.inherited or (verdict.resumable and flight.last_step() > flight.first_step):
            return True
        flight.tries += 1
        return flight.tries <= self._settings.retries

    def _finish(self, flight: Flight, verdict: Verdict, bad_nodes: Sequence[str] = ()) -> None:
        record = flight.record
        verdict = self._sign(record, verdict)
        record.status, record.reason, record.detail = verdict.status, verdict.reason, verdict.detail
        record.attempt, record.ended = verdict.attempt, time.time()
        self._remember(record, verdict, bad_nodes)
        self._store.save(record)
        self._release(flight)
        self._tell(record)

    @staticmethod
    def _sign(record: Record, verdict: Verdict) -> Verdict:
        """Write the result of an attempt whose ranks wrote none. What they wrote after all is left as it is, and counts."""
        if verdict.status is Status.DONE or record.result() is not None:
            return verdict
        outcome = {"status": verdict.status.value, "reason": verdict.reason and verdict.reason.value, "message": verdict.detail}
        path = record.directory / RESULT
        for _ in range(3):
            if write_json_first(path, outcome | {"attempt": verdict.attempt, "world_size": record.world_size}):
                break
            look_again(record.directory)
            if (late := record.result()) is not None:
                return decide(verdict.attempt, JobState(verdict.status, verdict.reason, verdict.detail), late)
            remove_if(path, lambda older: attempt_of(older or {}) < record.attempt)
        return verdict

    def _tidy(self, flight: Flight) -> None:
        """Remove what commands that only read have left of ended attempts."""
        record = flight.record
        try:
            while record.left:
                old = record.left[-1]
                job = dataclasses.replace(self._job(flight), attempt=old["attempt"])
                flight.backend.collect(job, old["handle"])
                record.left.pop()
                self._store.save(record)
        except BackendError as error:  # it harms nobody: the next command tries again
            log.warning("what is left of trial %s cannot be removed now: %s", record.id, error)

    def _release(self, flight: Flight) -> None:
        self._store.forget_stop(flight.record)
        self._locks.free(flight.record.id)
        flight.claimed = False

    @staticmethod
    def _remember(record: Record, verdict: Verdict, bad_nodes: Sequence[str]) -> None:
        reason = verdict.reason.value if verdict.reason else None
        entry = {"attempt": verdict.attempt, "status": verdict.status.value, "reason": reason, "detail": verdict.detail}
        times = {"started": record.started or record.submitted, "ended": time.time()}
        record.history.append(entry | times | {"nodes": list(record.nodes), "bad_nodes": list(bad_nodes)})

    def _job(self, flight: Flight) -> Job:
        return flight.job(self._limit(flight.backend))

    def _limit(self, backend: Backend) -> int:
        """Trials that may run at once; 0 = any number. A queue gives every job resources of its own, one machine does not."""
        given = self._settings.max_parallel
        return given if given is not None else 0 if backend.outlives_launcher else 1

    def _tell(self, record: Record) -> None:
        for observer in self._observers:
            observer.on_trial(record)


def _handle(flight: Flight) -> Handle:
    assert flight.record.handle is not None, "a trial in flight has a handle"
    return flight.record.handle


def _check_fits(flight: Flight) -> None:
    capacity, needed = flight.backend.capacity(), flight.record.world_size
    if capacity is not None and needed > capacity:
        raise ConfigError(f"the layout needs {needed} ranks, and cluster.max_processes={capacity} allows fewer at once; raise it")


def _by_backend(flights: Sequence[Flight]) -> list[tuple[Backend, list[Flight]]]:
    groups: dict[int, tuple[Backend, list[Flight]]] = {}
    for flight in flights:
        groups.setdefault(id(flight.backend), (flight.backend, []))[1].append(flight)
    return list(groups.values())


_OF_ATTEMPTS = (
    "status", "reason", "detail", "attempt", "handle", "submitted", "started", "ended", "end_seen", "nodes", "history", "avoided",
    "avoided_words", "left",
)  # fmt: skip
"""What a record says of a trial's attempts; the rest is what the plan says of the trial."""


def _refresh(record: Record, stored: Record) -> None:
    """Take over what another launcher wrote."""
    for name in _OF_ATTEMPTS:
        setattr(record, name, getattr(stored, name))
