"""Searches on a cluster: the policy proposes trials, the sweep loop runs them, measurements go back to the policy.

The sweep's store is the only state. The policy is a function of the measurements, and trials that have been measured are not run
again, so that the same command continues where a killed search stopped.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Generic

from launcher.backends.pool import Backends
from launcher.config import resolve
from launcher.config.schema import SweepConfig
from launcher.interrupt import Interrupted
from launcher.results.ranking import Measurement, agreeing, compared
from launcher.results.ranking import measurement as as_ranked
from launcher.search.policy import P, Policy, Searchable, SearchTrial, Stop, TrialObservation
from launcher.search.steps import OWN_STEPS, ending, enough_of, known_to, noise_of, scatter_of
from launcher.sweep.observer import Observer
from launcher.sweep.run import Point, run_sweep
from launcher.trials.spent import held_s, lost_s, step_seconds
from launcher.trials.store import Record, Store
from trainer.shared.records.outcome import Reason, Status
from trainer.shared.records.trial_files import PERCENTILES, number, positive, read_steps
from trainer.shared.run.errors import ConfigError

ENDING_S = 10.0
"""Seconds left below which ending a trial is not worthwhile: to stop and clear up takes as long."""

Tell = Callable[[SearchTrial, Record, TrialObservation], None]


@dataclass
class SearchOutcome(Generic[P]):
    """The result of a search. ``trials`` in the order in which they ran."""

    policy: P
    trials: list[tuple[SearchTrial, Record, TrialObservation]] = field(default_factory=list)
    reason: str = ""
    doubt: float | None = None  # probability that an untried layout is faster by more than the tolerance
    likeliest: int | None = None  # the candidate that is most likely to
    unfinished: bool = False
    interrupted: Interrupted | None = None  # why it is unfinished, if it was asked to end


def search(
    name: str,
    problem: Searchable[P],
    backends: Backends,
    overrides: Sequence[str] = (),
    tell: Tell = lambda *_: None,
    observers: Sequence[Observer] = (),
) -> SearchOutcome[P]:
    """Runs the search ``name`` to its end. ``overrides`` are every trial's, besides its layout, for the record."""
    config = problem.config
    found = SearchOutcome(problem.policy())
    backends.of(config.cluster)  # the whole cluster makes the backend: the first trials may be small ones
    store = Store(config.sweep.dir)
    settings = dataclasses.replace(config.sweep, follow=True)
    try:
        while not isinstance(proposed := found.policy.ask(config.search.parallel), Stop):
            enough = enough_of(config.search) if isinstance(found.policy, Policy) else 0.0
            watch = _Watch(store, enough, scatter_of(measured_steps(record) for _, record, _ in found.trials))
            for trial, record, measured in _measure(name, problem, proposed, overrides, settings, watch, backends, observers):
                if not record.status.final:
                    found.unfinished, found.reason = True, "the cluster does not answer; the same command continues"
                    return found
                if any(record.id == earlier.id for _, earlier, _ in found.trials):  # its small trial was as large as the full one
                    measured = dataclasses.replace(measured, gpu_hours=0.0, hours=0.0)
                found.policy.tell(trial, measured)
                found.trials.append((trial, record, measured))
                if isinstance(found.policy, Policy):
                    found.policy.strangers = strangers(found.trials)
                tell(trial, record, measured)
    except Interrupted as request:
        found.unfinished, found.interrupted, found.reason = True, request, f"{request}; the same command continues"
        return found
    found.reason, found.doubt, found.likeliest = proposed.reason, proposed.doubt, proposed.likeliest
    return found


def compared_losses(trials: Sequence[tuple[SearchTrial, Record, TrialObservation]]) -> list[tuple[int, Measurement]]:
    """Each trial's candidate, and its losses held against those of the others."""
    held = compared(as_ranked(record, record.read_result() or {}) for _, record, _ in trials)
    return [(trial.index, one) for (trial, _, _), one in zip(trials, held)]


def strangers(trials: Sequence[tuple[SearchTrial, Record, TrialObservation]]) -> set[int]:
    """Candidates whose losses are not those that most trials agree on. None where most do not: then nobody knows which are right."""
    held = compared_losses(trials)
    return {index for index, one in held if one.other_model} if agreeing(one for _, one in held) else set()


def first_points(problem: Searchable[Any], overrides: Sequence[str] = ()) -> list[Point]:
    """Returns the first trials of a search, for ``dry_run``."""
    proposed = problem.policy().ask(problem.config.search.parallel)
    return [] if isinstance(proposed, Stop) else [_point(problem, trial, overrides) for trial in proposed]


def _measure(
    name: str,
    problem: Searchable[Any],
    trials: Sequence[SearchTrial],
    overrides: Sequence[str],
    settings: SweepConfig,
    watch: _Watch,
    backends: Backends,
    observers: Sequence[Observer],
) -> list[tuple[SearchTrial, Record, TrialObservation]]:
    points = [_point(problem, trial, overrides, watch.reasons) for trial in trials]
    for trial, point in zip(trials, points):
        if point.config is not None:
            watch.cuts[point.trial] = trial.prune_above_s
    started = time.monotonic()
    records = run_sweep(name, points, settings, backends, [watch, *observers])
    hours = (time.monotonic() - started) / 3600 / len(records)
    return [(trial, record, measurement(record, hours, watch.enough, watch.scatter)) for trial, record in zip(trials, records)]


def _point(problem: Searchable[Any], trial: SearchTrial, overrides: Sequence[str], enough: tuple[Reason, ...] = ()) -> Point:
    config = problem.trial_config(trial)
    words, believed = [*overrides, *problem.words(trial)], problem.predicted(trial)
    try:
        predicted = None
        if believed is not None:
            (parts, memory), between = believed, problem.interval(trial)
            predicted = {"step_time_s": float(parts.sum()), "interval_s": between and list(between), "memory_bytes": memory}
        return Point(tuple(words), resolve(config), None, predicted, enough=enough)
    except ConfigError as error:
        return Point(tuple(words), None, str(error))


def measurement(record: Record, hours: float, enough: float = 0.0, scatter: float | None = None) -> TrialObservation:
    """Returns a layout's result from its trial's record; one that was ended early is worth its steps. ``scatter``: of one step."""
    result = record.read_result() or {}
    elapsed = held_s(record)
    spent = elapsed + lost_s(record)
    done = record.status is Status.DONE
    given_up = record.status is Status.STOPPED and record.reason is Reason.CANNOT_WIN
    steps = measured_steps(record) if done or given_up else []
    seconds = float((positive(result.get("step_time_s")) if done else median(steps) if steps else None) or math.inf)
    peak = positive(result.get("peak_memory_bytes")) or 0.0 if done else 0.0
    known = done and record.reason is Reason.MEASURED
    start = math.nan
    if done and math.isfinite(seconds):
        ran = len(result.get("step_times_s") or steps) if known else record.config["run"]["steps"]
        start = max(elapsed - ran * seconds, 0.0)
    reason, gpu_hours = record.reason or Reason.ERROR, record.world_size * spent / 3600
    noise = enough if known and len(steps) < OWN_STEPS else noise_of(steps, scatter)
    answered = served(result) if done else {}
    sizes = phase_times(result) if done else ()
    return TrialObservation(seconds, reason, noise, peak, gpu_hours, hours, start, answered, validations(record), sizes)


def phase_times(result: Mapping[str, Any]) -> tuple[tuple[int, float], ...]:
    """Returns a step of each phase of a training, and the seconds that it took."""
    listed = result.get("phases")
    known = [(one.get("measured_steps"), positive(one.get("step_time_s"))) for one in listed or () if isinstance(one, dict)]
    return tuple((steps[0], seconds) for steps, seconds in known if isinstance(steps, list) and seconds is not None)


def served(result: Mapping[str, Any]) -> dict[str, float]:
    """Medians of an inference; nothing for a training."""
    known = ((name, result.get(name)) for name in PERCENTILES)
    return {name: value for name, shares in known if isinstance(shares, dict) and (value := positive(shares.get("p50")))}


def measured_steps(record: Record) -> list[float]:
    """Step times of the newest attempt after warm-up, in seconds."""
    return step_seconds(record, lambda step: step > _warmup(record))


def validations(record: Record) -> tuple[tuple[int, float], ...]:
    """Returns the steps after which a training was validated, and the losses."""
    lines = read_steps(record.directory) if record.config.get("run", {}).get("eval_every") else []
    return tuple((line["step"], loss) for line in lines if (loss := number(line.get("validation_loss"))) is not None)


def warm_steps(record: Record) -> list[float]:
    """Returns the warm-up steps but the first, which does one-time work."""
    return step_seconds(record, lambda step: 1 < step <= _warmup(record))


def _warmup(record: Record) -> int:
    return int(record.config.get("run", {}).get("warmup_steps", 0))


@dataclass
class _Watch:
    """Gives a trial up as soon as its steps show that it cannot win, and ends one whose step time is known."""

    store: Store
    enough: float  # standard error to which it has to be known; 0: all steps run
    scatter: float | None  # of the steps of earlier trials
    cuts: dict[str, float | None] = field(default_factory=dict)  # by trial id
    asked: set[str] = field(default_factory=set)

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """Reasons for which trials may be ended; the second, once the step time is known well enough."""
        return (Reason.CANNOT_WIN, Reason.MEASURED) if self.enough else (Reason.CANNOT_WIN,)

    def begin(self) -> None:
        """Nothing to do."""

    def on_trial(self, record: Record) -> None:
        """Nothing to do: only steps count."""

    def on_poll(self, records: Sequence[Record]) -> None:
        for record in records:
            if record.id in self.cuts and record.id not in self.asked and (end := self._end(record)):
                self.asked.add(record.id)
                self.store.ask_to_stop(record, *end)

    def _end(self, record: Record) -> tuple[Reason, str] | None:
        """Returns why a trial should end now, if it should."""
        steps, warm, cut = measured_steps(record), warm_steps(record), self.cuts[record.id]
        reason = ending(steps, warm, cut, self.scatter, self.enough)
        run = record.config["run"]
        left = run["steps"] - run["warmup_steps"] - len(steps)
        if reason is Reason.CANNOT_WIN:
            many = "1 step" if len(steps) == 1 else f"{len(steps)} steps"
            return reason, f"{many} of {min(steps):.4g} s at least; the best so far would take {cut:.4g} s"
        if reason is Reason.MEASURED and left * median(steps) >= ENDING_S:
            error = 100 * known_to(steps, self.scatter, warm)
            return reason, f"step time known to {error:.2f} % after {len(steps)} of {len(steps) + left} measured steps"
        return None

    def close(self) -> None:
        """Nothing is held."""
